"""Compiled layers: what they compute, and that other lengths compile nothing again."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import transformers
from pydantic import ValidationError

from agentrl.errors import ConfigError
from agentrl.trainers.compute.attention import ATTENTION, Segments
from agentrl.trainers.compute.compiled import compile_blocks
from agentrl.trainers.deepspeed import DeepSpeedTrainer
from agentrl.trainers.fsdp import FsdpTrainer
from agentrl.trainers.settings import TrainerSettings
from tests.model_families import SMALL

FIRST, OTHERS = ([8, 9], [30]), ([12, 40, 7], [5, 5, 5, 5], [33, 2], [64], [17, 16, 90])


@pytest.fixture(autouse=True)
def _nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import torch._dynamo

    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setattr(torch._dynamo.config, "disable", False)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model_of(kind: str, **settings: Any) -> Any:
    config = getattr(transformers, kind)(**{**SMALL, "vocab_size": 320, **settings})
    with torch.random.fork_rng():
        return transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=ATTENTION
        ).eval()


def computed(model: Any, lengths: Sequence[int]) -> list[torch.Tensor]:
    """The last hidden states, and the gradients."""
    model.zero_grad()
    places = torch.cat([torch.arange(length) for length in lengths])
    states = model.base_model(
        input_ids=((torch.arange(len(places)) * 7) % 320)[None],
        position_ids=places[None],
        use_cache=False,
        segments=Segments.of(lengths, torch.device("cpu")),
    ).last_hidden_state
    states.square().mean().backward()
    gradients = [one.grad for one in model.base_model.parameters() if one.grad is not None]
    return [states.detach(), *(gradient.clone() for gradient in gradients)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param("Qwen3Config", {}, marks=pytest.mark.long),
        (
            "Gemma2Config",
            {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"] * 2},
        ),
    ],
)
def test_compiled_layers_compute_the_same_and_other_lengths_compile_nothing(
    kind: str, settings: dict[str, Any]
) -> None:
    from torch._dynamo.utils import counters

    model = model_of(kind, num_hidden_layers=4, **settings)
    expected = [computed(model, lengths) for lengths in (*FIRST, *OTHERS)]
    # As any backend divides layers into programs; it needs no C++ compiler.
    compile_blocks(model, "aot_eager")
    counters.clear()
    found = [computed(model, lengths) for lengths in FIRST]
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    found += [computed(model, lengths) for lengths in OTHERS]
    assert counters["stats"]["unique_graphs"] == graphs
    for got, want in zip(found, expected, strict=True):
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_what_cannot_be_compiled_is_refused_by_name() -> None:
    mixture = model_of(
        "Qwen3MoeConfig", num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16
    )
    with pytest.raises(ConfigError, match=r"Qwen3MoeForCausalLM .* experts"):
        compile_blocks(mixture)
    with pytest.raises(ValidationError, match="selective"):
        TrainerSettings(compile=True, activation_checkpointing="selective")
    with pytest.raises(ValidationError, match="tensor_parallel exchange"):
        FsdpTrainer.Config(world_size=2, tensor_parallel=2, compile=True)
    with pytest.raises(ValidationError, match="DeepSpeed"):
        DeepSpeedTrainer.Config(compile=True)
