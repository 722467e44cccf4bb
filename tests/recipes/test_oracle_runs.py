"""Runs on problems with exact answers, as a user starts them: the exact metrics are those of what
was sampled.
"""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "t_maze.yaml")
FEW = [
    "steps=2",
    "recipe.demonstrations.episodes=128",
    "recipe.demonstrations.episodes_per_step=8",
    "rollout.groups_per_step=8",
    "rollout.group_size=4",
    "evaluation.tasks=0",
    "trackers=[]",
    "run_dir=run",
]
MEMORYLESS = "rollout.context={name: last_k, turns: 1}"


def rows(agentrl: Callable[..., Any], folder: Path, *settings: str) -> list[dict[str, float]]:
    """The metrics of a run's steps."""
    done = agentrl("train", EXAMPLE, *settings, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [row for row in lines if "reward" in row]


@pytest.mark.slow
def test_the_exact_return_is_that_of_the_episodes_that_are_sampled(
    agentrl: Callable[..., Any], tmp_path: Path
) -> None:
    """A policy that hardly moves, with a critic: the mean of 64 episodes is within four standard
    errors.
    """
    settings = [
        "env.options.problem=stopping",
        "env.options.other=-0.5",
        "algorithm={name: turn_ppo}",
        "trainer.lr=1e-9",
    ]
    found = rows(agentrl, tmp_path, *FEW, *settings)
    assert len(found) == 2
    for row in found:
        assert row["exact/best_return"] == 2.5
        assert row["exact/return"] + row["exact/regret"] == pytest.approx(2.5)
        assert row["exact/other"] < 0.5
        assert -1 <= row["exact/advantage_cosine"] <= 1
        assert row["exact/value_error"] >= 0
    error = (fmean(row["reward_std"] ** 2 for row in found) / 64) ** 0.5
    assert abs(fmean(row["reward"] for row in found) - found[0]["exact/return"]) < 4 * error


@pytest.mark.slow
def test_a_policy_without_memory_is_never_worth_more_than_a_half_in_the_t_maze(
    agentrl: Callable[..., Any], tmp_path: Path
) -> None:
    found = rows(agentrl, tmp_path, *FEW, MEMORYLESS)
    assert all(0.0 < row["exact/return"] <= 0.5 + 1e-6 for row in found)
    assert all(row["exact/respelled"] < 0.01 for row in found)


@pytest.mark.long
def test_only_a_policy_that_remembers_solves_the_t_maze(
    agentrl: Callable[..., Any], tmp_path: Path
) -> None:
    for name, settings, low, high in (
        ("full", [], 0.95, 1.0),
        ("memoryless", [MEMORYLESS], 0.45, 0.5),
    ):
        (tmp_path / name).mkdir()
        last = rows(agentrl, tmp_path / name, "trackers=[]", "run_dir=run", *settings)[-1]
        assert low <= last["exact/return"] <= high + 1e-6
