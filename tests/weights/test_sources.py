"""What the ranks of each trainer send is what the trainer has, in any number format."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from agentrl.testing.trainers import LOSS, random_batches
from agentrl.trainers.deepspeed import DeepSpeedTrainer
from agentrl.trainers.fsdp import FsdpTrainer
from agentrl.trainers.local import LocalTrainer
from agentrl.trainers.settings import LoraSettings
from agentrl.weights.bundle import BundlePlace, WeightBundle
from agentrl.weights.publisher import checksum
from agentrl.weights.transports.files import WriteBuckets, bundle_of

TRAINERS = {
    "local": (LocalTrainer, {}),
    "fsdp": (FsdpTrainer, {"world_size": 2}),
    "zero 1": (DeepSpeedTrainer, {"world_size": 2, "zero_stage": 1}),
    "zero 3": (DeepSpeedTrainer, {"world_size": 2, "zero_stage": 3}),
}

IN_CI = {("dense", "local")}


def mixture(folder: Path) -> Path:
    """A mixture whose experts have other names in its folder, and odd sizes."""
    config = Qwen3MoeConfig(
        vocab_size=67,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=3,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(
            kind,
            name,
            marks=pytest.mark.slow if (kind, name) in IN_CI else pytest.mark.long,
        )
        for kind in ("dense", "mixture", "adapters")
        for name in TRAINERS
    ],
)
def test_the_ranks_send_what_the_trainer_has(
    name: str, kind: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    make, settings = TRAINERS[name]
    model = mixture(tmp_path / "model") if kind == "mixture" else tiny_model_dir
    more: dict[str, Any] = {"lora": LoraSettings(rank=3)} if kind == "adapters" else {}

    async def main() -> None:
        config = make.Config(**settings, **more, lr=1e-2)
        async with make(config, model, total_steps=2) as trainer:
            (batch,) = random_batches(model, 1)
            await trainer.step(batch, LOSS, 10.0)
            weights = dict(await trainer.weights())
            for dtype in ("float32", "bfloat16"):
                place = BundlePlace(tmp_path / f"in {dtype}", 1, 2000)
                answers = await trainer.send_weights(WriteBuckets(place, dtype))
                # Each rank has written a part of the files.
                assert all(answer is not None and answer.buckets for answer in answers)
                sent = WeightBundle.open(bundle_of(place, answers).folder)
                is_low_rank = kind == "adapters"
                wanted = torch.float32 if is_low_rank else getattr(torch, dtype)
                assert checksum(sent) == checksum(
                    {name: weight.to(wanted) for name, weight in weights.items()}
                )
                assert sent.shapes() == {n: tuple(w.shape) for n, w in weights.items()}
                assert is_low_rank == (sent.manifest.update is not None)

    asyncio.run(main())
