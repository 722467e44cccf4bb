"""The experts that engines of other processes report: vLLM's rows, and what Ray holds."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentrl.cluster.ray_choices import RayChoices
from agentrl.cluster.ray_engine import RayEngine
from agentrl.cluster.ray_receivers import RayReceivers
from agentrl.config.components import as_trained_by
from agentrl.engines.local import LocalEngine
from agentrl.engines.vllm import VllmEngine, _completion
from agentrl.engines.vllm_settings import VllmSettings
from agentrl.engines.vllm_start import VllmStart
from agentrl.errors import ConfigError
from agentrl.plugins import Component
from agentrl.protocols import GenerateRequest
from agentrl.settings.sampling import SamplingParams
from agentrl.tokens.arrays import ints
from agentrl.tokens.expert_choices import read_choices
from agentrl.trainers.local import LocalTrainer
from tests.model_families import make_model
from tests.processes import PATIENCE_SECONDS


def asked(**settings: Any) -> GenerateRequest:
    return GenerateRequest(
        "r", ints(range(40, 50)), SamplingParams(max_tokens=4), keep_experts=True, **settings
    )


def said(first: int, tokens: int = 4) -> Any:
    """vLLM's output for four sampled tokens after ten: a row for each but the last, from `first`
    on.
    """
    rows = np.arange(first, 10 + tokens - 1, dtype=np.uint8)
    return SimpleNamespace(
        token_ids=list(range(tokens)),
        weight_versions=[SimpleNamespace(version="0", start=0, end=tokens)],
        logprobs=SimpleNamespace(
            logprobs=[-1.0] * tokens,
            start_indices=list(range(tokens)),
            end_indices=list(range(1, tokens + 1)),
        ),
        routed_experts=np.broadcast_to(rows[:, None, None], (len(rows), 3, 2)) if tokens else None,
    )


@pytest.mark.parametrize(
    ("settings", "first"), [({}, 0), ({"known": 7}, 6), ({"known": 7, "resumed": 2}, 9)]
)
def test_vllms_rows_are_those_of_the_tokens_that_were_asked_for(
    settings: dict[str, int], first: int
) -> None:
    request = asked(**settings)
    assert request.experts_from == first
    completion = _completion(said(first), request, 4, "stop")
    found = read_choices([completion.experts], [14])
    assert found is not None
    assert found[:, 2, 1].tolist() == [*[-1] * first, *range(first, 13), -1]
    # A stop text leaves out the tokens after it.
    cut = _completion(said(first), request, 2, "stop").experts
    assert cut is not None
    assert [(span.start, span.stop) for span in cut.spans] == [(first, 11)]
    assert _completion(said(first, tokens=0), request, 0, "abort").experts is None


def test_a_run_that_replays_lets_vllm_report_its_experts() -> None:
    engine = Component("vllm", VllmEngine, VllmSettings())
    for routing, reports in (("off", False), ("compare", True), ("replay", True)):
        config = LocalTrainer.Config(routing=routing)  # type: ignore[arg-type]
        found = as_trained_by(engine, Component("local", LocalTrainer, config))
        assert isinstance(found.settings, VllmSettings)
        assert found.settings.routed_experts is reports


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture") / "model"
    make_model("Qwen3-MoE", folder)
    return folder


def test_what_vllm_cannot_report_is_refused_with_the_way_out(
    mixture: Path, tiny_model_dir: Path
) -> None:
    def start(folder: Path, **settings: Any) -> VllmStart:
        return VllmStart(VllmSettings(routed_experts=True, **settings), folder)

    with pytest.raises(ConfigError, match=r"built for CPUs: use engine=local, or write .*off"):
        start(mixture)._routed(on_cpu=True)
    with pytest.raises(ConfigError, match=r"is of mixtures of experts, and the model in .* none"):
        start(tiny_model_dir)._routed(on_cpu=False)
    with pytest.raises(ConfigError, match=r"prefix_cache=false turns off: leave one of both out"):
        start(mixture, prefix_cache=False)._routed(on_cpu=False)
    assert start(mixture)._routed(on_cpu=False)
    assert not VllmStart(VllmSettings(), mixture)._routed(on_cpu=True)


@pytest.mark.long
def test_an_actor_holds_its_choices_for_those_who_read_them(mixture: Path) -> None:

    from tests.cluster.shared_ray import join_shared_ray

    join_shared_ray()
    config = LocalEngine.Config(max_context=64, device="cpu")

    async def main() -> None:
        async with LocalEngine(config, mixture) as engine:
            here = await engine.generate(asked())
        options = {"num_cpus": 0.1}
        component = Component("local", LocalEngine, config)
        async with RayEngine(component, mixture, options, RayReceivers()) as engine:
            there = await engine.generate(asked())
            assert there.experts is not None
            (span,) = there.experts.spans
            assert isinstance(span.chosen, RayChoices)
            found = read_choices([there.experts], [14])
            np.testing.assert_array_equal(found, read_choices([here.experts], [14]))

    asyncio.run(main())


class Holder:
    """An actor that puts choices into Ray's store, and so is their owner."""

    def put(self) -> list[Any]:
        import ray

        return [ray.put(np.zeros((1, 2, 2), np.int16))]


@pytest.mark.slow
@pytest.mark.long
def test_choices_are_lost_with_the_actor_that_held_them() -> None:
    import ray

    from tests.cluster.shared_ray import join_shared_ray

    join_shared_ray()
    holder: Any = ray.remote(num_cpus=0.1)(Holder).remote()
    (reference,) = ray.get(holder.put.remote())
    assert RayChoices(reference)() is not None
    ray.kill(holder)
    until = time.monotonic() + PATIENCE_SECONDS
    while RayChoices(reference)() is not None:
        assert time.monotonic() < until, "the choices are still there"
        time.sleep(0.1)
