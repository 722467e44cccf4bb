"""Where in a model the gradient is."""

import asyncio
import math
from pathlib import Path

import pytest
import torch

from agentrl.testing.trainers import LOSS, TrainerCase, random_batches
from agentrl.trainers.local import LocalTrainer
from agentrl.trainers.rank.gradient_norms import layer_groups, norms_of, squares


def test_blocks_are_told_apart_by_quarters_and_the_rest_by_its_place() -> None:
    blocks = [f"model.model.layers.{number}.mlp.up_proj.weight" for number in range(10)]
    others = {
        "model.model.embed_tokens.weight": "embedding",
        "model.model.norm.weight": "head",
        "value.weight": "head",
    }
    found = layer_groups((*blocks, *others))
    assert [found[name] for name in blocks] == [
        f"blocks/{quarter}" for quarter in (1, 1, 1, 2, 2, 3, 3, 3, 4, 4)
    ]
    assert {name: found[name] for name in others} == others
    assert set(
        layer_groups(("transformer.h.0.attn.weight", "transformer.h.1.attn.weight")).values()
    ) == {
        "blocks/1",
        "blocks/2",
    }


def test_the_norms_are_those_of_the_groups_gradients() -> None:
    gradients = {
        "model.embed_tokens.weight": torch.tensor([3.0, 4.0]),
        "model.layers.0.weight": torch.tensor([[1.0], [2.0]]),
        "model.layers.1.weight": None,
        "model.layers.0.bias": torch.tensor([2.0]),
        "lm_head.weight": torch.empty(0),
    }
    norms = norms_of(squares(gradients, torch.device("cpu")))
    assert norms == {
        "grad_norm/embedding": 5.0,
        "grad_norm/blocks/1": 3.0,
        "grad_norm/blocks/2": 0.0,
        "grad_norm/head": 0.0,
    }
    assert norms_of({}) == {}


def test_a_trainer_tells_them_of_each_step(shallow_model_dir: Path) -> None:
    async def main() -> dict[str, float]:
        config = LocalTrainer.Config(**{**TrainerCase().settings, "device": "cpu"})
        async with LocalTrainer(
            config, shallow_model_dir, total_steps=10, temperature=1.0
        ) as trainer:
            (batch,) = random_batches(shallow_model_dir, 1)
            return dict(await trainer.step(batch, LOSS, float(batch.num_loss_tokens)))

    metrics = asyncio.run(main())
    groups = {name: value for name, value in metrics.items() if name.startswith("grad_norm/")}
    assert {"grad_norm/embedding", "grad_norm/blocks/1", "grad_norm/head"} <= set(groups)
    assert math.hypot(*groups.values()) == pytest.approx(metrics["grad_norm"], rel=1e-4)
