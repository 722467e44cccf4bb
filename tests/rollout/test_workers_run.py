"""Whole runs on rollout workers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentrl.runs.train import train

ROOT = Path(__file__).parents[2]
# One request at a time and without what earlier turns have left: both are a matter of timing, and
# round the last bits otherwise.
SETTINGS = """
steps: 2
reward: [tests.rollout.worker_parts:letters, {name: environment, weight: 0.5}]
rollout:
  {groups_per_step: 2, group_size: 4, budget: {turns: 4}, sampling: {max_tokens: 6}}
engine: {max_batch: 1, prefix_cache: false}
trainer: {lr: 1e-3}
checkpoint: {every: 2}
evaluation: {tasks: 2}
trackers: []
"""
RUNS = {
    "one agent": "env: frozen_lake",
    "a frozen agent": "env: {name: kuhn_poker, agents: {south: {name: frozen, refresh: 2}}}",
    "a mixture": "env: [{name: frozen_lake}, {name: guess_number, weight: 2}]",
    "self-play": "env: kuhn_poker\nrecipe: {name: self_play, latest: 0.3, every: 1}",
}


def trained(folder: Path, run: str, *overrides: str) -> tuple[dict[str, Any], list[Any]]:
    """The weights after a run, and what its metrics say of each step."""
    folder.mkdir()
    config = folder / "config.yaml"
    config.write_text(f"{RUNS[run]}\n{SETTINGS}")
    settings = [f"run_dir={folder / 'run'}", *overrides]
    if "cluster=ray" in overrides:
        # A process starts Ray only once, and that of other tests has GPUs that are not there.
        command = [sys.executable, "-m", "agentrl", "train", str(config), *settings]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    else:
        train(config, settings)
    rows = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    keys = ("reward", "sampled_tokens", "loss", "grad_norm", "eval/reward", "opponents/share")
    weights = next((folder / "run" / "checkpoints").glob("*2/model.safetensors"))
    return load_file(weights), [{key: row.get(key) for key in keys} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "cluster"),
    [
        pytest.param(name, "local", marks=() if name == "a frozen agent" else pytest.mark.long)
        for name in RUNS
    ]
    # There, workers ask the engine themselves.
    + [pytest.param("a frozen agent", "ray", marks=pytest.mark.long)],
)
def test_a_run_has_the_same_weights_with_and_without_workers(
    tmp_path: Path, run: str, cluster: str
) -> None:
    weights, steps = trained(tmp_path / "alone", run)
    on_workers, their_steps = trained(
        tmp_path / "workers", run, "rollout.workers=2", f"cluster={cluster}"
    )
    assert their_steps == steps
    assert any(step["grad_norm"] for step in steps)
    assert on_workers.keys() == weights.keys()
    assert all(torch.equal(weights[name], on_workers[name]) for name in weights)
