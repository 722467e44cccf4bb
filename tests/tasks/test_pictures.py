"""Pictures in rows of data: in each form that data have them, and refused by name where they are
none.
"""

import asyncio
import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from agentrl.config import load_config
from agentrl.envs.qa import QuestionAnswer
from agentrl.errors import ConfigError
from agentrl.protocols import Observation
from agentrl.runs.task_sources import fingerprints
from agentrl.tasks.dataset import DatasetTasks
from agentrl.tasks.rows import BadRowError, as_line
from agentrl.tokens.encoded_image import EncodedImage

RED, BLUE = (
    EncodedImage.of_pixels(np.full((2, 3, 3), colour, np.uint8))
    for colour in ([200, 0, 0], [0, 0, 200])
)
IMAGE, QUESTION = {"type": "image"}, {"type": "text", "text": "Which colour?"}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts) if len(parts) > 1 else parts[0]}


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path: Path, *rows: Any) -> Path:
    pq.write_table(pa.Table.from_pylist([*rows]), path)
    return path


def tasks(data: Path, **settings: Any) -> DatasetTasks:
    return DatasetTasks(DatasetTasks.Config(data=str(data), held_out=0.0, **settings), "qa", seed=0)


def shown(data: Path, **settings: Any) -> tuple[str, list[EncodedImage]]:
    """What the only task of some data shows."""
    task = tasks(data, **settings).task(0)
    json.dumps(task.options)  # as workers and files of trajectories get them
    env = QuestionAnswer()
    observation, _ = asyncio.run(env.reset(seed=0, options=task.options))
    if isinstance(observation, str):
        return observation, []
    return observation.text, [*observation.images]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shots").mkdir()
    (tmp_path / "shots" / "red.png").write_bytes(RED.data)
    (tmp_path / "shots" / "blue.png").write_bytes(BLUE.data)
    return tmp_path


RED_FILE, BLUE_FILE = "shots/red.png", "shots/blue.png"
FORMS: dict[str, dict[str, Any]] = {
    "paths": {"prompt": "Which colour?", "images": [RED_FILE, BLUE_FILE]},
    "addresses": {"prompt": "Which colour?", "images": [RED.address, BLUE.address]},
    "mappings of datasets": {
        "prompt": "Which colour?",
        "images": [{"bytes": None, "path": RED_FILE}, {"url": BLUE.address}],
    },
    "marks in a text": {
        "prompt": "<image><image>Which colour?",
        "images": [RED_FILE, BLUE_FILE],
    },
    "marks in a chat": {
        "prompt": [user("<image><image>Which colour?")],
        "images": [RED_FILE, BLUE_FILE],
    },
    "places in a chat": {
        "prompt": [user(IMAGE, IMAGE, QUESTION)],
        "images": [RED_FILE, BLUE_FILE],
    },
    "a chat without places": {
        "prompt": [user("Which colour?")],
        "images": [RED_FILE, BLUE_FILE],
    },
    "pictures in a chat": {
        "prompt": [
            user(
                {"type": "image", "image": RED_FILE},
                {"type": "image_url", "image_url": {"url": BLUE.address}},
                QUESTION,
            )
        ]
    },
    "a written chat": {
        "prompt": json.dumps([user(IMAGE, IMAGE, QUESTION)]),
        "images": [RED_FILE, BLUE_FILE],
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_pictures_are_shown_before_the_question_in_each_form_of_data(
    form: str, folder: Path
) -> None:
    data = lines(folder / "data.jsonl", {**FORMS[form], "answer": "red"})
    assert shown(data) == ("Which colour?", [RED, BLUE])


@pytest.mark.parametrize(
    "given", [{"image": {"bytes": RED.data, "path": "red.png"}}, {"images": [RED.data]}]
)
def test_bytes_of_parquet_files_are_pictures(given: dict[str, Any], folder: Path) -> None:
    data = parquet(folder / "data.parquet", {"prompt": "Which?", "answer": "red", **given})
    assert shown(data) == ("Which?", [RED])


def test_the_column_of_pictures_has_the_name_that_the_settings_say(folder: Path) -> None:
    row = {"problem": "Which?", "answer": "red", "image": "words", "screenshot": BLUE_FILE}
    data = lines(folder / "data.jsonl", row)
    columns = {"prompt": "problem", "answer": "answer", "images": "screenshot"}
    assert shown(data, columns=columns) == ("Which?", [BLUE])


def test_pictures_of_earlier_messages_stay_in_these(folder: Path) -> None:
    chat = [
        user(IMAGE, {"type": "text", "text": "And this?"}),
        {"role": "assistant", "content": "Red."},
        user(IMAGE, QUESTION),
    ]
    data = lines(folder / "data.jsonl", {"prompt": chat, "images": [RED_FILE, BLUE_FILE]})
    env = QuestionAnswer()
    observation, info = asyncio.run(env.reset(seed=0, options=tasks(data).task(0).options))
    assert isinstance(observation, Observation)
    assert observation.images == (BLUE,)
    first, second = info["history"]
    assert first["content"][0] == {"type": "image_url", "image_url": {"url": RED.address}}
    assert second["content"] == "Red."


def test_equal_questions_about_other_pictures_are_other_tasks(folder: Path) -> None:
    rows = [{"prompt": "Which?", "images": [one], "answer": "x"} for one in (RED_FILE, BLUE_FILE)]
    train = lines(folder / "train.jsonl", rows[0])
    other = lines(folder / "other.jsonl", rows[1])
    DatasetTasks(DatasetTasks.Config(data=str(train), held_out=str(other)), "qa", 0, "held-out")
    same = lines(folder / "same.jsonl", rows[0])
    with pytest.raises(ConfigError, match="held-out rows are also trained on"):
        DatasetTasks(DatasetTasks.Config(data=str(train), held_out=str(same)), "qa", 0, "held-out")


def cmyk() -> str:
    file = io.BytesIO()
    Image.new("CMYK", (2, 2)).save(file, "jpeg")
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"images": ["https://example.org/x.png"]}, "picture 1: .* never fetched"),
        ({"images": ["file:///etc/x.png"]}, "picture 1: .* never fetched"),
        ({"images": [RED_FILE, "../../secret.png"]}, "picture 2: .* outside of the data's folder"),
        ({"images": ["/etc/x.png"]}, "outside of the data's folder"),
        ({"images": ["shots/none.png"]}, "'shots/none.png' cannot be read"),
        ({"images": ["data.jsonl"]}, "does not end in one of .png"),
        ({"images": [RED.address[:-20]]}, "picture 1: "),
        ({"images": [cmyk()]}, "picture 1: .* CMYK"),
        ({"images": [7]}, "picture 1: 7 is int: write the path"),
        ({"images": [{"width": 3}]}, "has neither bytes nor a path"),
        (
            {"prompt": "<image><image>Which?", "images": [RED_FILE]},
            "has 2 places for pictures .*, and there are 1 in the column images",
        ),
        ({"prompt": [user(IMAGE, QUESTION)]}, "has 1 places for pictures .*, and there are 0"),
        (
            {"prompt": [user({"type": "image", "image": "http://a.b/c.png"}, QUESTION)]},
            "never fetched",
        ),
        ({"prompt": [user({"type": "input_audio"}, QUESTION)]}, "a part of type 'input_audio'"),
    ],
)
def test_what_is_no_picture_is_named_with_its_row(
    row: dict[str, Any], why: str, folder: Path
) -> None:
    good = {"prompt": "Which colour?", "answer": "red"}
    data = lines(folder / "data.jsonl", good, {**good, **row})
    with pytest.raises(ConfigError, match=rf"data.jsonl, line 2: .*{why}"):
        tasks(data)


def test_bytes_that_are_no_whole_picture_are_named_with_their_column(folder: Path) -> None:
    cut = {"prompt": "Which?", "answer": "red", "image": {"bytes": RED.data[:-9], "path": "x"}}
    with pytest.raises(ConfigError, match=r"row 1: column 'image': bytes .* as a picture, .*cut"):
        tasks(parquet(folder / "data.parquet", cut))


def test_pictures_that_the_package_datasets_has_decoded_are_taken_or_named() -> None:
    pixels = Image.open(io.BytesIO(RED.data))
    address = json.loads(as_line({"image": pixels}))["image"]
    decoded = np.asarray(Image.open(io.BytesIO(EncodedImage.from_address(address).data)))
    assert (decoded == np.asarray(pixels)).all()
    with pytest.raises(BadRowError, match=r"column 'image': .* cannot be written as PNG: .*CMYK"):
        as_line({"image": Image.new("CMYK", (2, 2))})


def test_a_mark_without_pictures_is_text(folder: Path) -> None:
    row = {"prompt": "What does <image> mean in HTML?", "answer": "nothing"}
    assert shown(lines(folder / "data.jsonl", row)) == (row["prompt"], [])


def test_a_model_that_reads_text_alone_gets_no_data_with_pictures(folder: Path) -> None:
    row = {"prompt": "Which colour?", "images": [RED_FILE], "answer": "red"}
    data = lines(folder / "data.jsonl", row)
    (folder / "run.yaml").write_text(
        f"env: qa\ntasks: {{data: {data}, held_out: 0}}\nevaluation: {{tasks: 0}}\n"
    )
    config = load_config(folder / "run.yaml", ["model=tiny"]).config
    with pytest.raises(ConfigError, match=r"line 1: it shows pictures, and model=tiny reads text"):
        fingerprints(config)
    assert fingerprints(load_config(folder / "run.yaml", ["model=tiny_vision"]).config)
