"""Speculative decoding: greedy tokens and their logprobs stay those of the model.

On CPUs, vLLM 0.32 draws proposed tokens at a wrong temperature where it is above 0, so that
`engine.speculative` is refused there; here it is let through for what is right.
"""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from agentrl.engines.local import LocalEngine
from agentrl.engines.vllm import VllmEngine
from agentrl.engines.vllm_settings import VllmSettings
from agentrl.engines.vllm_start import VllmStart
from agentrl.protocols import Engine, GenerateRequest
from agentrl.settings.sampling import SamplingParams
from agentrl.tokens.arrays import ints

PROMPT = ints([7, 8, 9, 10, 7, 8, 9, 10, 7, 8])


async def assert_samples_of_the_model(engine: Engine, plain: Engine, version: int) -> None:
    """Greedy tokens and their logprobs are those of the plain engine."""
    request = GenerateRequest("r", PROMPT, SamplingParams(max_tokens=30, temperature=0))
    greedy, expected = await engine.generate(request), await plain.generate(request)
    assert greedy.token_ids.tolist() == expected.token_ids.tolist()
    np.testing.assert_allclose(greedy.logprobs, expected.logprobs, atol=1e-4)
    assert set(greedy.policy_versions.tolist()) == {version}


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_tokens_and_logprobs_are_those_of_the_model_also_after_an_update(
    method: str, shallow_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speculation = VllmStart._speculation
    let_through = lambda start, *, on_cpu: speculation(start, on_cpu=False)  # noqa: E731
    monkeypatch.setattr(VllmStart, "_speculation", let_through)
    speculative: dict[str, Any] = {"method": method, "tokens": 3}
    if method == "draft_model":
        speculative["model"] = str(shallow_model_dir)
    else:
        speculative["shortest_match"] = 1
    settings = VllmSettings.model_validate(
        {"max_batch": 4, "max_context": 128, "kv_cache_gib": 0.1, "speculative": speculative}
    )
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: weight + 0.05 * torch.randn(weight.shape, generator=generator)
        for name, weight in load_file(shallow_model_dir / "model.safetensors").items()
    }

    async def main() -> None:
        async with (
            LocalEngine(LocalEngine.Config(max_batch=4), shallow_model_dir) as plain,
            VllmEngine(settings, shallow_model_dir) as engine,
        ):
            await assert_samples_of_the_model(engine, plain, 0)
            before = engine.stats()
            assert before.proposed_tokens > 0
            if method == "draft_model":  # its draft is the model itself
                assert before.accepted_tokens > 0.5 * before.proposed_tokens
            for served in (plain, engine):
                await served.update_weights(weights, 1)
            await assert_samples_of_the_model(engine, plain, 1)
            assert engine.stats().proposed_tokens > before.proposed_tokens

    asyncio.run(main())
