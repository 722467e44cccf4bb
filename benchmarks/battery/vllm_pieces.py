"""Pieces about vLLM."""

import asyncio
import time
from collections.abc import Awaitable
from pathlib import Path

import psutil
import torch

from agentrl.engines.router import Router
from agentrl.engines.vllm import VllmEngine
from agentrl.models.facts import model_facts
from agentrl.protocols import Engine
from benchmarks.battery.engine_pieces import FILES, Trial
from benchmarks.battery.piece import Findings, Place
from benchmarks.battery.subjects import GIB, LOSS, SMALL, random_batch, random_model, remove_model


def logprobs(place: Place, findings: Findings) -> None:
    """Logprobs of vLLM and the trainer."""
    model = random_model(place, SMALL)
    asyncio.run(_trial(place, findings, model).compare())
    remove_model(model)


def weights(place: Place, findings: Findings) -> None:
    """An update by each transport."""
    model = random_model(place, SMALL, layers=8)
    asyncio.run(_trial(place, findings, model).publish_by_each(FILES))
    remove_model(model)


def sleep(place: Place, findings: Findings) -> None:
    """Engine and trainer take turns on a GPU, twice, each with new weights at its end."""
    model = random_model(place, SMALL)
    trial = _trial(place, findings, model, sleep_mode=True)

    async def main() -> None:
        async with trial.engine as engine:
            await engine.sleep()
            async with trial.trainer(lr=1e-9) as trainer:
                await trainer.sleep()
                for turn in (1, 2):
                    await _timed(findings, f"{turn}: engine wakes", engine.wake())
                    sampled = await trial.sample(seed=turn)
                    before = _free()
                    await _timed(findings, f"{turn}: engine sleeps", engine.sleep())
                    findings.note(f"{turn}: freed by its sleep", (_free() - before) / GIB, "GiB")
                    findings.check(_free() > before, "a sleeping engine freed nothing")
                    await _timed(findings, f"{turn}: trainer wakes", trainer.wake())
                    batch = random_batch(model_facts(model).vocab, 4, 512, seed=turn)
                    await trainer.step(batch, LOSS, float(batch.num_loss_tokens))
                    await trial.note_gap(f"turn {turn}", trainer, sampled)
                    await trainer.free_step_memory()
                    weights = engine.wake_weights()
                    await _timed(findings, f"{turn}: engine wakes its weights", weights)
                    update = engine.update_weights(await trainer.weights(), turn)
                    await _timed(findings, f"{turn}: engine takes new weights", update)
                    await _timed(findings, f"{turn}: trainer sleeps", trainer.sleep())

    asyncio.run(main())
    remove_model(model)


def restart(place: Place, findings: Findings) -> None:
    """vLLM's processes are killed while it answers."""
    model = random_model(place, SMALL, layers=8)
    trial = _trial(place, findings, model)

    def replacement(number: int) -> Engine:
        return _trial(place, findings, model).engine

    async def main() -> None:
        async with Router([trial.engine], factory=replacement, restarts=2) as router:
            await _kill_while_it_answers(router, trial)

    asyncio.run(main())
    remove_model(model)


async def _kill_while_it_answers(router: Router, trial: Trial) -> None:
    requests, findings = trial.requests(), trial.findings
    async with asyncio.TaskGroup() as group:
        answers = [group.create_task(router.generate(request)) for request in requests]
        await asyncio.sleep(0)
        killed = await asyncio.to_thread(_kill_children)
        began = time.perf_counter()
    findings.note("processes killed", float(killed))
    findings.note("until all were answered", time.perf_counter() - began, "s")
    lengths = [len(answer.result().token_ids) for answer in answers]
    findings.check(killed > 0, "there was no process to kill")
    findings.check(
        lengths == [request.sampling.max_tokens for request in requests],
        f"answers have {lengths} tokens",
    )


def _trial(place: Place, findings: Findings, model: Path, *, sleep_mode: bool = False) -> Trial:
    """vLLM with as much of the device as leaves a trainer its part."""
    kind = "bfloat16" if place.on_gpu else "float32"
    config = VllmEngine.Config(
        device=place.device,
        dtype=kind,
        max_batch=32,
        max_context=512 if place.on_gpu else 64,
        memory_fraction=0.35,
        kv_cache_gib=None if place.on_gpu else 0.1,
        sleep_mode=sleep_mode,
    )
    return Trial(place, findings, VllmEngine(config, model), model, kind)


async def _timed(findings: Findings, name: str, work: Awaitable[object]) -> None:
    began = time.perf_counter()
    await work
    findings.note(name, time.perf_counter() - began, "s")


def _free() -> int:
    return torch.cuda.mem_get_info()[0]


def _kill_children() -> int:
    """Kill vLLM's processes; returns how many there were."""
    children = psutil.Process().children(recursive=True)
    engines = [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]
    for child in engines:
        child.kill()
    return len(engines)
