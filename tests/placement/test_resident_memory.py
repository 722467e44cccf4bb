"""What the planner counts for a step is what the process really takes: its resident memory, on
CPUs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.models.facts import facts_of
from agentrl.placement.footprint import trainer_footprint
from agentrl.trainers.local import LocalTrainer

# A process of its own: what imports take is counted before, and the peak of the step alone by
# Linux.
PROGRAM = """
import asyncio, json, sys
from pathlib import Path
import numpy as np, torch
import agentrl.trainers.rank.one_device, agentrl.trainers.rank.worker
import transformers.models.qwen3.modeling_qwen3
from agentrl.batch import TrainingSample, collate
from agentrl.testing.trainers import LOSS
from agentrl.trainers.local import LocalTrainer

folder, sizes, settings, length, loss_tokens = Path(sys.argv[1]), *map(json.loads, sys.argv[2:])

def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

def sample(seed):
    rng, mask = np.random.default_rng(seed), np.zeros(length, bool)
    mask[-loss_tokens:] = True
    zeros = np.zeros(length)
    tokens = rng.integers(0, sizes["vocab_size"], length)
    return TrainingSample(tokens, mask, zeros, np.ones(length), np.where(mask, 0, -1), zeros)

async def main():
    torch.ones(2, 2) @ torch.ones(2, 2)
    imported = resident("VmRSS:")
    config = LocalTrainer.Config.model_validate(settings)
    async with LocalTrainer(config, folder, total_steps=3) as trainer:
        batch = collate([sample(seed) for seed in range(2)])
        await trainer.step(batch, LOSS, 1.0)  # makes the moments
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        await trainer.step(batch, LOSS, 1.0)
        print(json.dumps({"peak": resident("VmHWM:") - imported}))

asyncio.run(main())
"""

LARGE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
"""276 million parameters, which take 1.1 GB."""
SMALL: dict[str, Any] = {
    **LARGE,
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
}


def compared(
    tmp_path: Path, sizes: dict[str, Any], recompute: str, length: int
) -> tuple[float, float]:
    """The increase of resident memory over that after imports at the peak of a step, and what is
    counted for it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    settings = {
        "activation_checkpointing": recompute,
        "micro_batch_tokens": length,
        "device": "cpu",
    }
    given = (json.dumps(one) for one in (sizes, settings, length, 64))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), *given],
        # Memory that is free goes back to Linux at once.
        env={
            **os.environ,
            "MALLOC_MMAP_THRESHOLD_": "65536",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    layout = LocalTrainer.Config.model_validate(settings).layout()
    counted = trainer_footprint(
        facts_of(config, "model"), layout, 1, micro_batches=2, longest=length
    )
    return json.loads(done.stdout.splitlines()[-1])["peak"], counted.total


@pytest.mark.long
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_step_takes_the_resident_memory_that_was_counted(tmp_path: Path, recompute: str) -> None:
    measured, counted = compared(tmp_path, SMALL, recompute, 512)
    assert counted == pytest.approx(measured, rel=0.15)


@pytest.mark.long
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_step_of_a_model_of_a_gigabyte_takes_the_resident_memory_that_was_counted(
    tmp_path: Path, recompute: str
) -> None:
    measured, counted = compared(tmp_path, LARGE, recompute, 2048)
    assert counted == pytest.approx(measured, rel=0.15)
