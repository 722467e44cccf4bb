"""Pieces about trainers of several ranks, and about what they keep in the host's memory."""

import asyncio
import math
import time
from collections.abc import Sequence

import numpy as np
import torch

from agentrl.batch import TrainBatch
from agentrl.models.facts import model_facts
from agentrl.trainers.fsdp import FsdpTrainer
from agentrl.trainers.group import GroupTrainer
from agentrl.trainers.local import LocalTrainer
from benchmarks.battery.piece import Findings, Place
from benchmarks.battery.subjects import (
    GIB,
    LOSS,
    SMALL,
    Rank,
    free_memory,
    largest_model,
    make_steps,
    model_flops,
    planned,
    product_flops,
    random_batch,
    random_model,
    remove_model,
)


def offload(place: Place, findings: Findings) -> None:
    """Moments and the inputs of layers on the device, and in the host's memory."""
    model = random_model(place, SMALL)
    samples, tokens = (8, 2048) if place.on_gpu else (4, 48)
    batches = [random_batch(model_facts(model).vocab, samples, tokens, seed) for seed in range(3)]
    found = {}
    for name, away in (("on the device", False), ("in the host's memory", True)):
        settings = {"optimizer_offload": away, "activation_offload": away}
        rank = Rank.open(place, model, FsdpTrainer, activation_checkpointing="full", **settings)
        found[name] = make_steps(place, rank, batches)
        rank.close()
        del rank
        free_memory(place)
        findings.note(f"{name}: a step", found[name].seconds, "s")
        findings.note(f"{name}: peak", found[name].peak / GIB, "GiB")
    kept, moved = found.values()
    _check_losses(findings, kept.losses, moved.losses)
    if place.on_gpu:
        findings.check(moved.peak < kept.peak, "keeping it in the host's memory frees nothing")
    remove_model(model)


def fsdp(place: Place, findings: Findings) -> None:
    """The same steps on two ranks and on one device, in float32."""
    model = random_model(place, SMALL, layers=8)
    samples, tokens = (16, 1024) if place.on_gpu else (6, 48)
    batches = [random_batch(model_facts(model).vocab, samples, tokens, seed) for seed in range(4)]
    losses = {}
    for name, kind, settings in (
        ("one device", LocalTrainer, {"device": place.device}),
        ("two ranks", FsdpTrainer, {"world_size": 2}),
    ):
        config = kind.Config(dtype="float32", micro_batch_tokens=2048, lr=1e-4, **settings)
        trainer = kind(config, model, total_steps=len(batches))
        losses[name], seconds = asyncio.run(_train(trainer, batches))
        findings.note(f"{name}: a step", seconds, "s")
        findings.note(f"{name}: tokens", len(batches[-1].tokens_S) / seconds, "/s")
        free_memory(place)
    _check_losses(findings, *losses.values())
    remove_model(model)


def fsdp_step(place: Place, findings: Findings) -> None:
    """The largest model over all GPUs: tokens/s, utilisation, and memory beside the plan."""
    ranks, context = torch.cuda.device_count(), 4096
    name, settings = largest_model(place, FsdpTrainer, context, world_size=ranks)
    model = random_model(place, name)
    facts = model_facts(model)
    findings.note("model", name)
    findings.note("ranks", float(ranks))
    peak_flops = product_flops(place)
    free_memory(place)
    batches = [random_batch(facts.vocab, 8 * ranks, context, seed) for seed in range(3)]
    free_before, whole = torch.cuda.mem_get_info()
    trainer = FsdpTrainer(settings, model, total_steps=len(batches))
    losses, seconds, free = asyncio.run(_train_and_look(trainer, batches))
    findings.note("a step", seconds, "s")
    findings.note("tokens", len(batches[-1].tokens_S) / seconds, "/s")
    used = model_flops(facts, batches[-1]) / seconds / (ranks * peak_flops)
    findings.note("model FLOP utilisation, of the measured product", used)
    plan = planned(model, settings, context)
    findings.note("planned in all", plan.total / GIB, "GiB")
    if free is not None:
        findings.note("taken on the fullest GPU", (free_before - free) / GIB, "GiB")
    findings.note("memory of a GPU", whole / GIB, "GiB")
    findings.check(all(map(math.isfinite, losses)), f"losses are {losses}")
    remove_model(model)


async def _train(trainer: GroupTrainer, batches: Sequence[TrainBatch]) -> tuple[list[float], float]:
    """Make a step on each batch; the losses, and the median seconds of all steps but the first."""
    async with trainer:
        return await _make_steps(trainer, batches)


async def _train_and_look(
    trainer: GroupTrainer, batches: Sequence[TrainBatch]
) -> tuple[list[float], float, int | None]:
    """The same, and the free bytes on the fullest device afterwards."""
    async with trainer:
        losses, seconds = await _make_steps(trainer, batches)
        return losses, seconds, await trainer.free()


async def _make_steps(
    trainer: GroupTrainer, batches: Sequence[TrainBatch]
) -> tuple[list[float], float]:
    losses, seconds = [], []
    for batch in batches:
        began = time.perf_counter()
        metrics = await trainer.step(batch, LOSS, float(batch.num_loss_tokens))
        seconds.append(time.perf_counter() - began)
        losses.append(metrics["loss"])
    return losses, float(np.median(seconds[1:]))


def _check_losses(findings: Findings, some: Sequence[float], others: Sequence[float]) -> None:
    apart = max(abs(one - other) for one, other in zip(some, others, strict=True))
    findings.note("largest difference of losses", apart)
    largest = max(map(abs, others))
    findings.check(
        apart <= 1e-3 + 0.02 * largest, f"losses are {list(some)} here and {list(others)} there"
    )
