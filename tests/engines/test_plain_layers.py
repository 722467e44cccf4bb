"""The layers of common decoders in few operators compute what transformers' own do."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from agentrl.engines.packed_model import PackedModel, StepRow
from agentrl.engines.plain_layers import PlainLayers
from agentrl.protocols import ScoreRequest
from agentrl.settings.sampling import SamplingParams
from agentrl.tokens.arrays import ints

SMALL: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
WINDOWED = {
    "use_sliding_window": True,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"],
}
PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama of another rotation": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "qwen2": ("Qwen2", {}),
    "qwen2 with windows": ("Qwen2", WINDOWED),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 with windows": ("Qwen3", {"head_dim": 16, **WINDOWED}),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("Granite", {"residual_multiplier": 0.5, "logits_scaling": 4.0}),
    "olmo2": ("Olmo2", {}),
}


def random_model(family: str, settings: dict[str, Any], seed: int) -> Any:
    """A model, of which norms and biases are random, too."""
    config = getattr(transformers, f"{family}Config")(**SMALL, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            base = 1.0 if weight.dim() == 1 else 0.0
            weight.copy_(base + 0.3 * torch.randn(weight.shape, generator=generator))
    return model


def packed(folder: Path) -> PackedModel:
    return PackedModel(folder, dtype=torch.float32, device=torch.device("cpu"), max_slots=4)


def assert_computes_as(found: PackedModel, model: Any) -> None:
    """Prompts of several lengths, two tokens after each, and scores."""
    rng = np.random.default_rng(0)
    rows = [ints(rng.integers(0, 60, length)) for length in (3, 21, 40)]
    tokens: list[list[int]] = [row.tolist() for row in rows]
    for turn in range(3):
        steps = [
            StepRow(
                slot,
                0 if turn == 0 else len(own) - 1,
                rows[slot] if turn == 0 else ints(own[-1:]),
                sample=True,
                sampling=SamplingParams(),
                seed=slot,
                position=turn,
            )
            for slot, own in enumerate(tokens)
        ]
        for own, drawn in zip(tokens, found.step(steps), strict=True):
            wanted_V = logprobs(model, own)[-1]
            assert drawn.logprob == pytest.approx(float(wanted_V[drawn.token]), abs=1e-5)
            own.append(drawn.token)
    request = ScoreRequest("score", ints(tokens[2]), start=5)
    (scores,) = found.score([request])
    wanted_TV = logprobs(model, tokens[2])
    wanted = [float(wanted_TV[place - 1, tokens[2][place]]) for place in range(5, len(tokens[2]))]
    assert scores.tolist() == pytest.approx(wanted, abs=1e-5)


def logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits_TV: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits_TV.log_softmax(-1)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_layers_have_the_logprobs_of_transformers_and_follow_new_weights(
    name: str, tmp_path: Path
) -> None:
    family, settings = PLAIN[name]
    model, newer = (random_model(family, settings, seed) for seed in (1, 2))
    model.save_pretrained(tmp_path)
    found = packed(tmp_path)
    assert found.has_plain_layers
    assert_computes_as(found, model)
    found.load_weights(newer.state_dict())
    assert_computes_as(found, newer)


@pytest.mark.parametrize("name", OTHERS)
def test_layers_of_other_families_are_transformers_own(name: str, tmp_path: Path) -> None:
    model = random_model(*OTHERS[name], seed=1)
    model.save_pretrained(tmp_path)
    found = packed(tmp_path)
    assert not found.has_plain_layers
    assert_computes_as(found, model)


def test_layers_that_compute_something_else_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = PlainLayers.__call__
    monkeypatch.setattr(PlainLayers, "__call__", lambda self, *given: 1.01 * call(self, *given))
    model = random_model("Qwen3", {}, seed=1)
    model.save_pretrained(tmp_path)
    found = packed(tmp_path)
    assert not found.has_plain_layers
    assert_computes_as(found, model)
