"""What vLLM is started with: what a user writes, what follows from devices, and what is refused."""

import asyncio
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentrl.assembly.devices import open_cluster
from agentrl.cli import app
from agentrl.cluster.engine_logs import with_log_of
from agentrl.config import load_config
from agentrl.config.components import in_dtype_of
from agentrl.config.run_config import RunConfig
from agentrl.engines.vllm import VllmEngine
from agentrl.engines.vllm_settings import VllmSettings, prefill_tokens
from agentrl.engines.vllm_start import VllmStart
from agentrl.errors import ConfigError, EngineError
from agentrl.placement.device_map import device_maps
from agentrl.placement.devices import GIB, GPUS, DeviceKind, host
from agentrl.placement.footprint import engine_footprint, tokens_cached
from agentrl.placement.inventory import Inventory
from agentrl.planner.run_facts import (
    chosen_settings,
    layouts,
    model_of,
    placement_request_of,
    with_defaults,
)
from agentrl.protocols.component_settings import EngineSettingsOffers

LAKE = Path(__file__).parents[2] / "examples" / "frozen_lake.yaml"


def loaded(*overrides: str) -> RunConfig:
    return load_config(LAKE, overrides).config


@pytest.mark.parametrize("engine", ["local", "vllm"])
@pytest.mark.parametrize(
    ("written", "on_gpu", "on_cpu"),
    [
        ([], "bfloat16", "float32"),
        (["trainer.dtype=bfloat16"], "bfloat16", "bfloat16"),
        (["trainer.dtype=float32"], "float32", "float32"),
        (["trainer.dtype=float32", "engine.dtype=bfloat16"], "bfloat16", "bfloat16"),
    ],
)
def test_an_engine_computes_in_the_precision_of_the_trainer(
    engine: str, written: list[str], on_gpu: str, on_cpu: str
) -> None:
    config = loaded(f"engine={engine}", *written)
    facts = model_of(config)
    for kind, dtype in ((GPUS["H100"], on_gpu), (host(2, 8 * GIB), on_cpu)):
        planned = with_defaults(config, facts, kind)
        assert EngineSettingsOffers.of(planned.engine.settings).dtype == dtype
        assert layouts(planned)[0].number == {"bfloat16": 2, "float32": 4}[dtype]
    # What a run starts with: `auto` is left to the device only if the trainer leaves it, too.
    started = EngineSettingsOffers.of(in_dtype_of(config.engine, config.trainer).settings)
    assert started.dtype == (on_cpu if written else "auto")


def test_the_command_config_shows_the_precision_that_follows_from_the_trainer() -> None:
    def shown(*overrides: str) -> str:
        output = CliRunner().invoke(app, ["config", str(LAKE), *overrides]).output
        # A narrow terminal folds the last column into the next line.
        return " ".join(output.split()).partition("engine.dtype ")[2]

    assert shown().startswith("float32 auto: as the trainer on this machine ")
    assert shown("trainer.dtype=bfloat16").startswith("bfloat16 auto: trainer.dtype ")
    assert shown("cluster=ray", "engine=vllm").startswith("auto ")
    assert shown("engine.dtype=bfloat16").startswith("bfloat16 command line ")


def test_a_plan_has_the_settings_that_follow_from_the_devices() -> None:
    config = loaded("engine=vllm", "engine.max_context=4096")
    planned = with_defaults(config, model_of(config), GPUS["H100"])
    chosen = chosen_settings(config, planned)
    assert chosen["engine.dtype"] == "bfloat16"
    assert chosen["engine.max_num_batched_tokens"] == 8192
    assert layouts(planned)[0].prefill_tokens == 8192
    written = loaded("engine=vllm", "engine.max_num_batched_tokens=3000")
    planned = with_defaults(written, model_of(written), GPUS["H100"])
    assert layouts(planned)[0].prefill_tokens == 3000


def a_gpu(name: str, gib: int) -> DeviceKind:
    return replace(GPUS["L4"], name=name, memory=gib * GIB)


RESOLVE = """
import itertools, json, os, sys, types, warnings
from pathlib import Path
warnings.simplefilter("ignore")
from agentrl.engines.vllm_environment import set_environment
from agentrl.engines.vllm_settings import VllmSettings
from agentrl.engines.vllm_start import VllmStart
set_environment()
import vllm.platforms
from vllm.platforms.interface import DeviceCapability
# CUDA's kernels, which are not called.
for name in ("vllm._C_stable_libtorch", "vllm._C", "vllm._moe_C", "vllm.vllm_flash_attn"):
    module = sys.modules[name] = types.ModuleType(name)
    module.__getattr__ = lambda attribute: None
from vllm.platforms.cuda import NonNvmlCudaPlatform

class Gpu(NonNvmlCudaPlatform):
    name, gib = "", 0
    get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
    get_device_name = classmethod(lambda cls, device_id=0: cls.name)
    get_device_total_memory = classmethod(lambda cls, device_id=0: cls.gib * 2**30)
    is_fully_connected = classmethod(lambda cls, devices: True)
    device_count = classmethod(lambda cls: 8)

vllm.platforms._current_platform = Gpu()
from vllm.engine.arg_utils import AsyncEngineArgs

processes = itertools.count(10_000)
for settings, Gpu.name, Gpu.gib in json.loads(sys.argv[2]):
    os.getpid = lambda: next(processes)  # as if each engine were in another process
    made = VllmStart(VllmSettings(**settings), Path(sys.argv[1])).vllm_config({})
    scheduler, parallel = made.scheduler_config, made.parallel_config
    print(json.dumps({
        "device": made.device_config.device_type,
        "dtype": str(made.model_config.dtype),
        "tokens": scheduler.max_num_batched_tokens,
        "seqs": scheduler.max_num_seqs,
        "chunked": scheduler.enable_chunked_prefill,
        "policy": scheduler.policy,
        "logprobs": made.model_config.logprobs_mode,
        "eager": made.model_config.enforce_eager,
        "graphs": made.compilation_config.cudagraph_mode.name,
        "compiled": made.compute_hash(),
        "cache": made.cache_config.cache_dtype,
        "experts": parallel.enable_expert_parallel,
        "copies": parallel.data_parallel_size,
        "processes": str(parallel.distributed_executor_backend),
        "proposes": made.speculative_config and [
            made.speculative_config.method, made.speculative_config.num_speculative_tokens,
        ],
        "block": made.cache_config.block_size,
    }))
"""


def resolved(folder: Path, *runs: tuple[dict[str, Any], str, int]) -> list[dict[str, Any]]:
    """vLLM's own config of each engine, on a GPU of this name and memory, which is not there."""
    ended = subprocess.run(
        [sys.executable, "-c", RESOLVE, folder, json.dumps(runs)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]


@pytest.mark.vllm
@pytest.mark.long
def test_vllm_resolves_its_config_on_gpus_as_serve_does_and_the_planner_counts(
    tiny_model_dir: Path,
) -> None:
    gpus = [
        ("NVIDIA H100 80GB HBM3", 80),
        ("NVIDIA A100-SXM4-80GB", 80),
        ("NVIDIA L40S", 45),
        ("NVIDIA B200", 180),
    ]
    plain: dict[str, Any] = {"max_context": 512}
    other = {
        **plain,
        "speculative": {"tokens": 2},
        "kv_cache_dtype": "fp8",
        "args": {"block_size": 32},
    }
    runs = [*[(plain, *gpu) for gpu in gpus], (other, *gpus[0]), (plain, *gpus[0])]
    *made, again = resolved(tiny_model_dir, *runs)
    compiled = [one.pop("compiled") for one in made]
    # What one replica has compiled, the others and the next start find.
    assert compiled[0] == again.pop("compiled") != compiled[1]
    assert [one["tokens"] for one in made[:4]] == [8192, 2048, 2048, 16384]
    assert [prefill_tokens(a_gpu(*gpu), 128, 512) for gpu in gpus] == [8192, 2048, 2048, 16384]
    assert {key: value for key, value in made[0].items() if key != "tokens"} == {
        "device": "cuda",
        "dtype": "torch.bfloat16",
        "seqs": 128,
        "chunked": True,
        "policy": "priority",
        "logprobs": "processed_logprobs",
        "eager": False,
        "graphs": "FULL_AND_PIECEWISE",
        "cache": "auto",
        "experts": False,
        "copies": 1,
        "processes": "uni",
        "proposes": None,
        "block": made[0]["block"],
    }
    assert made[4] | {"tokens": 8192, "seqs": 128} == made[0] | {
        "cache": "fp8",
        "proposes": ["ngram", 2],
        "block": 32,
    }


def test_each_engine_of_a_run_logs_to_a_file_of_its_own(tmp_path: Path) -> None:
    config = loaded("engine=vllm", f"run_dir={tmp_path}", "cluster.engines=2")

    async def main() -> list[str]:
        async with open_cluster(config, tmp_path / "logs") as placed:
            engine = with_log_of(placed.config.engine, role="frozen engine")
            factories = placed.cluster.engines(engine, tmp_path)
            return [str(make()._log) for make in factories]  # type: ignore[attr-defined]

    logs = asyncio.run(main())
    assert logs == [f"{tmp_path}/logs/frozen-engine-{number}.log" for number in (0, 1)]


@pytest.mark.parametrize("engine", ["vllm", "local"])
@pytest.mark.parametrize(("bound", "means"), [(0, "recompute"), (3, "reuse")])
def test_kv_is_reused_as_long_as_a_token_may_be_trained_on(
    engine: str, bound: int, means: str, tmp_path: Path
) -> None:
    config = loaded(
        f"engine={engine}", "engine.kv_on_update=reuse", f"rollout.max_staleness={bound}"
    )

    async def main() -> None:
        async with open_cluster(config) as placed:
            (factory,) = placed.cluster.engines(placed.config.engine, tmp_path)
            made: Any = factory()
            assert (made._config.kv_max_staleness, made._kv_on_update) == (bound, means)

    asyncio.run(main())


@pytest.mark.vllm
def test_a_start_that_fails_names_the_file_in_which_vllm_says_why(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    log = tmp_path / "logs" / "engine-0.log"
    settings = VllmSettings(max_context=64, max_num_batched_tokens=64, log=str(log))

    async def main() -> None:
        with pytest.raises(EngineError, match=f"its log says why: {log} on "):
            await VllmEngine(settings, tiny_model_dir).__aenter__()

    asyncio.run(main())
    assert "INFO" in log.read_text()
    shutil.rmtree(log.parent)
    log.parent.touch()  # as on a machine that may not write there

    async def elsewhere() -> None:
        with pytest.raises(EngineError, match=f"it could write no log to {log} on "):
            await VllmEngine(settings, tiny_model_dir).__aenter__()

    asyncio.run(elsewhere())


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("engine.quantization=awq", "fp8_per_block"),
        ("engine.quantization=fp8 engine.dtype=float32", "write dtype=bfloat16"),
        ("engine.expert_parallel=true", "which has one: write tensor_parallel or data_parallel"),
        ("engine.speculative.method=draft_model", "needs the folder or id of a model"),
        ("engine.speculative.model=/somewhere", "write method=draft_model"),
        ("engine.speculative.shortest_match=9", "is above longest_match=4"),
    ],
)
def test_settings_that_go_not_together_are_refused_with_what_to_write(
    written: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        loaded("engine=vllm", *written.split())


@pytest.mark.parametrize(
    ("settings", "on_cpu", "said"),
    [
        ({"data_parallel": 2}, False, "engine.data_parallel divides experts, and the model in"),
        ({"expert_parallel": True, "tensor_parallel": 2}, False, "engine.expert_parallel divides"),
        ({"quantization": "fp8"}, True, "engine.quantization=fp8 is for GPUs"),
        ({"speculative": {}}, True, "engine.speculative is for GPUs"),
        ({"kv_cache_dtype": "fp8"}, True, "engine.kv_cache_dtype=fp8 is for GPUs"),
        ({"max_num_batched_tokens": 32, "max_context": 64}, True, "write at least 64"),
    ],
)
@pytest.mark.vllm
def test_what_the_model_or_the_platform_cannot_do_is_refused_at_the_start(
    settings: dict[str, Any], on_cpu: bool, said: str, tiny_model_dir: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        VllmStart(VllmSettings(**settings), tiny_model_dir).arguments(on_cpu=on_cpu)


@pytest.mark.vllm
def test_weights_are_quantised_by_vllm_itself_so_that_updates_are_too(tiny_model_dir: Path) -> None:
    # The config of kernels for it cannot be made without a GPU.
    for written, passed in (("fp8", "fp8_per_channel"), ("fp8_per_block", "fp8_per_block")):
        settings = VllmSettings.model_validate({"quantization": written})
        given = VllmStart(settings, tiny_model_dir).arguments(on_cpu=False)
        assert given["quantization"] == passed
        from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES

        assert passed in ONLINE_QUANT_SHORTHAND_NAMES


def test_an_engine_of_copies_takes_the_devices_of_all_and_has_experts_once() -> None:
    written = ["engine=vllm", "model.name=Qwen/Qwen3-30B-A3B", "cluster=ray", "trainer=fsdp"]
    config = loaded(*written, "engine.data_parallel=4", "engine.expert_parallel=true")
    facts = model_of(config)
    planned = with_defaults(config, facts, GPUS["H100"])
    inventory = Inventory.uniform(GPUS["H100"], 8)
    request = placement_request_of(planned)
    maps = device_maps(config.placement, request, inventory)
    assert {len(one.of("engine")[0].devices) % 4 for one in maps} == {0}
    four = next(one for one in maps if len(one.of("engine")[0].devices) == 4)
    assert four.tensor_parallel() == 1
    layout = layouts(planned)[0]
    alone = replace(layout, data_parallel=1)
    size, whole = (
        engine_footprint(facts, one, 1, GPUS["H100"], 4096).parts for one in (layout, alone)
    )
    saved = 2 * facts.expert_parameters * 3 // 4
    assert whole["weights"] - size["weights"] == pytest.approx(saved, rel=1e-6)


def test_weights_and_cache_in_fp8_are_planned_with_a_byte_each() -> None:
    written = ["engine=vllm", "model.name=Qwen/Qwen3-8B", "engine.kv_cache_gib=10"]
    plain, quantised = (
        with_defaults(config, model_of(config), GPUS["H100"])
        for config in (
            loaded(*written),
            loaded(*written, "engine.quantization=fp8", "engine.kv_cache_dtype=fp8"),
        )
    )
    facts = model_of(plain)
    sizes = [
        engine_footprint(facts, layouts(config)[0], 1, GPUS["H100"], 4096).parts["weights"]
        for config in (plain, quantised)
    ]
    assert sizes[0] - sizes[1] == facts.blocks
    tokens = [
        tokens_cached(facts, layouts(config)[0], 1, 10 * GIB, 4096) for config in (plain, quantised)
    ]
    assert tokens[1] // 2 == tokens[0]
