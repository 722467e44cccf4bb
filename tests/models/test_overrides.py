"""A model with another config (`model.hf_overrides`): the same for engines, trainers and plans."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.config import load_config
from agentrl.engines.local import LocalEngine
from agentrl.engines.vllm_settings import VllmSettings
from agentrl.engines.vllm_start import VllmStart
from agentrl.errors import ConfigError
from agentrl.models.overrides import origin_of, overridden_folder
from agentrl.models.source import here
from agentrl.planner.run_facts import model_of
from agentrl.protocols import GenerateRequest
from agentrl.settings.sampling import SamplingParams

LAKE = Path(__file__).parents[2] / "examples" / "frozen_lake.yaml"


def yarn(positions: int) -> dict[str, Any]:
    return {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": positions,
        }
    }


def positions_of(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["max_position_embeddings"])


def logprobs(folder: Path, tokens: list[int], prompt: int) -> torch.Tensor:
    """Those of the tokens after a prompt, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return logits[range(len(tokens) - 1), tokens[1:]][prompt - 1 :]


def test_an_engine_rotates_and_reaches_as_far_as_the_config_that_is_trained(
    shallow_model_dir: Path, tmp_path: Path
) -> None:
    known = positions_of(shallow_model_dir)
    folder = overridden_folder(shallow_model_dir, yarn(known), tmp_path / "model")
    prompt: Any = tuple(range(5, 25))

    async def main() -> tuple[int, list[int], list[float]]:
        async with LocalEngine(LocalEngine.Config(max_batch=1), folder) as engine:
            request = GenerateRequest("r", prompt, SamplingParams(max_tokens=6, temperature=0))
            completion = await engine.generate(request)
            return (
                engine.max_context,
                completion.token_ids.tolist(),
                completion.logprobs.tolist(),
            )

    longest, sampled, found = asyncio.run(main())
    assert longest == positions_of(folder) == 4 * known
    tokens = [*prompt, *sampled]
    torch.testing.assert_close(
        torch.tensor(found), logprobs(folder, tokens, 20), atol=1e-4, rtol=0, check_dtype=False
    )
    plain = logprobs(shallow_model_dir, tokens, 20)
    assert (logprobs(folder, tokens, 20) - plain).abs().max() > 1e-3


def test_a_folder_with_another_config_is_made_once_and_follows_its_overrides(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    into = tmp_path / "model"
    assert overridden_folder(tiny_model_dir, {}, into) == tiny_model_dir
    first = overridden_folder(tiny_model_dir, yarn(64), into)
    written = (into / "config.json").stat().st_mtime_ns
    assert overridden_folder(tiny_model_dir, yarn(64), into) == first == into
    assert (into / "config.json").stat().st_mtime_ns == written
    assert origin_of(into) == tiny_model_dir == origin_of(here(into))
    overridden_folder(tiny_model_dir, yarn(128), into)
    rope = json.loads((into / "config.json").read_text())["rope_parameters"]
    before = json.loads((tiny_model_dir / "config.json").read_text())
    assert rope["original_max_position_embeddings"] == 128
    assert rope["rope_theta"] == (before.get("rope_parameters") or before)["rope_theta"]
    assert sorted(tmp_path.iterdir()) == [into]


def test_a_plan_knows_the_longer_context() -> None:
    written = ["model.name=Qwen/Qwen3-8B", "model.hf_overrides.rope_scaling.rope_type=yarn"]
    rope = "model.hf_overrides.rope_scaling"
    written += [f"{rope}.factor=4.0", f"{rope}.original_max_position_embeddings=32768"]
    facts = model_of(load_config(LAKE, written).config)
    assert (facts.name, facts.max_positions) == ("Qwen/Qwen3-8B", 131072)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("rope_scalin.factor=4", "no such entry. Did you mean 'rope_scaling'"),
        ("model_type=llama", "model_type would make it another model"),
        ("torch_dtype=float16", "set the data type by trainer.dtype"),
    ],
)
def test_what_is_no_entry_of_the_model_s_config_is_refused(entry: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        model_of(
            load_config(LAKE, ["model.name=Qwen/Qwen3-8B", f"model.hf_overrides.{entry}"]).config
        )


@pytest.mark.vllm
def test_vllm_reaches_as_far(tiny_model_dir: Path, tmp_path: Path) -> None:
    known = positions_of(tiny_model_dir)
    folder = overridden_folder(tiny_model_dir, yarn(known), tmp_path / "model")
    made = VllmStart(VllmSettings(), folder).vllm_config({})
    assert made.model_config.max_model_len == 4 * known
    assert made.model_config.hf_text_config.rope_parameters["rope_type"] == "yarn"
