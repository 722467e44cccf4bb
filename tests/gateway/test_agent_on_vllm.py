"""A program that trains what vLLM serves."""

import json
from pathlib import Path

import pytest

from tests.commands import Command
from tests.processes import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
SETTINGS = (
    "recipe.demonstrations=null",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "steps=3",
    "evaluation.tasks=8",
    "engine=vllm",
    "engine.max_batch=16",
    "rollout.max_staleness=0",
)


@pytest.mark.vllm
@pytest.mark.long
def test_a_program_trains_what_vllm_serves(tmp_path, monkeypatch):
    # As users have it: what vLLM compiles agrees with the trainer.
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    config = str(ROOT / "examples" / "agent" / "agent.yaml")
    command = Command(
        "train", config, *SETTINGS, "run_dir=run", cwd=tmp_path, log=tmp_path / "run.log"
    )
    assert command.wait(PATIENCE_SECONDS) == 0, command.output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["tasks"]["trained"] == summary["tasks"]["total"] == 12
    # The trainer computes what the engine sampled, token for token.
    assert summary["largest_logprob_gap"] < 1e-3
