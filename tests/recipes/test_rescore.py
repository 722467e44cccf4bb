"""Saved episodes are scored again with another reward, and what changes is told."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.from_file import load_config
from agentrl.flow import run_virtual
from agentrl.observe.trajectories import write_trajectories
from agentrl.recipes.rescore import changes, rescore
from agentrl.tokens.arrays import floats, ints
from agentrl.trajectory import (
    SEGMENT,
    Completion,
    Message,
    Score,
    Status,
    Task,
    Terminated,
    Trajectory,
    Truncated,
    Turn,
)

HERE = "tests.recipes.test_rescore"


def said(
    episode: str, answer: str, gold: str, score: float, status: Status | None = None
) -> tuple[Trajectory, Score]:
    """An episode of one answer to a task whose right answer is `gold`, with its score."""
    done = Completion(ints([5, 2]), floats([-1, -1]), ints([0, 0]), "stop")
    task = Task("guess_number", 3, {"gold": gold}, episode.rpartition("/")[0])
    return (
        Trajectory(
            episode,
            task,
            (Turn(ints([1]), done, score, {}),),
            status or Terminated(),
            (Message("user", "?"), Message("assistant", answer)),
        ),
        Score(score),
    )


def is_right(trajectory: Trajectory) -> float:
    """1 for the task's own answer; fails for an answer that is no number."""
    return float(int(trajectory.messages[-1].content) == int(trajectory.task.options["gold"]))


class Rank:
    """The place of an answer among those of its group."""

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        answers = [int(one.messages[-1].content) for one in trajectories]
        return [Score(float(sorted(answers).index(answer))) for answer in answers]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    first = [
        said("train-0/0", "7", "7", 0.0),
        said("train-0/1", "8", "7", 1.0, Truncated("turns")),
        said("train-1/0", "4", "4", 1.0, SEGMENT),
        said("train-1/0", "4", "4", 1.0),
        said("train-1/1", "four", "4", 0.0),
    ]
    write_trajectories(folder / "trajectories" / "step_000000.parquet", first)
    unscored = (said("train-2/0", "1", "1", 0.0)[0], Score.failed("the judge was down"))
    write_trajectories(folder / "trajectories" / "step_000001.parquet", [unscored])
    held_out = [said("held_out-0/0", "7", "7", 0.0)]
    write_trajectories(folder / "trajectories" / "held_out_000000.parquet", held_out)
    (folder / "config.yaml").write_text("env: guess_number\nmodel: tiny\n")
    return folder


def scored_again(run: Path, reward: str, step: int | None = None) -> Any:
    config = load_config(run / "config.yaml", [f"reward={reward}"]).config
    return run_virtual(lambda: rescore(config, run, step))


def test_each_trained_episode_has_its_old_and_its_new_score(run: Path) -> None:
    found = scored_again(run, f"{HERE}:is_right")
    assert [(one.trajectory.id, one.before) for one in found[:4]] == [
        ("train-0/0", 0.0),
        ("train-0/1", 1.0),
        ("train-1/0", 1.0),
        ("train-1/1", 0.0),
    ]
    assert [one.after for one in found[:3]] == [1.0, 0.0, 1.0]
    assert math.isnan(found[3].after), "a failure is no number"
    assert "invalid literal" in str(found[3].score.status)
    assert math.isnan(found[4].before)
    assert found[1].trajectory.status == Truncated("turns")
    figures = changes(found)
    assert (figures.episodes, figures.failed, figures.unknown, figures.changed) == (5, 1, 1, 2)
    assert figures.means == pytest.approx((2 / 3, 2 / 3))
    assert (figures.groups, figures.mixed, figures.reordered) == (2, (1, 1), 1.0)


def test_members_are_compared_within_their_group(run: Path) -> None:
    found = scored_again(run, f"{HERE}:Rank", step=0)
    assert [one.after for one in found[:2]] == [0.0, 1.0]
    assert all(math.isnan(one.after) for one in found[2:]), "one member fails the whole group"


def test_the_command_tells_what_changes_and_writes_over_nothing(
    run: Path, tmp_path: Path, agentrl: Callable[..., Any]
) -> None:
    into = tmp_path / "scores.jsonl"
    words = ("rescore", str(run), "--reward", f"{HERE}:is_right", "-o", str(into))
    done = agentrl(*words)
    assert done.returncode == 0, done.stderr
    assert (
        "5 episodes in 2 groups: 2 scores change; 1 cannot be scored, 1 had no score" in done.stdout
    )
    assert "success 66.7% -> 66.7%" in done.stdout
    rows = [json.loads(line) for line in into.read_text().splitlines()]
    assert [(row["before"], row["after"]) for row in rows] == [
        (0.0, 1.0),
        (1.0, 0.0),
        (1.0, 1.0),
        (0.0, None),
        (None, 1.0),
    ]
    again = agentrl(*words)
    assert again.returncode == 2
    assert "is there already" in again.stderr
    missing = agentrl("rescore", str(run), "--reward", "environment", "--step", "7")
    assert "has no episodes of step 7" in missing.stderr
