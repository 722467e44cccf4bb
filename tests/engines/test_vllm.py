"""What only vLLM needs: its processes end when they must, and what is wrong is said."""

import asyncio
import builtins
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from agentrl.engines.local import LocalEngine
from agentrl.engines.vllm import VllmEngine
from agentrl.errors import ConfigError, EngineError
from agentrl.protocols import GenerateRequest, SamplingParams
from tests.processes import still_alive

SERVE = """
import asyncio, sys
from pathlib import Path
from agentrl.engines.vllm import VllmEngine
from agentrl.protocols import GenerateRequest, SamplingParams

async def main():
    config = VllmEngine.Config(max_batch=4, max_context=128, kv_cache_gib=0.1)
    async with VllmEngine(config, Path(sys.argv[1])) as engine:
        await engine.generate(GenerateRequest("r", (7, 8, 9), SamplingParams(4)))
        print("ready", flush=True)
        await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main())
"""


def config(**changes: Any) -> VllmEngine.Config:
    return VllmEngine.Config(**{"max_batch": 4, "max_context": 128, "kv_cache_gib": 0.1, **changes})


def test_a_config_written_for_the_local_engine_fits() -> None:
    settings = LocalEngine.Config(max_batch=3, dtype="bfloat16", max_context=99, prefix_cache=False, device="cpu")
    assert VllmEngine.Config(**settings.model_dump()).model_dump().items() >= settings.model_dump().items()


def test_without_vllm_the_error_says_what_to_install(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def no_vllm(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".", maxsplit=1)[0] == "vllm":
            raise ModuleNotFoundError("No module named 'vllm'")
        return real_import(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", no_vllm)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")

    async def main() -> None:
        with pytest.raises(ConfigError, match=r"pip install agentrl\[cpu\]"):
            await VllmEngine(config(), tiny_model_dir).__aenter__()

    asyncio.run(main())


def test_an_engine_that_was_not_entered_says_so(tiny_model_dir: Path) -> None:
    engine = VllmEngine(config(), tiny_model_dir)
    with pytest.raises(EngineError, match="not entered"):
        asyncio.run(engine.generate(GenerateRequest("r", (1,), SamplingParams())))


@pytest.mark.vllm
def test_leaving_ends_callers_and_processes_and_a_dead_core_is_an_error(tiny_model_dir: Path) -> None:
    me = psutil.Process()

    async def leaves_in_mid_generation() -> None:
        async with asyncio.TaskGroup() as tasks:
            async with VllmEngine(config(), tiny_model_dir) as engine:
                request = GenerateRequest("r", (7, 8), SamplingParams(max_tokens=120))
                waiting = tasks.create_task(fails_with(engine, request, "closed"))
                await asyncio.sleep(0.05)
                await refuses_wrong_weights(engine)
            await waiting

    async def is_given_up_while_it_starts() -> None:
        gaps = [0.0]
        async with asyncio.TaskGroup() as tasks:
            ticking = tasks.create_task(tick(gaps))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await VllmEngine(config(), tiny_model_dir).__aenter__()
            ticking.cancel()
        assert max(gaps) < 3, "nobody else was served while it started"

    async def core_dies() -> None:
        async with VllmEngine(config(), tiny_model_dir) as engine:
            async with asyncio.TaskGroup() as tasks:
                request = GenerateRequest("r", (7, 8), SamplingParams(max_tokens=120))
                waiting = tasks.create_task(fails_with(engine, request, "Dead|dead"))
                updating = tasks.create_task(update_fails(engine, tiny_model_dir))
                await asyncio.sleep(0.01)
                for child in me.children(recursive=True):
                    if "VLLM" in child.name():
                        os.kill(child.pid, signal.SIGKILL)
                await waiting
                await updating
            await fails_with(
                engine, GenerateRequest("r", (7, 8), SamplingParams(max_tokens=8)), "Dead|dead|lost|not running"
            )

    for scenario in (leaves_in_mid_generation, is_given_up_while_it_starts, core_dies):
        before = {child.pid for child in me.children(recursive=True)}
        asyncio.run(asyncio.wait_for(scenario(), 200))
        left = [child for child in me.children(recursive=True) if child.pid not in before]
        assert not [name for name in still_alive(left, 10) if "VLLM" in name]


async def tick(gaps: list[float]) -> None:
    """Write down for how long the event loop did nothing else."""
    loop = asyncio.get_running_loop()
    while True:
        before = loop.time()
        await asyncio.sleep(0.02)
        gaps.append(loop.time() - before)


async def fails_with(engine: VllmEngine, request: GenerateRequest, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        async with asyncio.timeout(60):
            await engine.generate(request)


async def update_fails(engine: VllmEngine, model: Path) -> None:
    with pytest.raises(EngineError, match=r"Dead|dead"):
        async with asyncio.timeout(60):
            await engine.update_weights(load_file(model / "model.safetensors"), 1)


async def refuses_wrong_weights(engine: VllmEngine) -> None:
    weights: Mapping[str, torch.Tensor] = {"model.norm.weight": torch.ones(3)}
    with pytest.raises(EngineError, match="nothing was changed"):
        await engine.update_weights(weights, 1)
    assert engine.policy_version == 0


@pytest.mark.vllm
def test_no_process_outlives_a_killed_driver(tiny_model_dir: Path, tmp_path: Path) -> None:
    script = tmp_path / "serve.py"
    script.write_text(SERVE)
    driver = subprocess.Popen([sys.executable, script, tiny_model_dir], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    with driver.stdout:
        assert driver.stdout.readline() == "ready\n"
        children = psutil.Process(driver.pid).children(recursive=True)
        assert len(children) >= 2
        driver.kill()
        driver.wait()
    assert still_alive(children, 20) == []
