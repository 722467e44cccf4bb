"""Activations that are computed again: what is kept meanwhile, and that nothing else changes."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from agentrl.errors import ConfigError
from agentrl.trainers.compute.attention import ATTENTION, Segments
from agentrl.trainers.compute.recomputation import blocks_of, recompute_blocks
from agentrl.trainers.deepspeed import DeepSpeedTrainer
from agentrl.trainers.settings import TrainerSettings
from tests.memory import kept_bytes

LENGTHS = [60, 40, 28]


def qwen(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=ATTENTION, local_files_only=True
    )


def gemma(folder: Path) -> Any:
    """With sliding windows and soft caps, whose attention is computed in pieces that are computed
    again too.
    """
    config = Gemma2Config(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=16,
    )
    with torch.random.fork_rng():
        model = Gemma2ForCausalLM(config)
    model.set_attn_implementation(ATTENTION)
    return model


def hidden_states(model: Any) -> torch.Tensor:
    tokens_S = torch.arange(sum(LENGTHS)) % 100
    segments = Segments.of(LENGTHS, torch.device("cpu"))
    states: torch.Tensor = model.base_model(
        input_ids=tokens_S[None], use_cache=False, segments=segments
    ).last_hidden_state
    return states


@pytest.mark.parametrize("make", [qwen, gemma])
@pytest.mark.parametrize(
    ("how", "offload"), [("selective", False), ("full", False), ("full", True)]
)
def test_what_is_computed_again_gives_the_same_gradients_to_the_bit(
    shallow_model_dir: Path, make: Callable[[Path], Any], how: Any, offload: bool
) -> None:
    plain = make(shallow_model_dir)
    other = make(shallow_model_dir)
    other.load_state_dict(plain.state_dict())
    recompute_blocks(other, how, offload=offload)
    for model in (plain, other):
        hidden_states(model).square().sum().backward()
    for (name, one), two in zip(plain.named_parameters(), other.parameters(), strict=True):
        assert (one.grad is None and two.grad is None) or torch.equal(one.grad, two.grad), name


def test_each_way_keeps_the_activations_of_a_layer_that_it_says(shallow_model_dir: Path) -> None:
    found = {}
    for how in ("none", "selective", "full"):
        model = qwen(shallow_model_dir)
        recompute_blocks(model, how)
        found[how] = kept_bytes(partial(hidden_states, model))
    config, tokens = model.config, sum(LENGTHS)
    layers, hidden = config.num_hidden_layers, config.hidden_size
    query = config.num_attention_heads * config.head_dim
    key = config.num_key_value_heads * config.head_dim
    inputs = layers * 4 * tokens * hidden
    # Outputs of the seven products, and of attention, whose block pads segments of similar length.
    products = layers * 4 * tokens * (2 * hidden + query + 2 * key + 2 * config.intermediate_size)
    attention = layers * 4 * tokens * query
    outputs = 4 * tokens * hidden
    outside = found["full"] - inputs - outputs
    assert 0 <= outside < 4 * 4 * tokens * hidden  # the last norm, and the positions
    assert found["selective"] - found["full"] == pytest.approx(products + attention, rel=0.1)
    assert found["none"] > 1.5 * found["selective"]


def test_what_is_offloaded_is_the_input_of_each_layer(
    shallow_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[torch.Tensor] = []

    class Watched(saved_tensors_hooks):
        def __init__(self, *, pin_memory: bool) -> None:
            super().__init__(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor)

    monkeypatch.setattr("agentrl.trainers.compute.recomputation.save_on_cpu", Watched)
    model = qwen(shallow_model_dir)
    seen = []
    for block in blocks_of(model):
        block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    recompute_blocks(model, "full", offload=True)
    hidden_states(model).sum().backward()
    assert [tensor.data_ptr() for tensor in packed] == [tensor.data_ptr() for tensor in seen]
    assert len(packed) == model.config.num_hidden_layers


def test_a_model_of_a_billion_parameters_is_computed_again_unless_the_settings_say_otherwise() -> (
    None
):
    assert [TrainerSettings().recomputed(size) for size in (10**9 - 1, 10**9)] == ["none", "full"]
    assert TrainerSettings(activation_offload=True).recomputed(1) == "full"
    assert TrainerSettings(activation_checkpointing="selective").recomputed(10**12) == "selective"


def test_wrong_settings_say_what_to_write(shallow_model_dir: Path) -> None:
    model = qwen(shallow_model_dir)
    with pytest.raises(ConfigError, match="write full or selective"):
        recompute_blocks(model, "none", offload=True)
    model._no_split_modules = None
    with pytest.raises(ConfigError, match="activation_checkpointing=none"):
        recompute_blocks(model, "full")
    with pytest.raises(ValidationError, match="write activation_checkpointing: full"):
        DeepSpeedTrainer.Config(zero_stage=3, activation_checkpointing="selective")
    assert (
        DeepSpeedTrainer.Config(zero_stage=2, activation_checkpointing="selective").recomputed(1)
        == "selective"
    )
