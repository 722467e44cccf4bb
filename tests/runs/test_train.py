"""`agentrl.train`: a run from Python, in a script or in the cell of a notebook."""

import asyncio
import json
from pathlib import Path

import pytest

import agentrl

CONFIG = Path(__file__).parents[2] / "examples" / "frozen_lake.yaml"
SMALL = (
    "steps=1",
    "recipe.demonstrations=null",
    "rollout.groups_per_step=2",
    "rollout.group_size=2",
    "evaluation.tasks=2",
    "trackers=[]",
)


@pytest.mark.slow
def test_a_run_is_trained_from_a_notebook_and_resumed_from_a_script(tmp_path: Path) -> None:
    run = tmp_path / "run"
    overrides = [*SMALL, f"run_dir={run}"]

    async def cell() -> dict[str, object]:  # a notebook runs its cells in a loop
        return agentrl.train(CONFIG, overrides)

    summary = asyncio.run(cell())
    assert summary == json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 1

    again = agentrl.train(run / "config.yaml", ["steps=2"], resume=True)
    assert again["steps"] == 2
    assert [row["step"] for row in agentrl.metrics_of(run) if "loss" in row] == [0, 1]


def test_a_wrong_setting_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(agentrl.ConfigError, match="Did you mean 'lr'"):
        agentrl.train(CONFIG, ["trainer.lrr=1", f"run_dir={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()
