"""Pieces about the trainer on one device."""

import gzip
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from agentrl.batch import TrainBatch
from agentrl.models.facts import model_facts
from agentrl.trainers.compute import attention as segments_attention
from agentrl.trainers.compute import flex
from agentrl.trainers.compute.compiled import compile_blocks
from agentrl.trainers.compute.forward import to_device
from agentrl.trainers.local import LocalTrainer
from benchmarks.battery.piece import Findings, Place, SkipError
from benchmarks.battery.subjects import (
    GIB,
    SMALL,
    Rank,
    distance,
    free_memory,
    largest_model,
    make_steps,
    model_flops,
    note_plan,
    planned,
    product_flops,
    random_batch,
    random_model,
    remove_model,
    synchronize,
)

_LOGPROB_TOLERANCE, _GRADIENT_TOLERANCE = 0.05, 0.1
"""Of bfloat16 from float32: nats of a mean logprob; a gradient's difference as a share of it."""


def speeds(place: Place, findings: Findings) -> None:
    """Products, memory and links, as the planner needs them."""
    findings.note("product", product_flops(place) / 1e12, "TFLOP/s")
    mib = 1024 if place.on_gpu else 8
    here = torch.empty(mib << 20, dtype=torch.uint8, device=place.device)
    copied = _rate(place, here.clone, 2 * here.nbytes)
    findings.note("copies in the device's memory", copied, "GB/s")
    if not place.on_gpu:
        return
    for name, pinned in (("pageable", False), ("pinned", True)):
        there = torch.empty(mib << 20, dtype=torch.uint8, pin_memory=pinned)
        sent = _rate(place, lambda there=there: here.copy_(there), here.nbytes)  # type: ignore[misc]
        findings.note(f"from {name} memory of the host", sent, "GB/s")
        taken = _rate(place, lambda there=there: there.copy_(here), here.nbytes)  # type: ignore[misc]
        findings.note(f"to {name} memory of the host", taken, "GB/s")
    if torch.cuda.device_count() > 1:
        other = torch.empty_like(here, device="cuda:1")
        findings.note(
            "to the next GPU", _rate(place, lambda: other.copy_(here), here.nbytes), "GB/s"
        )


def _rate(place: Place, work: Callable[[], object], bytes_: int) -> float:
    """GB/s: the best of five."""
    best = math.inf
    for _ in range(5):
        synchronize(place)
        began = time.perf_counter()
        work()
        synchronize(place)
        best = min(best, time.perf_counter() - began)
    return bytes_ / best / 1e9


def attention(place: Place, findings: Findings) -> None:
    """The device in bfloat16, and in float32, against the CPU in float32."""
    model = random_model(place, SMALL, layers=4)
    batch = random_batch(512, samples=6, tokens=300 if place.on_gpu else 40)
    logprobs_N, gradients = _pass(Rank.open(place, model, device="cpu", dtype="float32"), batch)
    if place.on_gpu:
        kernel = segments_attention._flash_kernel(torch.device("cuda", 0))
        findings.note("flash kernel", "none" if kernel is None else "torch's varlen_attn")
        findings.check(
            kernel is not None or torch.cuda.get_device_capability() < (8, 0),
            "this GPU could run the flash kernel, and this torch has none that is known",
        )
    for kind, tolerances in (
        ("float32", (1e-3, 1e-3)),
        ("bfloat16", (_LOGPROB_TOLERANCE, _GRADIENT_TOLERANCE)),
    ):
        free_memory(place)
        found_N, found = _pass(Rank.open(place, model, dtype=kind), batch)
        gap, apart = float(np.abs(found_N - logprobs_N).mean()), distance(found, gradients)
        findings.note(f"{kind}: mean gap of logprobs", gap, "nats")
        findings.note(f"{kind}: largest gap", float(np.abs(found_N - logprobs_N).max()), "nats")
        findings.note(f"{kind}: difference of gradients", apart, "of their norm")
        findings.check(gap <= tolerances[0], f"in {kind}, logprobs are off by {gap:.3g} on average")
        findings.check(apart <= tolerances[1], f"in {kind}, gradients are off by {apart:.1%}")
    remove_model(model)
    if place.on_gpu:
        _check_caps_and_sinks(findings)


def _check_caps_and_sinks(findings: Findings) -> None:
    """Layers as those of Gemma 2 and gpt-oss, in bfloat16, against the CPU in float32."""
    kernel = flex.flex_kernel(torch.device("cuda", 0))
    findings.note("kernel for caps and sinks", "none" if kernel is None else "torch's flex")
    lengths, generator = (700, 300, 24), torch.Generator().manual_seed(0)
    shapes = [(1, heads, sum(lengths), 64) for heads in (8, 2, 2)]
    made = [torch.randn(shape, generator=generator) for shape in (*shapes, (8,))]
    for window, softcap in ((None, 20.0), (200, None)):
        found: list[list[torch.Tensor]] = []
        for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
            inputs = [one.to(device, dtype).requires_grad_() for one in made]
            query, key, value, sinks = inputs
            segments = segments_attention.Segments.of(lengths, torch.device(device))
            out, _ = segments_attention.attend(
                torch.nn.Module(),
                query,
                key,
                value,
                None,
                segments=segments,
                sliding_window=window,
                softcap=softcap,
                s_aux=sinks,
            )
            gradients = torch.autograd.grad(out.float().square().sum(), inputs)
            found.append([one.float().cpu() for one in (out, *gradients)])
        layer = f"a window of {window}" if softcap is None else f"a cap of {softcap:g}"
        names = ("out", "query", "key", "value", "sinks")
        named = [dict(zip(names, one, strict=True)) for one in found]
        apart = distance(named[1], named[0])
        findings.note(f"sinks and {layer}: difference of results and gradients", apart)
        findings.check(
            apart <= _GRADIENT_TOLERANCE, f"layers with sinks and {layer} are off by {apart:.1%}"
        )


def _pass(rank: Rank, batch: TrainBatch) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """The logprobs of a batch, and the gradients of their sum, weighted by the advantages."""
    sharding = rank.worker.sharding
    sharding.clear()
    for micro_batch in rank.shard(batch)[0]:
        samples = to_device(micro_batch, sharding.device)
        loss = (sharding.predict(samples) * samples.advantages_N).sum()
        sharding.backward(loss, last=False)
    gradients = {
        name: parameter.grad.float().cpu()
        for name, parameter in sharding.trainable.model.named_parameters()
        if parameter.grad is not None
    }
    sharding.clear()
    return rank.logprobs(batch), gradients


def trainer_step(place: Place, findings: Findings) -> None:
    """The largest model that fits: tokens/s, utilisation, and its peak beside the plan."""
    context, samples = (4096, 16) if place.on_gpu else (64, 4)
    name = largest_model(place, LocalTrainer, context)[0] if place.on_gpu else SMALL
    model = random_model(place, name)
    facts = model_facts(model)
    findings.note("model", name if place.on_gpu else "tiny")
    findings.note("parameters", facts.parameters / 1e9, "billion")
    free_memory(place)
    peak_flops = product_flops(place)
    free_memory(place)
    rank = Rank.open(place, model)
    batches = [random_batch(facts.vocab, samples, context, seed) for seed in range(4)]
    steps = make_steps(place, rank, batches)
    _note_speed(findings, steps.tokens / steps.seconds, steps.seconds, peak_flops)
    used = model_flops(facts, batches[-1]) / steps.seconds / peak_flops
    findings.note("model FLOP utilisation, of the measured product", used)
    if place.on_gpu:
        note_plan(findings, steps, planned(model, rank.settings, context))
    findings.check(all(map(math.isfinite, steps.losses)), f"losses are {steps.losses}")
    remove_model(model)


def _note_speed(findings: Findings, rate: float, seconds: float, peak_flops: float) -> None:
    findings.note("tokens", rate, "/s")
    findings.note("a step", seconds, "s")
    findings.note("measured product", peak_flops / 1e12, "TFLOP/s")


def int8_moments(place: Place, findings: Findings) -> None:
    """Steps with moments in float32 and in int8, from the same weights on the same batches."""
    model = random_model(place, SMALL)
    facts = model_facts(model)
    samples, tokens = (8, 2048) if place.on_gpu else (4, 48)
    batches = [random_batch(facts.vocab, samples, tokens, seed) for seed in range(4)]
    ended, taken = {}, {}
    first = Rank.open(place, model).weights()
    for kind in ("float32", "int8"):
        free_memory(place)
        rank = Rank.open(place, model, moments=kind, lr=1e-4)
        steps = make_steps(place, rank, batches)
        findings.note(f"{kind}: a step", steps.seconds, "s")
        if place.on_gpu:
            taken[kind] = steps.peak
            findings.note(f"{kind}: peak", steps.peak / GIB, "GiB")
        moved = rank.weights()
        ended[kind] = {name: moved[name] - first[name] for name in first}
        del rank
    apart = distance(ended["int8"], ended["float32"])
    findings.note("difference of what the steps changed", apart, "of it")
    findings.check(apart < 0.3, f"the changes of the weights differ by {apart:.1%}")
    if place.on_gpu:
        saved = (taken["float32"] - taken["int8"]) / facts.parameters
        findings.note("saved", saved, "bytes a parameter")
        findings.check(saved > 4, f"int8 moments save {saved:.1f} bytes a parameter, and not 6")
    remove_model(model)


def compiled(place: Place, findings: Findings) -> None:
    """Layers compiled as `trainer.compile` does against layers as they are."""
    if place.on_gpu and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        raise SkipError("torch.compile needs a C compiler, and there is none")
    model = random_model(place, SMALL)
    facts = model_facts(model)
    samples, tokens = (8, 2048) if place.on_gpu else (3, 40)
    batch = random_batch(facts.vocab, samples, tokens)
    rank = Rank.open(place, model, activation_checkpointing="none")
    logprobs_N, gradients = _pass(rank, batch)
    findings.note("as it is", _seconds(place, lambda: _pass(rank, batch)), "s")
    compile_blocks(
        rank.worker.sharding.trainable.model, "inductor" if place.on_gpu else "aot_eager"
    )
    began = time.perf_counter()
    found_N, found = _pass(rank, batch)
    findings.note("first compiled pass", time.perf_counter() - began, "s")
    findings.note("compiled", _seconds(place, lambda: _pass(rank, batch)), "s")
    counters = torch._dynamo.utils.counters
    findings.note("graphs", float(counters["stats"]["unique_graphs"]))
    findings.note("breaks of graphs", float(sum(counters["graph_break"].values())))
    gap, apart = float(np.abs(found_N - logprobs_N).mean()), distance(found, gradients)
    findings.note("mean gap of logprobs", gap, "nats")
    findings.note("difference of gradients", apart, "of their norm")
    findings.check(gap <= _LOGPROB_TOLERANCE, f"compiled, logprobs are off by {gap:.3g} on average")
    findings.check(apart <= _GRADIENT_TOLERANCE, f"compiled, gradients are off by {apart:.1%}")
    remove_model(model)


def _seconds(place: Place, work: Callable[[], object]) -> float:
    synchronize(place)
    began = time.perf_counter()
    work()
    synchronize(place)
    return time.perf_counter() - began


def profiled(place: Place, findings: Findings) -> None:
    """The trace of a step, and its dearest kernels."""
    model = random_model(place, SMALL)
    samples, tokens = (4, 2048) if place.on_gpu else (2, 40)
    batch = random_batch(model_facts(model).vocab, samples, tokens)
    rank = Rank.open(place, model)
    rank.step(batch)
    watched = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if place.on_gpu else [])]
    with profile(activities=watched, acc_events=True) as recorded:
        rank.step(batch)
        synchronize(place)
    trace = place.folder / "trace.json"
    recorded.export_chrome_trace(str(trace))
    _compress(trace)
    column = "self_device_time_total" if place.on_gpu else "self_cpu_time_total"
    events = sorted(recorded.key_averages(), key=lambda event: -getattr(event, column))
    findings.check(bool(events) and getattr(events[0], column) > 0, "the profiler recorded nothing")
    whole = sum(getattr(event, column) for event in events)
    findings.note("all kernels", whole / 1e6, "s")
    for event in events[:12]:
        findings.note(f"kernel {event.key[:60]}", getattr(event, column) / whole, "of the time")
    remove_model(model)


def _compress(file: Path) -> None:
    with file.open("rb") as raw, gzip.open(f"{file}.gz", "wb") as packed:
        shutil.copyfileobj(raw, packed)
    file.unlink()
