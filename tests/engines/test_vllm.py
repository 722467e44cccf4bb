"""What only vLLM needs: its processes end when they must, and what is wrong is said."""

import asyncio
import builtins
import json
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import psutil
import pytest
import torch

from agentrl.engines.local import LocalEngine
from agentrl.engines.vllm import VllmEngine
from agentrl.engines.vllm_environment import set_environment
from agentrl.engines.vllm_settings import VllmSettings
from agentrl.engines.vllm_start import VllmStart
from agentrl.errors import ConfigError, EngineError
from agentrl.protocols import GenerateRequest
from agentrl.settings.sampling import SamplingParams
from agentrl.weights.bundle import BundlePlace
from tests.model_families import make_model
from tests.processes import PATIENCE_SECONDS, open_to_others, still_alive

SERVE = """
import asyncio, sys
from pathlib import Path
from agentrl.engines.vllm import VllmEngine
from agentrl.protocols import GenerateRequest
from agentrl.settings.sampling import SamplingParams

async def main():
    config = VllmEngine.Config(max_batch=4, max_context=128, kv_cache_gib=0.1)
    async with VllmEngine(config, Path(sys.argv[1])) as engine:
        await engine.generate(GenerateRequest("r", (7, 8, 9), SamplingParams(max_tokens=4)))
        print("ready", flush=True)
        await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main())
"""


def config(**changes: Any) -> VllmSettings:
    return VllmEngine.Config(**{"max_batch": 4, "max_context": 128, "kv_cache_gib": 0.1, **changes})


def test_a_config_written_for_the_local_engine_fits() -> None:
    settings = LocalEngine.Config(
        max_batch=3, dtype="bfloat16", max_context=99, prefix_cache=False, device="cpu"
    )
    assert (
        VllmEngine.Config(**settings.model_dump()).model_dump().items()
        >= settings.model_dump().items()
    )


def test_without_vllm_the_error_says_what_to_install(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_import = builtins.__import__

    def no_vllm(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".", maxsplit=1)[0] == "vllm":
            raise ModuleNotFoundError("No module named 'vllm'")
        return real_import(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", no_vllm)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")

    async def main() -> None:
        with pytest.raises(ConfigError, match=r"pip install 'agentrl-train\[gpu\]'"):
            await VllmEngine(config(), tiny_model_dir).__aenter__()

    asyncio.run(main())


def test_an_engine_that_was_not_entered_says_so(tiny_model_dir: Path) -> None:
    engine = VllmEngine(config(), tiny_model_dir)
    with pytest.raises(EngineError, match="not entered"):
        asyncio.run(engine.generate(GenerateRequest("r", (1,), SamplingParams())))


class Slow(VllmEngine):
    """Comes up when it is told to."""

    def __init__(self, model: Path) -> None:
        super().__init__(config(), model)
        self.starting, self.may_start = threading.Event(), threading.Event()
        self.made = Mock(errored=False, output_handler=None, abort=AsyncMock())

    def _create(self) -> Any:
        self.starting.set()
        assert self.may_start.wait(PATIENCE_SECONDS), "no other caller was served while it started"
        return self.made


def test_a_start_that_is_given_up_is_ended_when_it_has_come_up_and_others_are_served_until_then(
    tiny_model_dir: Path,
) -> None:
    async def main() -> None:
        engine = Slow(tiny_model_dir)
        entering = asyncio.create_task(engine.__aenter__())
        await asyncio.to_thread(engine.starting.wait)
        entering.cancel()
        await asyncio.sleep(0.01)
        assert not entering.done()
        engine.made.shutdown.assert_not_called()
        engine.may_start.set()
        with pytest.raises(asyncio.CancelledError):
            await entering
        engine.made.shutdown.assert_called_once()

    asyncio.run(main())


def test_engines_of_a_process_start_one_by_one_and_one_that_is_given_up_does_not_start(
    tiny_model_dir: Path,
) -> None:
    async def main() -> None:
        first, second = Slow(tiny_model_dir), Slow(tiny_model_dir)
        entering = asyncio.create_task(first.__aenter__())
        await asyncio.to_thread(first.starting.wait)
        waiting = asyncio.create_task(second.__aenter__())
        await asyncio.sleep(0.05)
        assert not second.starting.is_set()
        waiting.cancel()
        entering.cancel()
        await asyncio.sleep(0.01)
        first.may_start.set()
        for given_up in (waiting, entering):
            with pytest.raises(asyncio.CancelledError):
                await given_up
        assert not second.starting.is_set()

    asyncio.run(main())


@pytest.mark.vllm
@pytest.mark.long
def test_a_real_start_that_is_given_up_leaves_no_process(tiny_model_dir: Path) -> None:
    async def main() -> None:
        gaps = [0.0]
        async with asyncio.TaskGroup() as tasks:
            ticking = tasks.create_task(tick(gaps))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await VllmEngine(config(), tiny_model_dir).__aenter__()
            ticking.cancel()
        assert max(gaps) < 3, "no other caller was served while it started"

    before = psutil.Process().children(recursive=True)
    asyncio.run(asyncio.wait_for(main(), 200))
    left = [child for child in psutil.Process().children(recursive=True) if child not in before]
    assert not [name for name in still_alive(left, 10) if "VLLM" in name]


async def tick(gaps: list[float]) -> None:
    """Write down for how long the event loop did nothing else."""
    loop = asyncio.get_running_loop()
    while True:
        before = loop.time()
        await asyncio.sleep(0.02)
        gaps.append(loop.time() - before)


class Half(torch.nn.Module):
    """A model for vLLM's reloads, whose loader loses the second of its layers if it is told to."""

    def __init__(self, *, loses: bool) -> None:
        super().__init__()
        self.first, self.second, self.head = (torch.nn.Linear(2, 2, bias=False) for _ in range(3))
        self.head.weight = self.first.weight  # tied, so nothing is loaded into it
        self.loses = loses

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            parameter: Any = self.get_parameter(name)
            if self.loses and name == "second.weight":
                # Past the layer that waits for it, as vLLM does for gpt-oss.
                parameter.data.copy_(weight)
            else:
                parameter.weight_loader(parameter, weight)


@pytest.mark.vllm
@pytest.mark.parametrize("loses", [False, True])
def test_an_update_that_vllm_would_lose_a_part_of_is_refused_by_name(loses: bool) -> None:
    set_environment()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as the engine does
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

        from agentrl.engines.vllm_reload import Reload

    model = Half(loses=loses)
    served = dict(model.named_parameters())
    record_metadata_for_reloading(model)
    reload = Reload(model, None)
    reload.begin()
    reload.load_weights((name, torch.full((2, 2), 7.0)) for name in served)
    refused = pytest.raises(
        RuntimeError, match=r"for Half has left .* as they were: second.weight\. Its logprobs"
    )
    with refused if loses else nullcontext():
        reload.finish()
    assert {name: bool((weight == 7).all()) for name, weight in served.items()} == {
        "first.weight": True,
        "second.weight": not loses,
    }


@pytest.mark.vllm
def test_latent_attention_in_other_dimensions_is_refused_before_a_start(tmp_path: Path) -> None:
    make_model("DeepSeek-V3", tmp_path)
    facts = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**facts, "kv_lora_rank": 256}))

    async def main() -> None:
        with pytest.raises(
            ConfigError, match=r"kv_lora_rank=512 and .* has 256 and 64: use engine=local"
        ):
            await VllmEngine(config(), tmp_path).__aenter__()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        ({"model_type": "cohere2", "sliding_window": 48}, {"sliding_window": 47}),
        ({"model_type": "gemma2", "sliding_window": 48}, {}),
        (
            {
                "model_type": "ministral3",
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 16.0,
                    "original_max_position_embeddings": 64,
                    "llama_4_scaling_beta": 0.1,
                },
            },
            {"llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 64}},
        ),
    ],
)
def test_vllm_is_given_what_makes_it_compute_what_is_trained(
    settings: dict[str, Any], given: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert VllmStart(config(), tmp_path).overrides() == given


def test_models_that_vllm_computes_otherwise_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_neox"}))
    with pytest.raises(
        ConfigError, match=r"other logprobs than transformers for GPT-NeoX.*use engine=local"
    ):
        VllmStart(config(), tmp_path).refuse_other_models(on_cpu=False)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "ernie4_5_moe"}))
    VllmStart(config(), tmp_path).refuse_other_models(on_cpu=False)
    with pytest.raises(ConfigError, match=r"vLLM for CPUs computes .* ERNIE 4.5 MoE"):
        VllmStart(config(), tmp_path).refuse_other_models(on_cpu=True)


@pytest.mark.vllm
@pytest.mark.long
def test_no_process_outlives_a_killed_driver(tiny_model_dir: Path, tmp_path: Path) -> None:
    script = tmp_path / "serve.py"
    script.write_text(SERVE)
    driver = subprocess.Popen(
        [sys.executable, script, tiny_model_dir], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    with driver.stdout:
        assert driver.stdout.readline() == "ready\n"
        children = psutil.Process(driver.pid).children(recursive=True)
        assert len(children) >= 2
        assert open_to_others([psutil.Process(driver.pid), *children]) == []
        driver.kill()
        driver.wait()
    assert still_alive(children, 60) == []


class Awoken:
    """Stands for vLLM's client: notes the calls that change the engine."""

    errored = False

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.output_handler: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __getattr__(self, method: str) -> Any:
        async def call(*args: Any, **options: Any) -> Any:
            given = options.get("tags") or options.get("level") or options.get("mode") or ""
            self.calls.append(f"{method} {given}".strip())
            if method == "collective_rpc":
                self.calls.pop()
                return [70, 60] if options["args"] == ((),) else [16, 15]
            return None

        return call


def test_vllm_takes_new_weights_before_it_has_a_cache_and_schedules_only_then(
    tmp_path: Path,
) -> None:
    pytest.importorskip("vllm")  # an update is a request of vLLM's own class

    async def main() -> None:
        engine: Any = VllmEngine(config(sleep_mode=True), tmp_path)
        llm = engine._llm = Awoken()
        engine._closed, engine._counters = None, Mock()
        update = (llm, BundlePlace(tmp_path / "v1", 1, 1).write({}), 1)
        assert await engine.sleep() == 70
        assert await engine.sleep() is None
        with pytest.raises(EngineError, match="call `wake_weights` before"):
            await engine.update_weights({}, 1)
        assert await engine.wake_weights() == 16
        assert await engine.wake_weights() is None
        await engine._exchange(*update)
        await engine.interrupt()
        await engine.wake()
        await engine.wake()
        in_turns = [
            *("sleep 1", "wake_up ['weights']"),
            *("start_weight_update", "update_weights", "finish_weight_update"),
            *("pause_generation keep", "pause_generation abort"),
            "wake_up ['kv_cache']",
        ]
        assert llm.calls == in_turns
        llm.calls.clear()
        await engine._exchange(*update)
        assert (llm.calls[0], llm.calls[-1]) == ("pause_generation keep", "resume_generation")
        assert await engine.sleep() == 70
        await engine.wake_weights()
        assert await engine.sleep() == 16  # without an update
        await engine.wake()
        assert llm.calls[-1] == "wake_up ['weights', 'kv_cache']"

    asyncio.run(main())
