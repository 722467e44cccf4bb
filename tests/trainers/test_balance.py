"""The balance of experts: transformers' own loss and its gradient, however a batch is packed and
divided.
"""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from agentrl.batch import TrainBatch, collate
from agentrl.errors import ConfigError
from agentrl.placement.mesh import ONE_RANK
from agentrl.protocols import LossOutput
from agentrl.testing.trainers import random_samples
from agentrl.trainers.batch_shards import shard_batch
from agentrl.trainers.local import LocalTrainer
from agentrl.trainers.rank.worker import TrainerRank, _Tally
from agentrl.trainers.spec import TrainerSpec
from tests.model_families import FAMILIES, make_model

MIXTURES = [name for name, family in FAMILIES.items() if family.mixture]
COEFFICIENT = 0.5


def nothing(logprobs_N: Tensor, tokens: Any) -> LossOutput:
    """A loss of zero, so that the gradient is that of the balance alone."""
    return LossOutput(0 * logprobs_N, {})


def folder_of(name: str, folder: Path, *, says: bool = False) -> Path:
    """A model of the family; `says`: its config has `output_router_logits`."""
    make_model(name, folder)
    if says:
        config = AutoConfig.from_pretrained(folder)
        config.output_router_logits = True
        config.save_pretrained(folder)
    return folder


def batch_for(folder: Path, count: int = 8) -> TrainBatch:
    vocab_size = AutoConfig.from_pretrained(folder).vocab_size
    return collate(random_samples(vocab_size, seed=3, count=count))


def wanted(folder: Path, batch: TrainBatch) -> tuple[float, dict[str, Tensor]]:
    """transformers' loss of the padded samples that have loss tokens, and its gradient by the names
    of parameters.
    """
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    rows = np.split(batch.tokens_S, np.cumsum(batch.lengths_M)[:-1])
    ids = [
        torch.tensor(row).long()
        for row, count in zip(rows, batch.loss_tokens_M, strict=True)
        if count
    ]
    mask_BT = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    called = {"input_ids": pad_sequence(ids, batch_first=True), "attention_mask": mask_BT}
    logits = model.base_model(**called, use_cache=False, output_router_logits=True).router_logits
    loss = load_balancing_loss_func(
        logits, logits[0].shape[-1], model.config.num_experts_per_tok, mask_BT
    )
    loss.backward()
    return float(loss.detach()), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


def found(folder: Path, batch: TrainBatch, **settings: Any) -> tuple[float, dict[str, Tensor], int]:
    """The same by a rank of ours, and the number of its micro-batches."""
    config = LocalTrainer.Config(device="cpu", router_aux_loss_coef=COEFFICIENT, **settings)
    rank = TrainerRank(TrainerSpec(LocalTrainer.sharding, config, folder, 1, 1.0), 0)
    rank.open(ONE_RANK, "")
    ((micro_batches,),) = shard_batch(batch, config, parts=1)
    tally = _Tally()
    rank._accumulate(micro_batches, [None] * len(micro_batches), nothing, 1.0, tally)
    named = rank.sharding.trainable.model.named_parameters()
    grads = {name: p.grad / COEFFICIENT for name, p in named if p.grad is not None}
    value = float(tally.balance)
    rank.close()
    return value, grads, len(micro_batches)


def compare(folder: Path, batch: TrainBatch, most: int, **settings: Any) -> None:
    want, gradients = wanted(folder, batch)
    value, grads, count = found(folder, batch, micro_batch_tokens=most, **settings)
    assert (count > 1) == (most < 1000)
    assert value == pytest.approx(want, rel=1e-6)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert largest > 0
    for name, gradient in gradients.items():
        off = (grads.get(name, torch.zeros_like(gradient)) - gradient).abs().max()
        assert float(off) < 1e-5 * largest, name
    assert all(not grads[name].any() for name in grads.keys() - gradients.keys())


@pytest.mark.parametrize("most", [40, 10_000])
def test_the_loss_and_its_gradient_are_those_of_transformers_however_samples_are_packed(
    tmp_path, most
):
    folder = folder_of("Qwen3-MoE", tmp_path / "model", says=True)
    compare(folder, batch_for(folder), most, dtype="float32")


@pytest.mark.parametrize("name", [name for name in MIXTURES if name != "Qwen3-MoE"])
def test_the_loss_of_every_mixture_is_that_of_transformers(tmp_path, name):
    folder = folder_of(name, tmp_path / "model")
    compare(folder, batch_for(folder, count=4), 60, dtype="float32")


def test_layers_that_are_computed_again_have_the_same_gradient(tmp_path):
    folder = folder_of("OLMoE", tmp_path / "model")
    compare(folder, batch_for(folder), 60, dtype="float32", activation_checkpointing="full")


def step(trainer: Any, batch: TrainBatch) -> dict[str, float]:
    async def main() -> dict[str, float]:
        async with trainer:
            return dict(await trainer.step(batch, nothing, 1.0))

    return asyncio.run(main())


def test_it_is_told_and_trained_on_only_where_it_is_asked_for(tmp_path):
    folder = folder_of("Qwen3-MoE", tmp_path / "model", says=True)
    batch = batch_for(folder)
    off, on = (
        step(
            LocalTrainer(LocalTrainer.Config(device="cpu", **settings), folder, total_steps=1),
            batch,
        )
        for settings in (
            {},
            {"router_aux_loss_coef": COEFFICIENT, "minibatches": 2, "micro_batch_tokens": 60},
        )
    )
    assert "router_aux_loss" not in off
    assert off["grad_norm"] == 0.0
    assert 2 <= on["router_aux_loss"] < 4, "from as many as are chosen to as many as there are"
    assert on["grad_norm"] > 0
    assert on["loss"] == 0.0


def test_a_model_without_routers_is_refused_by_name(tiny_model_dir):
    config = LocalTrainer.Config(device="cpu", router_aux_loss_coef=0.01)
    with pytest.raises(
        ConfigError,
        match=(
            r"router_aux_loss_coef is 0.01, and transformers names no routers of Qwen3ForCausalLM"
        ),
    ):
        step(LocalTrainer(config, tiny_model_dir, total_steps=1), batch_for(tiny_model_dir))
