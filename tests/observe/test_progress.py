"""The display of a run: what it shows on terminals of any width, and the lines that it writes
elsewhere.
"""

import io
import math
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from agentrl.cli.console import SafeConsole
from agentrl.cluster.worker_registry import WorkerCount, register_workers
from agentrl.observe.braille import braille_curve
from agentrl.observe.dashboard import Dashboard, duration, line_of
from agentrl.observe.progress import ProgressDisplay
from agentrl.observe.run_progress import EnvPace, RunProgress, slowest_envs
from agentrl.rollout.accounts import OpenGroup, SchedulerStatus
from agentrl.tokens.arrays import floats, ints
from agentrl.trajectory import Completion, Group, Score, Task, Terminated, Trajectory, Turn
from tests.processes import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]


def test_no_text_of_a_run_commands_the_terminal():
    """Names of environments, runs and tasks, and what is warned of, are whatever their authors
    wrote.
    """
    file = io.StringIO()
    console = SafeConsole(file=file, force_terminal=True, width=120, color_system="truecolor")
    progress = RunProgress(3, name="run \x1b]0;owned\x07")
    progress.slowest = (EnvPace("lake \x1b[2J \u202eekal", 1.0, 2.0),)
    progress.warn(0, "warned \x1b[31m")
    console.print(Dashboard(progress))
    console.print("said \x9b31m by a \x1b[H model", highlight=False)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue())  # rich's own colours
    assert "lake \ufffd[2J" in shown
    assert "warned \ufffd[31m" in shown
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(shown)


def metrics(reward: float) -> dict[str, float]:
    return {
        "seconds": 12.0,
        "seconds/rollout": 7.5,
        "seconds/train": 4.5,
        "reward": reward,
        "success": 0.4,
        "turns": 4.3,
        "tokens_per_second": 13040.0,
        "staleness/mean": 0.4,
        "staleness/max": 1.0,
        "logprob_gap_max": 1e-6,
    }


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def made_up(steps: int = 40, of: int = 100) -> tuple[RunProgress, Clock]:
    clock = Clock()
    progress = RunProgress(of, "runs/made_up", clock)
    for step in range(steps):
        progress.begin_phase("rollout")
        clock.now += 20
        progress.step(step, metrics(step / 100))
    progress.begin_phase("train")
    clock.now += 5
    progress.held_out = (30, 0.613)
    progress.slowest = (EnvPace("[red]sokoban", 1.31, 10.2),)
    progress.underway = lambda: SchedulerStatus(
        96,
        128,
        11,
        16,
        {"environment": 3, "engine": 1},
        [OpenGroup("train-000412", "[red]sokoban", 75.0)],
    )
    progress.warn(steps - 1, "the gradient was zero")
    return progress, clock


def drawn(progress: RunProgress, width: int = 110) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    console.print(Dashboard(progress))
    return console.file.getvalue()


def test_the_picture_has_everything_that_one_wants_to_know():
    progress, _ = made_up()
    shown = drawn(progress)
    for expected in (
        "runs/made_up",
        "40 of 100 steps",
        "13:25, about 19:55 left",
        "train for 5 s; 11 of 16 groups ready",
        "96 of 128 slots taken",
        "reward 0.390",
        "61.3% succeed after 30 steps",
        "[red]sokoban 1.3 s a step",
        "train-000412 ([red]sokoban) 1:15",
        "engine 1, environment 3",
        "step 39: the gradient was zero",
    ):
        assert expected in shown
    assert any("\u2800" < character <= "\u28ff" for character in shown)


def test_the_picture_in_the_docs_can_be_drawn_again():
    drawing = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "terminal_picture.py"))
    shown = drawn(drawing["made_up"](), drawing["COLUMNS"])
    assert "37 of 100 steps" in shown
    assert "step 36: in 3 steps in a row" in shown


@given(width=st.integers(20, 200), steps=st.integers(0, 60))
def test_the_picture_is_never_wider_than_the_terminal(width, steps):
    progress, _ = made_up(steps)
    assert all(len(line) <= width for line in drawn(progress, width).splitlines())


def test_the_time_left_follows_the_pace_of_the_last_steps_and_counts_down():
    progress, clock = made_up(40)
    assert progress.remaining == pytest.approx(60 * 20 - 5)
    clock.now += 10
    assert progress.remaining == pytest.approx(60 * 20 - 15)
    for step in range(40, 50):
        clock.now += 40 if step > 40 else 25
        progress.step(step, metrics(0.5))
    assert progress.remaining == pytest.approx(50 * 40)
    assert made_up(0)[0].remaining is None
    assert made_up(40, of=40)[0].remaining is None


def test_workers_that_are_not_alive_are_counted_and_the_others_take_no_room():
    progress, _ = made_up()
    with (
        register_workers(lambda: WorkerCount("env", 8, 8)),
        register_workers(lambda: WorkerCount("engine", 1, 2, 3)),
    ):
        assert "engine 1 of 2" in drawn(progress)
        assert "env 8 of 8" not in drawn(progress)


def test_a_warning_leaves_the_picture_when_it_is_old():
    progress, _ = made_up(40)
    assert "the gradient was zero" in drawn(progress)
    for step in range(40, 61):
        progress.step(step, metrics(0.5))
    assert "the gradient was zero" not in drawn(progress)


@pytest.mark.parametrize(
    "console", [{"force_terminal": False}, {"force_terminal": True, "_environ": {"TERM": "dumb"}}]
)
def test_what_is_no_terminal_gets_a_line_for_each_step_and_no_control_characters(console):
    file = io.StringIO()
    with ProgressDisplay(Console(file=file, width=80, **console), 3) as display:
        display.watch(lambda: SchedulerStatus(1, 2, 3, 4, {"environment": 2}))
        for step in range(3):
            display.begin_phase("rollout")
            display.step(step, metrics(step / 2))
        display.warn(2, "[red] is no colour")
    lines = file.getvalue().splitlines()
    assert [line[:9] for line in lines[:3]] == ["step    0", "step    1", "step    2"]
    assert "reward 0.500" in lines[1]
    assert "failures 2 environment" in lines[1]
    assert "  left " in lines[1]
    assert "  left " not in lines[2]
    assert lines[3].startswith("warning: [red] is no colour")
    assert "\x1b" not in file.getvalue()


def test_a_resumed_run_goes_on_with_the_curve_and_the_pace_of_its_own():
    progress = RunProgress(10, clock=Clock())
    display = ProgressDisplay(Console(file=io.StringIO()), 10)
    display.resume(4, [0.1, 0.2, 0.3, 0.4])
    display.begin_phase("rollout")
    display.step(4, metrics(0.5))
    assert display._progress.rewards == (0.1, 0.2, 0.3, 0.4, 0.5)
    assert display._progress.done == 5
    assert progress.remaining is None


def test_the_slowest_environments_are_those_whose_steps_take_longest():
    def group(env: str, *seconds: float) -> Group:
        answer = Completion(ints([1]), floats([0.0]), ints([0]), "stop")
        turns = tuple(Turn(ints([1]), answer, 0.0, {}, False, 1.0, each) for each in seconds)
        trajectory = Trajectory("e", Task(env, 0, {}, "t"), turns, Terminated(), (), 1.0)
        return Group(trajectory.task, (trajectory,), (Score(0.0),), 0)

    found = slowest_envs(
        [group("a", 0.1, 0.3), group("b", 2.0), group("c", 1.0, 1.0), group("d", 0.0)]
    )
    assert found == (
        EnvPace("b", 2.0, 2.0),
        EnvPace("c", 1.0, 1.0),
        EnvPace("a", pytest.approx(0.2), 0.3),
    )


values = st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(float("nan"))), max_size=400)


@given(values=values, width=st.integers(1, 40), height=st.integers(1, 6))
# Whose difference has no finite inverse.
@example(values=[0.0, 2.2250738585072014e-308], width=1, height=2)
@example(values=[-1.7e308, 1.7e308], width=1, height=2)
def test_a_curve_has_the_size_that_is_asked_for_and_dots_where_there_are_values(
    values, width, height
):
    lines = braille_curve(values, width, height)
    assert [len(line) for line in lines] == [width] * height
    has_values = any(math.isfinite(value) for value in values)
    assert any(character != "\u2800" for line in lines for character in line) == has_values


def test_a_rising_curve_begins_at_the_lower_left_and_ends_at_the_upper_right():
    lines = braille_curve(list(range(100)), 10, 3)
    assert "\u2800" not in (lines[-1][0], lines[0][-1])
    assert lines[0][0] == lines[-1][-1] == "\u2800"
    assert braille_curve([1.0, 1.0], 2, 1) == ["⣀⣀"]
    assert braille_curve([0.0, 1.0], 1, 1) == ["⡸"]


def test_durations_are_written_as_one_says_them():
    assert [duration(seconds) for seconds in (0.4, 59.9, 60, 3599, 3600)] == [
        "0 s",
        "59 s",
        "1:00",
        "59:59",
        "1:00:00",
    ]


def test_the_line_of_a_step_ends_with_the_time_left():
    assert line_of(made_up()[0]).endswith("failures 1 engine + 3 environment  left 19:55")


@pytest.mark.long
def test_a_real_run_draws_its_picture_in_a_real_terminal(tmp_path):
    import pexpect

    arguments = [
        "-c",
        "from agentrl.cli import main; main()",
        "train",
        str(ROOT / "examples" / "frozen_lake.yaml"),
        "recipe.demonstrations=null",
        "steps=2",
        "trackers=[]",
        "rollout.groups_per_step=2",
        "rollout.group_size=2",
        "rollout.budget.turns=2",
        "evaluation.tasks=0",
        f"run_dir={tmp_path / 'run'}",
    ]
    terminal = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    child = pexpect.spawn(
        sys.executable,
        arguments,
        env=terminal,
        dimensions=(40, 120),
        encoding="utf-8",
        timeout=PATIENCE_SECONDS,
    )
    child.logfile_read = io.StringIO()
    child.expect("groups ready")
    child.expect("2.* of 2 steps")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0, child.logfile_read.getvalue()
    shown = child.logfile_read.getvalue()
    assert "slots taken" in shown
    assert "last step" in shown
    assert "Traceback" not in shown
