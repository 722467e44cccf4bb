"""A whole run on a tool environment whose reward has parts of every kind."""

import asyncio
import json
from io import StringIO
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from agentrl.config import load_config
from agentrl.runs.run import Run
from agentrl.trajectory import Score, Trajectory


def words(trajectory: Trajectory, *, per_word: float) -> float:
    """A plain function as a part."""
    return per_word * sum(
        len(message.content.split())
        for message in trajectory.messages
        if message.role == "assistant"
    )


class Ranks:
    """A part that compares: the member with the fewest tokens gets 1, the one with the most 0."""

    async def score_group(self, trajectories):
        order = sorted(range(len(trajectories)), key=lambda member: trajectories[member].num_tokens)
        return [
            Score(1 - order.index(member) / (len(order) - 1)) for member in range(len(trajectories))
        ]


PARTS = [
    "environment",
    {"name": "tool_use", "weight": 0.5},
    {"name": "monitor", "formula": "F submit & G !refused", "as": "rule"},
    {"name": "regex", "pattern": "[aeiou]", "as": "vowels", "weight": 0.25},
    {
        "name": "tests.scoring.test_run:words",
        "per_word": 0.5,
        "as": "words",
        "weight": 0.1,
        "isolation": "process",
    },
    {"name": "tests.scoring.test_run:Ranks", "weight": 2.0},
]
CONFIG = {
    "steps": 2,
    "env": "calculator",
    "rollout": {
        "groups_per_step": 2,
        "group_size": 4,
        "budget": {"turns": 2},
        "sampling": {"max_tokens": 6},
    },
    "reward": PARTS,
    "batch_processing": {
        "constraints": [{"part": "rule/violated", "at_most": 0.25, "rate": 0.2}],
        "normalize": "batch",
    },
    "evaluation": {"tasks": 2},
    "trackers": [],
}


@pytest.mark.slow
def test_a_run_with_parts_of_every_kind_trains_and_each_has_its_curve(tmp_path: Path) -> None:
    path = tmp_path / "parts.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, "run_dir": str(tmp_path / "run")}))
    with Run(load_config(path), Console(file=StringIO())) as run:
        asyncio.run(run.config.recipe.call(run))
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [row for row in rows if "reward" in row]
    weights = {
        "environment": 1,
        "tool_use": 0.5,
        "rule": 1,
        "vowels": 0.25,
        "words": 0.1,
        "Ranks": 2,
    }
    assert len(steps) == 2
    multiplier = 0.0
    for row in steps:
        assert row["reward"] == pytest.approx(
            sum(weight * row[f"reward/{name}"] for name, weight in weights.items())
        )
        assert row["reward/Ranks"] == pytest.approx(0.5)
        assert all(f"reward_std/{name}" in row for name in weights)
        assert row["constraints/rate/rule/violated"] == row["reward/rule/violated"]
        multiplier = max(0.0, multiplier + 0.2 * (row["reward/rule/violated"] - 0.25))
        assert row["constraints/multiplier/rule/violated"] == pytest.approx(multiplier)
    assert multiplier > 0, "an untrained model submits nothing"
    assert all("eval/reward" in row for row in rows if "eval/success" in row)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["episodes"]["failed"] == 0
