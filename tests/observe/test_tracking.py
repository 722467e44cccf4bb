"""Trackers are foreign code with foreign servers: none ends a run or delays a step."""

import io
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentrl.config import validate_config
from agentrl.errors import ConfigError
from agentrl.observe.tracking import Tracking, sample_of
from agentrl.plugins import Component, NoSettings
from agentrl.protocols import Tracker
from agentrl.runs.run import Run
from agentrl.trajectory import Failed, Message, Score, Task, Terminated, Trajectory


class Told:
    """Keeps what it is told; `before` is called before each row."""

    def __init__(self, before: Callable[[int], None] = lambda step: None) -> None:
        self.steps, self.ended, self._before = list[int](), list[str](), before

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._before(step)
        self.steps.append(step)

    def close(self) -> None:
        self.ended.append("closed")


class ToldTheEnd(Told):
    """A tracker that tells runs apart by how they ended."""

    def end(self, how: str, why: str) -> None:
        self.ended.append(f"{how}: {why}")


def tracking(warnings: list[str], *made: Callable[..., Tracker], **more: Any) -> Tracking:
    trackers = [
        Component(f"tracker{number}", make, NoSettings()) for number, make in enumerate(made)
    ]
    return Tracking(trackers, Path("lake"), {"seed": "1"}, warnings.append, **more)


def of(tracker: Tracker) -> Callable[..., Tracker]:
    return lambda folder, config: tracker


def fails_at_two(step: int) -> None:
    if step == 2:
        raise ConnectionError("metrics server is down for a moment")
    if step == 3:
        raise SystemExit(3)


def test_a_tracker_that_raises_gets_what_follows_and_is_warned_of_once():
    warnings = list[str]()
    failing, other = Told(fails_at_two), ToldTheEnd()
    tracked = tracking(warnings, of(failing), of(other))
    for step in range(5):
        tracked.log(step, {"reward": 0.25})
    tracked.end("failed", "the loss is nan")
    assert (failing.steps, failing.ended) == ([0, 1, 4], ["closed"])
    assert (other.steps, other.ended) == ([0, 1, 2, 3, 4], ["failed: the loss is nan"])
    assert len(warnings) == 1
    assert "tracker0 fails: ConnectionError: metrics server is down for a moment" in warnings[0]


def test_a_tracker_that_hangs_delays_no_step_and_loses_only_what_its_queue_cannot_hold():
    warnings, goes_on = list[str](), threading.Event()
    hanging, other = Told(lambda step: goes_on.wait() and None), Told()
    tracked = tracking(warnings, of(hanging), of(other), queued=3)
    for step in range(10):
        tracked.log(step, {"reward": 0.25})  # hangs here, if the loop waits for trackers
        while len(other.steps) <= step:  # which is quick, but has a queue too
            threading.Event().wait(0.001)
    assert other.steps == list(range(10))
    goes_on.set()
    tracked.end("completed", "")
    # The first one may have left the queue before the others came.
    assert hanging.steps in (
        [0, 1, 2],
        [0, 1, 2, 3],
    )
    assert hanging.ended == ["closed"]
    assert ["too slow: 3 rows" in text for text in warnings] == [True]


def test_a_tracker_that_never_ends_is_left_behind():
    warnings, never = list[str](), threading.Event()
    tracked = tracking(
        warnings, of(Told(lambda step: never.wait() and None)), end_seconds=0.01, last_seconds=0.01
    )
    tracked.log(0, {"reward": 0.25})
    tracked.end("completed", "")
    assert len(warnings) == 1
    assert "has not ended" in warnings[0]
    never.set()


def test_a_tracker_whose_server_is_down_at_the_start_gets_everything_when_it_is_up():
    warnings, told, tried, up = list[str](), Told(), list[int](), threading.Event()

    def make(folder: Path, config: Mapping[str, Any]) -> Tracker:
        tried.append(1)
        if not up.is_set():
            raise ConnectionError("no route to host")
        return told

    tracked = tracking(warnings, make, again_seconds=0.001)
    tracked.log(0, {"reward": 0.25})
    while len(tried) < 3:
        threading.Event().wait(0.001)
    up.set()
    while not told.steps:
        threading.Event().wait(0.001)
    tracked.end("completed", "")
    assert told.steps == [0]
    assert len(warnings) == 1


def test_a_tracker_that_refuses_its_settings_ends_the_start_and_the_others_are_ended():
    def refuses(folder: Path, config: Mapping[str, Any]) -> Tracker:
        raise ConfigError("trackers: wandb is not installed: pip install 'agentrl-train[wandb]'")

    other = ToldTheEnd()
    with pytest.raises(ConfigError, match="trackers: wandb is not installed"):
        tracking([], of(other), refuses)
    assert [text.partition(":")[0] for text in other.ended] == ["failed"]


class Boom(ToldTheEnd):
    """Raises at its second row."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        super().__init__(fails_at_two)
        BOOMS.append(self)


BOOMS: list[Boom] = []


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (None, "completed"),
        (ValueError("no such room"), "failed"),
        (KeyboardInterrupt("SIGTERM"), "stopped"),
    ],
)
def test_a_run_outlives_its_tracker_warns_of_it_and_tells_it_how_it_ended(tmp_path, error, ended):
    folder = tmp_path / "run"
    name = f"{__name__}:Boom"
    values = {"env": {"name": "frozen_lake"}, "run_dir": str(folder), "trackers": [{"name": name}]}
    console = Console(file=io.StringIO())
    try:
        with Run(validate_config(values), console) as run:
            for step in range(5):
                run.recorder.write(step, {"loss": 0.25})
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt):
        pass
    boom = BOOMS.pop()
    assert boom.steps == [0, 1, 4]
    assert boom.ended[0].startswith(ended)
    assert str(error or "")[:7] in boom.ended[0]
    assert (folder / "warnings.jsonl").read_text().count("metrics server is down") == 1


def test_a_sample_has_the_conversation_and_what_is_unknown_is_none():
    messages = Message("user", "P . O"), Message("assistant", "left" * 10_000, "right?")
    played = Trajectory("t/0/0", Task("lake", 7, id="t"), (), Terminated(), messages)
    sample = sample_of(played, Score(1.0))
    assert (sample.episode, sample.task, sample.status, sample.score) == (
        "t/0/0",
        "t",
        "terminated",
        1.0,
    )
    assert sample.conversation.startswith("user: P . O\n\nassistant: <think>right?</think>\nleft")
    assert "characters are left out" in sample.conversation
    assert len(sample.conversation) < 21_000
    failed = sample_of(played, Score(float("nan"), status=Failed("reward", "x")))
    assert failed.status == "terminated"
