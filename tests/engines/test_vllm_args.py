"""Each argument of the installed vLLM is passed, agentrl's own, or refused with a reason."""

import ast
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agentrl.config import load_config
from agentrl.engines.vllm_args import OWN_SETTINGS, PASSED, REASONS, typed_arguments
from agentrl.engines.vllm_settings import VllmSettings
from agentrl.errors import ConfigError
from tests.engines.test_vllm_names import definition, needs_vllm

LAKE = Path(__file__).parents[2] / "examples" / "frozen_lake.yaml"


def fields_of(name: str) -> set[str]:
    """The fields of a dataclass of vLLM's arguments, by its source."""
    node = definition("vllm.engine.arg_utils", name)
    assert isinstance(node, ast.ClassDef)
    return {
        field.target.id
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


@needs_vllm
def test_all_arguments_of_the_installed_vllm_are_decided_once() -> None:
    decided = [*PASSED, *OWN_SETTINGS, *REASONS]
    assert len(decided) == len(set(decided))
    assert set(decided) == fields_of("EngineArgs") | fields_of("AsyncEngineArgs")


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load_config(LAKE, ["engine=vllm", *overrides])
    return str(refused.value)


def test_an_argument_that_is_not_the_user_s_is_refused_with_the_reason() -> None:
    for argument, way_out in {**OWN_SETTINGS, **REASONS}.items():
        with pytest.raises(ValidationError) as refused:
            VllmSettings(args={argument: 1})
        assert f"{argument} " in str(refused.value)
        assert way_out in str(refused.value)
    said = refusal("engine.args.logprobs_mode=raw_logits")
    assert said.startswith("engine.args")
    assert "could not reproduce the probabilities" in said


def test_a_mistyped_argument_is_answered_with_the_nearest() -> None:
    said = refusal("engine.args.blocksize=16", "engine.args.max_num_sequences=4")
    assert "no argument 'blocksize'. Did you mean 'block_size'?" in said
    assert "no argument 'max_num_sequences'. Did you mean 'max_num_seqs'?" in said
    assert "random weights" in refusal("engine.args.load_format=dummy")


def test_arguments_reach_the_settings_as_they_are_written() -> None:
    written = ["engine=vllm", "engine.args={block_size: 32, compilation_config: {level: 3}}"]
    settings: Any = load_config(LAKE, written).config.engine.settings
    assert settings.args == {"block_size": 32, "compilation_config": {"level": 3}}


@pytest.mark.vllm
def test_values_are_checked_against_vllm_s_own_types() -> None:
    typed = typed_arguments(
        {
            "attention_backend": "flash_attn",
            "block_size": 32,
            "compilation_config": {"cudagraph_capture_sizes": [1, 2]},
            "prefix_caching_hash_algo": "xxhash",
        }
    )
    assert typed["attention_backend"].name == "FLASH_ATTN"
    assert typed["compilation_config"].cudagraph_capture_sizes == [1, 2]
    wrong = {
        "block_size": "many",
        "compilation_config": {"cudagraph_sizes": [1]},
        "prefix_caching_hash_algo": "md5",
        "enable_dbo": "maybe",
    }
    with pytest.raises(ValueError, match="block_size='many'") as refused:
        typed_arguments(wrong)
    for argument in wrong:
        assert argument in str(refused.value)
