"""The pictures that a model was shown: in the page, in reports, in the terminal and in exports."""

import asyncio
import base64
import io
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from rich.console import Console

from agentrl import EncodedImage
from agentrl.cli.replay import replay
from agentrl.testing.made_up_run import MadeUpRun
from agentrl.viewer.episode import EpisodeReader
from agentrl.viewer.episode_export import atif_of, export_episodes
from agentrl.viewer.episodes import EpisodeIndex
from agentrl.viewer.folders import RunFolder
from agentrl.viewer.report import write_report
from tests.tokens.test_encoded_image import PNG, png_of_size

HOSTILE = {
    "a script": b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>",
    "a page": b"<html><script>alert(1)</script></html>",
    "another picture": PNG,
    "a bomb": png_of_size(60_000, 60_000),
    "cut off": PNG[:-20],
}
"""What may stand in the file of a picture that somebody has changed."""
IMAGES = [EncodedImage.of_pixels(np.full((4, 6, 3), shade, np.uint8)) for shade in (0, 90, 180)]


def test_pictures_are_shown_where_they_stood(tmp_path: Path) -> None:
    run = MadeUpRun(tmp_path / "run", turns=3, images=IMAGES)
    run.begin()
    run.step()
    assert len(list((run.folder / "images").iterdir())) == 3
    folder = RunFolder("run", run.folder)
    reader = EpisodeReader(folder, EpisodeIndex(folder))
    name = "train-000001/0/0"
    shown = reader.episode(name, pictures=True)["trajectory"]["messages"]
    asked = [message for message in shown if message["role"] == "user"]
    addresses = [f"data:image/png;base64,{base64.b64encode(one.data).decode()}" for one in IMAGES]
    assert [message["pictures"] for message in asked] == [[address] for address in addresses]
    assert [message["picture_tokens"] for message in asked] == [[2]] * 3
    assert all("pictures" not in one for one in reader.episode(name)["trajectory"]["messages"])

    write_report(run.folder, tmp_path / "run.html")
    report = (tmp_path / "run.html").read_text()
    assert all(f'src="{address}"' in report for address in addresses)
    assert report.count("<figcaption>2 tokens</figcaption>") == report.count('class="seen" alt')

    said = io.StringIO()
    asyncio.run(replay(run.folder, name, Console(file=said, width=200), speed=0))
    assert said.getvalue().count("[image: png, 6 x 4]") == 3

    first_file = run.folder / "images" / IMAGES[0].name
    for hostile in HOSTILE.values():
        first_file.write_bytes(hostile)
        lost = reader.episode(name, pictures=True)["trajectory"]["messages"]
        assert next(one for one in lost if one["role"] == "user")["pictures"] == [""]
    first_file.unlink()
    lost = reader.episode(name, pictures=True)["trajectory"]["messages"]
    assert next(one for one in lost if one["role"] == "user")["pictures"] == [""]


def test_the_names_of_pictures_are_exported(tmp_path: Path) -> None:
    run = MadeUpRun(tmp_path / "run", turns=1, groups=1, members=2, images=IMAGES[:1])
    run.begin()
    run.step()
    named = f"[image: images/{IMAGES[0].name}]\nWhat is next?"
    export_episodes(run.folder, tmp_path / "rows.parquet", None)
    rows = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    assert [row["messages"][1]["content"] for row in rows] == [named] * 2
    folder = RunFolder("run", run.folder)
    reader = EpisodeReader(folder, EpisodeIndex(folder))
    steps = atif_of(reader.episode("train-000000/0/0"), "run", None)["steps"]
    assert named in [step["message"] for step in steps]
