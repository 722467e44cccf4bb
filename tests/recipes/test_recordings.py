"""What `agentrl gateway` has recorded, and how `recipe: sft` and `recipe: dpo` learn it: by its
exact tokens.
"""

import asyncio
import json
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import httpx
import openai
import pytest

from agentrl.conversation.config import RendererConfig
from agentrl.conversation.renderer import TemplateRenderer, renderer_of
from agentrl.errors import ConfigError
from agentrl.models.tiny import create_tiny_model
from agentrl.observe.trajectories import episodes_of_step, write_trajectories
from agentrl.recipes.preferences import PreferencesConfig, read_preferences
from agentrl.recipes.recordings import RecordingsConfig, read_recordings, recorded
from agentrl.recipes.written_conversation import trajectory_from_messages
from agentrl.testing.tokenizer import ByteTokenizer
from agentrl.trajectory import (
    SEGMENT,
    Group,
    Message,
    Score,
    Status,
    Task,
    Terminated,
    ToolCall,
    Trajectory,
)
from agentrl.viewer.episodes import EpisodeIndex, EpisodeQuery
from agentrl.viewer.folders import find_runs
from tests.commands import Command
from tests.processes import PATIENCE_SECONDS

RENDERER = TemplateRenderer(ByteTokenizer())
CALL = ToolCall("add", {"a": 2}, "call-1")


def said(name: str, answer: str, *, status: Status | None = None) -> Trajectory:
    """A question and its answer, as tokens."""
    messages = (Message("user", "Which way?"), Message("assistant", answer))
    played = trajectory_from_messages(messages, RENDERER)
    task = Task("gateway", 3, {}, "which")
    return replace(played, id=name, task=task, messages=messages, status=status or Terminated())


def written(folder: Path, **scored: Sequence[tuple[Trajectory, float]]) -> Path:
    """A folder of recordings, with these conversations of each kind."""
    for kind, rows in scored.items():
        pairs = [(trajectory, Score(value)) for trajectory, value in rows]
        write_trajectories(folder / kind / "step_000000.parquet", pairs)
    return folder


def imitated(config: RecordingsConfig, renderer: TemplateRenderer = RENDERER) -> list[Trajectory]:
    return asyncio.run(recorded(config, renderer))


def test_the_exact_tokens_come_back(tmp_path: Path) -> None:
    answer = Message("assistant", f"Let me see.\n{CALL.render()}", "It adds.", (CALL,))
    result = Message("tool", "5", tool_call_id="call-1")
    played = replace(
        said("a", "left"), messages=(Message("user", "2 + 3?"), answer, result), agent="x"
    )
    folder = written(tmp_path, trajectories=[(played, 0.5)])
    ((back, score),) = read_recordings(folder / "trajectories")
    assert (back.id, back.agent, back.task, score) == (
        "a",
        "x",
        Task("gateway", 3, {}, "which"),
        0.5,
    )
    assert back.messages == played.messages
    assert back.turns == played.turns


def test_a_least_score_chooses_what_is_imitated(tmp_path: Path) -> None:
    nan = float("nan")
    folder = written(
        tmp_path,
        trajectories=[(said("good", "left"), 1.0), (said("bad", "right"), 0.0)],
        unrewarded=[(said("unknown", "up"), nan)],
    )
    chosen = {
        least: [one.id for one in imitated(RecordingsConfig(path=folder, least_score=least))]
        for least in (None, 0.0, 0.5)
    }
    assert chosen == {None: ["good", "bad", "unknown"], 0.0: ["good", "bad"], 0.5: ["good"]}
    with pytest.raises(
        ConfigError, match=r"no conversation of .* score of at least 2.0: of 3, the best has 1"
    ):
        imitated(RecordingsConfig(path=folder, least_score=2))
    rounded = written(tmp_path / "rounded", trajectories=[(said("good", "left"), 0.7 + 0.2 + 0.1)])
    assert len(imitated(RecordingsConfig(path=rounded, least_score=1))) == 1


def test_held_out_episodes_of_a_run_are_not_imitated(tmp_path: Path) -> None:
    folder = written(tmp_path, trajectories=[(said("a", "left"), 1.0)])
    evaluated = [(said("held", "left"), Score(1.0))]
    write_trajectories(folder / "trajectories" / "held_out_000000.parquet", evaluated)
    assert [one.id for one in imitated(RecordingsConfig(path=folder))] == ["a"]


def test_an_episode_that_was_trained_in_parts_is_imitated_once(tmp_path: Path) -> None:
    folder = written(
        tmp_path, trajectories=[(said("a", "left", status=SEGMENT), 0.0), (said("a", "left"), 1.0)]
    )
    (one,) = imitated(RecordingsConfig(path=folder))
    assert len(one.turns) == 1


def test_an_episode_that_was_over_when_its_group_was_cut_is_imitated_once(tmp_path: Path) -> None:
    whole, waits = said("a", "left"), said("b", "right")
    cut = Group(whole.task, (replace(waits, status=SEGMENT), whole), (Score(0.0), Score(1.0)))
    known = tuple(replace(one, trained_turns=len(one.turns)) for one in (waits, whole))
    steps = [replace(cut, partial=True), replace(cut, trajectories=known)]
    for step, group in enumerate(steps):
        path = tmp_path / "trajectories" / f"step_{step:06d}.parquet"
        write_trajectories(path, episodes_of_step([group]))
    found = [(one.id, len(one.turns)) for one in imitated(RecordingsConfig(path=tmp_path))]
    assert found == [("b", 1), ("a", 1)]


def test_what_cannot_be_imitated_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder trajectories/ or unrewarded/"):
        imitated(RecordingsConfig(path=tmp_path))
    (tmp_path / "trajectories").mkdir()
    with pytest.raises(ConfigError, match="no conversations yet"):
        imitated(RecordingsConfig(path=tmp_path))


def test_tokens_of_another_tokenizer_are_refused_by_sft_and_said_again_by_dpo(
    tmp_path: Path,
) -> None:
    folder = written(
        tmp_path / "run", trajectories=[(said("a", "left"), 1.0), (said("b", "right"), 0.0)]
    )
    create_tiny_model(tmp_path / "model", corpus=["Which way? left right up down"])
    other = renderer_of(tmp_path / "model", RendererConfig())
    with pytest.raises(ConfigError, match="another tokenizer"):
        imitated(RecordingsConfig(path=folder), other)
    (pair,) = read_preferences(PreferencesConfig(path=folder), Random(0))
    assert pair.played is not None
    assert [trajectory.id for trajectory in pair.played] == ["a", "b"]
    assert [message.content for message in pair.rejected] == ["Which way?", "right"]


def test_pairs_of_a_run_are_of_one_agent_each(tmp_path: Path) -> None:
    # Of each episode one agent has won, and both are of one task.
    episodes = [
        (replace(said(name, name), agent=agent), 1.0 if agent == winner else -1.0)
        for name, winner in (("left", "asker"), ("right", "guesser"))
        for agent in ("asker", "guesser")
    ]
    folder = written(tmp_path, trajectories=episodes)
    pairs = read_preferences(PreferencesConfig(path=folder), Random(0))
    assert {pair.task for pair in pairs} == {"which"}
    compared = [[played.agent for played in pair.played] for pair in pairs if pair.played]
    assert sorted(compared) == [["asker", "asker"], ["guesser", "guesser"]]


ASKED = {"left": "Where is the sun in the morning?", "right": "Where is it in the evening?"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}},
    }
]


@pytest.mark.long
def test_what_the_gateway_recorded_is_what_sft_and_dpo_learn(tmp_path: Path) -> None:
    create_tiny_model(tmp_path / "model", corpus=[*ASKED.values(), *ASKED, json.dumps(TOOLS)])
    (tmp_path / "run.yaml").write_text("""
env: guess_number
model: model
rollout: {sampling: {max_tokens: 8}}
trainer: {device: cpu}
trackers: []
""")
    (tmp_path / "gateway.log").touch()
    served = Command(
        "gateway", "run.yaml", "--record", "said", cwd=tmp_path, log=tmp_path / "gateway.log"
    )
    play(address_of(served))
    served.send_signal(signal.SIGINT)
    assert served.wait(PATIENCE_SECONDS) == 0, served.output

    recordings = [one.trajectory for one in read_recordings(tmp_path / "said" / "trajectories")]
    assert len(recordings) == 6
    renderer = renderer_of(tmp_path / "model", RendererConfig())
    for one in recordings:  # with the tools, which no message has
        assert "Looks." in renderer.decode(one.turns[0].prompt_ids)
    (run,) = find_runs([tmp_path / "said"])
    assert EpisodeIndex(run).page(EpisodeQuery())["total"] == 6

    losses = learned(
        tmp_path, "sft", "recordings: {path: said, epochs: 20, episodes_per_step: 6, lr: 3.0e-3}"
    )
    assert losses[-1] < 0.5 * losses[0]
    assert (tmp_path / "sft" / "sft" / "model.safetensors").is_file()
    learned(tmp_path, "dpo", "preferences: {path: said, held_out: 0, pairs_per_step: 4}")
    assert (tmp_path / "dpo" / "dpo" / "model.safetensors").is_file()


def address_of(served: Command) -> str:
    """Where a gateway listens, once it does."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := re.search(r"http://\S+/v1", served.output)):
        assert served.poll() is None, served.output
        assert time.monotonic() < deadline, served.output
        time.sleep(0.1)
    return found[0]


def play(url: str) -> None:
    """Ask each question in three episodes. The reward grows from one to the next."""
    for question in ASKED.values():
        for reward in range(3):
            key = f"{question[-8:]}-{reward}"
            with openai.OpenAI(base_url=url, api_key=key, timeout=PATIENCE_SECONDS) as client:
                messages = [{"role": "user", "content": question}]
                client.chat.completions.create(
                    model="policy", messages=messages, tools=TOOLS, max_tokens=8
                )  # type: ignore[call-overload]
            headers = {"authorization": f"Bearer {key}"}
            httpx.post(
                f"{url}/rewards", json={"reward": reward}, headers=headers
            ).raise_for_status()


def learned(folder: Path, recipe: str, settings: str) -> list[float]:
    """The losses that a run of a recipe prints."""
    config = (folder / "run.yaml").read_text()
    (folder / f"{recipe}.yaml").write_text(
        f"{config}recipe:\n  name: {recipe}\n  {settings}\nrun_dir: {recipe}\n"
    )
    command = Command("train", f"{recipe}.yaml", cwd=folder, log=folder / f"{recipe}.log")
    assert command.wait(PATIENCE_SECONDS) == 0, command.output
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+) nats", command.output)]
