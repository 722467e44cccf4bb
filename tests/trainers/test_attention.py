"""Packed samples get the logprobs and gradients that each would get alone, in memory that is linear in the tokens."""

from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from agentrl.batch import TrainingSample, collate
from agentrl.trainers import attention
from agentrl.trainers.attention import ATTENTION, SIMILAR, Segments
from agentrl.trainers.forward import compute_logprobs_in, scaling_of, to_device, token_logprobs
from agentrl.trainers.packing import MicroBatch
from agentrl.trainers.recomputation import recompute_blocks

SMALL = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "attention_dropout": 0.0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaConfig": {},
    "Qwen2Config": {},
    "Qwen3Config": {},
    "MistralConfig": {"sliding_window": 7},
    "Gemma2Config": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    "Gemma3TextConfig": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    "GptOssConfig": {
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "CohereConfig": {"logit_scale": 0.25},
    "GraniteConfig": {"logits_scaling": 4.0},
}
LENGTHS = (23, 22, 20, 11, 9, 3, 2)
TEMPERATURE = 0.7


def models(family: str) -> tuple[Any, Any]:
    """The same random model twice: with transformers' own attention, and with that of the trainer."""
    made = []
    for implementation in ("eager", ATTENTION):
        config = getattr(transformers, family)(**SMALL, **FAMILIES[family])
        torch.manual_seed(0)
        made.append(transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval())
    made[1].load_state_dict(made[0].state_dict())
    return made[0], made[1]


def micro_batch(lengths: tuple[int, ...] = LENGTHS, *, seed: int = 0, supported: bool = False) -> MicroBatch:
    """Samples of random tokens, of which about half carry loss."""
    rng, samples = np.random.default_rng(seed), []
    for length in lengths:
        ids, loss = rng.integers(0, 60, length), np.append(False, rng.random(length - 1) < 0.5)
        sample = TrainingSample(ids, loss, np.zeros(length), np.zeros(length), np.where(loss, 0, -1), np.zeros(length))
        samples.append(sample)
    return MicroBatch(collate(samples), np.arange(len(lengths), dtype=np.int32))


def alone(model: Any, batch: MicroBatch) -> torch.Tensor:
    """The logprobs of each sample in a forward pass of its own, by transformers."""
    found, ends = [], np.cumsum(batch.samples.lengths_M)
    for end, length in zip(ends, batch.samples.lengths_M, strict=True):
        ids = torch.from_numpy(batch.samples.tokens_S[end - length : end].astype(np.int64))
        loss = torch.from_numpy(batch.samples.loss_mask_S[end - length : end].copy())
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float() / TEMPERATURE
        logprobs = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        found.append(logprobs[loss[1:]])
    return torch.cat(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_samples_have_the_logprobs_and_gradients_that_each_has_alone(family, monkeypatch):
    monkeypatch.setattr(attention, "PIECE", 5)  # several pieces for a window
    plain, packed = models(family)
    batch = micro_batch()
    wanted_N = alone(plain, batch)
    compute_logprobs_in(packed.get_output_embeddings(), scaling_of(packed, TEMPERATURE))
    found_N = token_logprobs(packed, to_device(batch, torch.device("cpu")))
    assert torch.allclose(found_N, wanted_N, atol=1e-5)
    directions_N = torch.from_numpy(np.random.default_rng(1).normal(size=len(wanted_N)))
    for logprobs_N in (wanted_N, found_N):
        (logprobs_N * directions_N).sum().backward()
    for (name, one), other in zip(plain.named_parameters(), packed.parameters(), strict=True):
        if one.grad is not None:
            assert torch.allclose(one.grad, other.grad, atol=1e-5 * max(1.0, float(one.grad.abs().max()))), name


def test_checkpointed_layers_give_the_same_gradients():
    (_, one), (_, other) = models("Qwen3Config"), models("Qwen3Config")
    recompute_blocks(other, "full")
    for model in (one, other):
        compute_logprobs_in(model.get_output_embeddings(), scaling_of(model, TEMPERATURE))
        token_logprobs(model, to_device(micro_batch(), torch.device("cpu"))).sum().backward()
    for first, second in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(first.grad, second.grad)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.booleans())
def test_blocks_hold_each_token_once_in_order_and_little_padding(lengths, in_order):
    lengths = sorted(lengths, reverse=True) if in_order else lengths
    blocks = Segments.of(lengths, torch.device("cpu")).blocks
    tokens = []
    for block in blocks:
        if block.padded_RL is None:
            tokens += range(block.first, block.stop)
        else:
            kept = block.padded_RL.flatten()[block.kept_N].tolist()
            assert len(kept) >= SIMILAR * block.padded_RL.numel()
            assert len(kept) == block.stop - block.first
            tokens += kept
    assert tokens == list(range(sum(lengths)))


def peak_bytes(tokens: int, samples: int) -> int:
    """The most memory that a forward and a backward pass of a checkpointed layer take, beyond what was there."""
    model = models("Qwen3Config")[1].model.layers[0].self_attn
    segments = Segments.of([tokens // samples] * samples, torch.device("cpu"))
    hidden = torch.randn(1, tokens, 32, requires_grad=True)
    angles = torch.zeros(1, tokens, 8)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return model(x, position_embeddings=(angles.cos(), angles.sin()), attention_mask=None, segments=segments)[0]

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        checkpoint(layer, hidden, use_reentrant=False).sum().backward()
    changes = [event.nbytes() for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(changes))


@pytest.mark.parametrize("samples", [1, 4])
def test_memory_is_linear_in_the_tokens(samples):
    small, large = peak_bytes(1024, samples), peak_bytes(4096, samples)
    assert large < 4.4 * small


def test_layers_that_know_no_borders_between_samples_are_refused(tmp_path):
    from agentrl.errors import ConfigError
    from agentrl.trainers.forward import check_attention

    config = transformers.Qwen3NextConfig(
        **SMALL, num_experts=2, num_experts_per_tok=1, layer_types=["linear_attention", "full_attention"]
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match="layers of the kinds linear_attention"):
        check_attention(model)
