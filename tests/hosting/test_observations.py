"""Pictures that environments show to the model: they cross every transport, are kept once each, and
no model without eyes is given less than was shown.
"""

import asyncio
import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from agentrl import EncodedImage, Message, Observation, StepReply, plugins
from agentrl.config.from_file import load_config
from agentrl.config.loading import check_options
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.envs.frozen_lake import FrozenLake, careful_player
from agentrl.errors import ConfigError, EnvError
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.observations import IMAGES, as_result, images_taken
from agentrl.hosting.pool import EnvPool
from agentrl.hosting.process_worker import _Hosted
from agentrl.hosting.wrappers import TimeLimit
from agentrl.observe.run_images import RunImages
from agentrl.observe.trajectories import write_trajectories
from agentrl.protocols import Env
from agentrl.recipes.recordings import read_recordings
from agentrl.remote.client import RemoteEnv
from agentrl.remote.openenv.client import OpenEnv
from agentrl.rollout.assignment import Assignment
from agentrl.rollout.budget import Budget
from agentrl.rollout.episode import EnvEpisodeRunner, ScriptedPolicy
from agentrl.testing import check_env
from agentrl.testing.tokenizer import ByteTokenizer
from agentrl.trajectory import Failed, Score, Task, Trajectory
from tests.hosting.screen import Screen
from tests.remote.served import served


class Describing(TemplateRenderer):
    """A renderer that takes pictures: it says their sizes."""

    def _guard_messages(self, messages: Sequence[Message]) -> Sequence[Message]:
        told = [replace(one, content=one.described, images=()) for one in messages]
        return super()._guard_messages(told)


class AsyncScreen(Screen):
    async def step(self, action: str) -> StepReply:  # type: ignore[override]
        return super().step(action)


def say_go(env: Env, rng: object) -> str:
    return "go"


def played(
    factory: Callable[[], Any], renderer: type[TemplateRenderer] = Describing, player: Any = say_go
) -> Trajectory:
    async def main() -> Trajectory:
        envs, way = EnvPool({"env": factory}, EnvDeadlines()), renderer(ByteTokenizer())
        policy = ScriptedPolicy(player, way)
        runner = EnvEpisodeRunner(policy, way, envs, Budget(turns=5), 60.0)
        (trajectory,) = await runner.play(Assignment("e", Task("env", 3), 1))
        await envs.close()
        return trajectory

    return asyncio.run(main())


def _limited() -> Env:
    return TimeLimit(TimeLimit.Config(turns=2), Screen())


@pytest.fixture(params=["inline", "async", "http", "openenv"])
def transport(request: pytest.FixtureRequest) -> Iterator[Callable[[], Any]]:
    with ExitStack() as stack:
        match request.param:
            case "http":
                url = stack.enter_context(served(Screen)).url
                yield lambda: RemoteEnv([url])
            case "openenv":
                url = stack.enter_context(served(Screen)).url
                yield lambda: OpenEnv([url])
            case kind:
                yield AsyncScreen if kind == "async" else Screen


def test_pictures_reach_the_messages_over_every_transport(transport: Callable[[], Any]) -> None:
    trajectory = played(transport)
    dark, light = (EncodedImage.of_pixels(np.full((6, 8, 3), s, np.uint8)) for s in (0, 200))
    shown = [message for message in trajectory.messages if message.role == "user"]
    assert [message.content for message in shown] == [f"step {number}" for number in range(4)]
    assert [message.images for message in shown] == [(dark, *[light] * n) for n in range(4)]
    assert all(IMAGES not in turn.info for turn in trajectory.turns)
    assert [turn.info["mine"] for turn in trajectory.turns] == [[1], [2], [3]]
    assert len({turn.state for turn in trajectory.turns}) == 3


def test_a_worker_process_answers_with_pictures_in_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    worker = _Hosted(f"{Screen.__module__}:{Screen.__qualname__}", str(tmp_path))
    with asyncio.Runner() as runner:
        asked = {"call": "reset", "seed": 0, "options": {}}
        text, info = json.loads(worker.answer(runner, asked))["tuple"]
    (image,), rest = images_taken("reset", info)
    assert (text, image.width, image.height, rest) == ("step 0", 8, 6, {})


def test_wrappers_get_a_text_and_pass_the_pictures_on() -> None:
    trajectory = played(_limited)
    assert trajectory.status.name == "truncated"
    assert [len(m.images) for m in trajectory.messages if m.role == "user"] == [1, 2, 3]


def test_pictures_are_kept_once_each_and_read_back(tmp_path: Path) -> None:
    trajectory = played(Screen)
    path = tmp_path / "trajectories" / "step_000000.parquet"
    write_trajectories(path, [(trajectory, Score(1.0))] * 3)
    kept = sorted(file.name for file in (tmp_path / "images").iterdir())
    images = {image.name: image for message in trajectory.messages for image in message.images}
    assert kept == sorted(images)
    assert len(kept) == 2
    assert all((tmp_path / "images" / name).read_bytes() == images[name].data for name in kept)
    (row, *_) = pq.read_table(path).to_pylist()
    assert [message["images"] for message in row["messages"]] == [
        [image.name for image in message.images] for message in trajectory.messages
    ]
    back = next(read_recordings(tmp_path / "trajectories")).trajectory
    assert [one.images for one in back.messages] == [one.images for one in trajectory.messages]
    (tmp_path / "images" / kept[0]).write_bytes(images[kept[1]].data)
    with pytest.raises(ConfigError, match="is not the picture that its name says"):
        next(read_recordings(tmp_path / "trajectories"))
    with pytest.raises(ConfigError, match="is no name of a picture"):
        RunImages(tmp_path).path("../config.yaml")


def test_a_model_that_reads_text_alone_is_shown_no_less_but_fails(tmp_path: Path) -> None:
    status = played(Screen, TemplateRenderer).status
    assert isinstance(status, Failed)
    assert (status.layer, status.final) == ("environment", True)
    assert "a message holds a picture (png, 8 x 6), and the model reads" in status.error
    config = tmp_path / "run.yaml"
    config.write_text("env: {name: frozen_lake, options: {view: picture}}\nsteps: 1\n")
    with pytest.raises(ConfigError, match=r"env\.options: frozen_lake would show pictures"):
        check_options(load_config(config, []))


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("https://example.org/a.png", "E: picture 0: .* is no base64, .*never fetched"),
        (base64.b64encode(b"GIF89a").decode(), "E: picture 0: the bytes are a GIF file"),
        (base64.b64encode(b"\x89PNG\r\n\x1a\n").decode(), "E: picture 0: the PNG is cut off"),
        (7, "E: picture 0: 7 is no base64"),
    ],
)
def test_what_a_server_sends_is_looked_at(written: Any, said: str) -> None:
    with pytest.raises(EnvError, match=said):
        images_taken("E", {IMAGES: [written]})
    with pytest.raises(EnvError, match="write a list of at most 64 pictures"):
        images_taken("E", {IMAGES: [written] * 65})


def test_an_observation_of_something_else_is_refused() -> None:
    seen: Any = Observation("look", [np.zeros((4, 4), np.uint8)])  # type: ignore[list-item]
    with pytest.raises(EnvError, match=r"write a list of EncodedImage .*of_pixels"):
        as_result((seen, {}))
    assert as_result((Observation("only words"), {"a": 1})) == ("only words", {"a": 1})


@pytest.mark.parametrize("name", ["frozen_lake", "sokoban"])
def test_boards_show_themselves_as_pictures(name: str) -> None:
    factory = plugins.load("envs", name)
    check_env(factory, options={"view": "picture"}, seeds=(0, 1), max_turns=6)
    env = factory()
    first, _ = env.reset(seed=1, options={"view": "picture"})
    hint, *_ = env.step("what?")
    (before,), (after,) = first.images, hint.images
    assert (first.text, before, hint.text[:3]) == ("", after, "Say")
    assert before.width % 28 == before.height % 28 == 0
    env.reset(seed=1, options={})
    assert "You are the" not in env.system_prompt


def test_the_pictures_of_a_lake_tell_its_states_apart() -> None:
    trajectory = played(_Seeing, player=careful_player)
    seen = [message.images[0].digest for message in trajectory.messages if message.role == "user"]
    states = [turn.state for turn in trajectory.turns]
    assert len(set(seen[: len(states)])) == len(set(states)) > 1


def test_with_sight_a_lake_is_shown_around_the_player() -> None:
    whole, near = FrozenLake(), FrozenLake()
    shown = whole.start(1, {"view": "picture"})
    around = near.start(1, {"view": "picture", "sight": 2})
    for move in range(4):
        if move:
            word = whole.safe_moves()[-1]
            shown, *_ = whole.step(word)
            around, *_ = near.step(word)
        assert isinstance(shown, Observation)
        assert isinstance(around, Observation)
        lake, seen = pixels_of(shown.images[0]), pixels_of(around.images[0])
        row, column = divmod(whole._state, 4)
        assert seen.shape == (5 * 28, 5 * 28, 3)
        for y in range(5):
            for x in range(5):
                cell = seen[28 * y : 28 * (y + 1), 28 * x : 28 * (x + 1)]
                at_y, at_x = row + y - 2, column + x - 2
                if 0 <= at_y < 4 and 0 <= at_x < 4:
                    of_lake = lake[28 * at_y : 28 * (at_y + 1), 28 * at_x : 28 * (at_x + 1)]
                    np.testing.assert_array_equal(cell, of_lake)
                else:
                    assert cell[14, 14].tolist() == [0x22, 0x30, 0x3C]


def pixels_of(image: EncodedImage) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(BytesIO(image.data)))


class _Seeing(FrozenLake):
    def start(self, seed: int, options: Mapping[str, Any]) -> str | Observation:
        return super().start(seed, {**options, "view": "picture"})


def test_a_tool_client_of_openenv_gets_the_picture_as_mcp_has_it() -> None:
    with served(_Camera) as server:
        call = {"name": "look", "arguments": {}}
        asked = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
        content = httpx.post(f"{server.url}/mcp", json=asked).json()["result"]["content"]
    assert [part["type"] for part in content] == ["image", "image", "text"]
    image = EncodedImage(base64.b64decode(content[0]["data"]))
    assert (image.width, content[0]["mimeType"]) == (8, "image/png")


class _Camera(Screen):
    tools = ({"type": "function", "function": {"name": "look", "parameters": {}}},)
