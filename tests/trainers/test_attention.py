"""Packed samples get the logprobs and gradients that each would get alone, in memory that is linear
in the tokens.
"""

from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from agentrl.batch import TrainingSample, collate
from agentrl.errors import ConfigError
from agentrl.models.attention_check import check_kind
from agentrl.trainers.compute import attention, flex, short_segments
from agentrl.trainers.compute.attention import ATTENTION, SIMILAR, Segments, attend
from agentrl.trainers.compute.forward import (
    compute_logprobs_in,
    scaling_of,
    to_device,
    token_logprobs,
)
from agentrl.trainers.compute.recomputation import recompute_blocks
from agentrl.trainers.compute.short_segments import SHORT_PIECE
from agentrl.trainers.packing import MicroBatch
from tests.memory import peak_bytes
from tests.tiers import evenly_crossed

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
    "Gemma3TextConfig": {
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"],
    },
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
    """The same random model twice: with transformers' attention, and with the trainer's."""
    made = []
    for implementation in ("eager", ATTENTION):
        config = getattr(transformers, family)(**SMALL, **FAMILIES[family])
        torch.manual_seed(0)
        made.append(
            transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation=implementation
            ).eval()
        )
    made[1].load_state_dict(made[0].state_dict())
    return made[0], made[1]


def micro_batch(
    lengths: tuple[int, ...] = LENGTHS, *, seed: int = 0, supported: bool = False
) -> MicroBatch:
    """Samples of random tokens, of which about half carry loss."""
    rng, samples = np.random.default_rng(seed), []
    for length in lengths:
        ids, loss = rng.integers(0, 60, length), np.append(False, rng.random(length - 1) < 0.5)
        sample = TrainingSample(
            ids, loss, np.zeros(length), np.zeros(length), np.where(loss, 0, -1), np.zeros(length)
        )
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
            assert torch.allclose(
                one.grad, other.grad, atol=1e-5 * max(1.0, float(one.grad.abs().max()))
            ), name


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


def peak_of_layer(tokens: int, samples: int) -> int:
    """Bytes that a forward and a backward pass of a checkpointed layer take."""
    model = models("Qwen3Config")[1].model.layers[0].self_attn
    segments = Segments.of([tokens // samples] * samples, torch.device("cpu"))
    hidden = torch.randn(1, tokens, 32, requires_grad=True)
    angles = torch.zeros(1, tokens, 8)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return model(
            x,
            position_embeddings=(angles.cos(), angles.sin()),
            attention_mask=None,
            segments=segments,
        )[0]

    return peak_bytes(lambda: checkpoint(layer, hidden, use_reentrant=False).sum().backward())


@pytest.mark.parametrize("samples", [1, 4])
def test_memory_is_linear_in_the_tokens(samples):
    small, large = peak_of_layer(1024, samples), peak_of_layer(4096, samples)
    assert large < 4.4 * small


@pytest.mark.parametrize("length", [127, 128, 300, 513, 1024, 1025])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_short_segments_are_attended_to_in_pieces_with_the_same_results(length, key_heads):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, length, 8) for heads in (4, key_heads, key_heads)]
    inputs = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    results = []
    for causal in (attention._attend_fused, torchs_causal):
        out = causal(*inputs, 0.3)
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def torchs_causal(query, key, value, scale):
    gqa = query.shape[1] != key.shape[1]
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=gqa
    )


def test_pieces_of_short_segments_ask_for_little_more_than_what_they_see(monkeypatch):
    asked: list[int] = []
    fused = short_segments._FUSED

    def counted(query, key, *args, **options):
        asked.append(query.shape[2] * key.shape[2])
        return fused(query, key, *args, **options)

    monkeypatch.setattr(short_segments, "_FUSED", counted)
    attention._attend_fused(*[torch.randn(1, 2, 400, 8) for _ in range(3)], None)
    assert sum(asked) <= 400 * (400 + SHORT_PIECE) / 2


def test_layers_that_know_no_borders_between_samples_are_refused(tmp_path):
    config = transformers.Qwen3NextConfig(
        **SMALL,
        num_experts=2,
        num_experts_per_tok=1,
        layer_types=["linear_attention", "full_attention"],
    )
    with pytest.raises(ConfigError, match="layers of the kinds linear_attention"):
        check_kind(config, tmp_path)


def documented(query, key, value, *where, scale, window_size, enable_gqa):
    """What `torch.nn.attention.varlen.varlen_attn` says that it computes, segment by segment."""
    cu_seq_q, cu_seq_k, max_q, max_k = where
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert max_q == max_k == int(cu_seq_q.diff().max())
    assert enable_gqa or query.shape[1] == key.shape[1]
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    left, right = (len(query) if side == -1 else side for side in window_size)
    outputs = []
    for start, stop in pairwise(cu_seq_q.tolist()):
        q_HLD, k_HLD, v_HLD = (x[start:stop].transpose(0, 1).float() for x in (query, key, value))
        scores = (
            q_HLD @ k_HLD.transpose(1, 2) * (query.shape[-1] ** -0.5 if scale is None else scale)
        )
        after = torch.arange(stop - start)[:, None] - torch.arange(stop - start)[None]
        scores = scores.masked_fill((after > left) | (after < -right), float("-inf"))
        outputs.append((scores.softmax(-1) @ v_HLD).transpose(0, 1).to(query.dtype))
    return torch.cat(outputs)


@pytest.fixture
def flash_here(monkeypatch):
    """Calls of a kernel that runs on CPUs, and not on GPUs."""
    calls = []

    def kernel(*args, **options):
        calls.append((args, options))
        return documented(*args, **options)

    monkeypatch.setattr(attention, "FLASH_DEVICE", "cpu")
    monkeypatch.setattr(attention, "_flash_kernel", lambda device: kernel)
    return calls


@pytest.mark.parametrize("window", [None, 1, 5, 1000])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_the_flash_kernel_gets_arguments_that_give_the_same(
    flash_here, monkeypatch, window, key_heads, scaling
):
    monkeypatch.setattr(attention, "FLASH_PRECISIONS", (torch.float32,))
    lengths = [20, 17, 9, 1]
    torch.manual_seed(0)
    inputs = [
        torch.randn(1, heads, sum(lengths), 8, requires_grad=True)
        for heads in (4, key_heads, key_heads)
    ]
    segments, results = Segments.of(lengths, torch.device("cpu")), []
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(attention, "FLASH_DEVICE", device)
        out, _ = attend(
            torch.nn.Module(),
            *inputs,
            None,
            segments=segments,
            scaling=scaling,
            sliding_window=window,
        )
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    assert len(flash_here) == 1
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_a_kernel_of_torch_2_11_gets_as_many_heads_of_keys_as_of_queries(key_heads):
    def older(query, key, value, *where, scale=None, window_size=(-1, -1)):
        assert query.shape == key.shape == value.shape
        options = {"scale": scale, "window_size": window_size}
        return documented(query, key, value, *where, enable_gqa=False, **options)

    generator, borders = torch.Generator().manual_seed(0), torch.tensor([0, 5, 9]).int()
    inputs = [
        torch.randn(9, heads, 8, generator=generator, requires_grad=True)
        for heads in (4, key_heads, key_heads)
    ]
    where, options = (borders, borders, 5, 5), {"scale": 0.3, "window_size": (-1, 0)}
    results = []
    for kernel in (partial(attention._with_equal_heads, older), documented):
        out = kernel(*inputs, *where, enable_gqa=key_heads != 4, **options)
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_flash_attention_is_for_what_it_can_compute(flash_here):
    segments = Segments.of([4, 3], torch.device("cpu"))

    def taken(dtype=torch.bfloat16, size=8, **options):
        before, x = len(flash_here), torch.randn(1, 2, 7, size, dtype=dtype)
        attend(torch.nn.Module(), x, x, x, None, segments=segments, **options)
        return len(flash_here) > before

    assert all((taken(), taken(torch.float16), taken(size=256)))
    assert not any((taken(torch.float32), taken(size=12), taken(size=264), taken(softcap=2.0)))
    assert not taken(s_aux=torch.zeros(2))
    with torch.autocast("cpu", torch.bfloat16):  # a norm of queries and keys returns float32
        assert taken(torch.float32)
    assert {x.dtype for x in flash_here[-1][0][:3]} == {torch.bfloat16}


def test_torchs_kernel_takes_these_arguments(monkeypatch):
    """Its shapes on the device that has no memory: there is no GPU here."""
    kernel = attention._varlen_kernel()
    assert kernel is not None
    monkeypatch.setattr(attention, "_precision", lambda query: query.dtype)
    segments = Segments.of([4, 3], torch.device("meta"))
    inputs = [
        torch.empty(1, heads, 7, 8, dtype=torch.bfloat16, device="meta") for heads in (4, 2, 2)
    ]
    for window in (None, 2):
        out = attention._attend_flash(kernel, tuple(inputs), segments, None, window)
        assert (out.shape, out.dtype) == ((7, 4, 8), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="this machine has no GPU that torch can use"
)
@pytest.mark.parametrize("window", [None, 5])
def test_on_gpus_the_flash_kernel_gives_what_the_blocks_give(monkeypatch, window):
    segments, generator = (
        Segments.of([200, 170, 9], torch.device("cuda")),
        torch.Generator().manual_seed(0),
    )
    made = [torch.randn(1, heads, 379, 64, generator=generator) for heads in (8, 2, 2)]
    inputs = [x.to("cuda", torch.bfloat16).requires_grad_() for x in made]
    results = []
    for device in ("cuda", "none"):
        monkeypatch.setattr(attention, "FLASH_DEVICE", device)
        out, _ = attend(torch.nn.Module(), *inputs, None, segments=segments, sliding_window=window)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), inputs)))
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one.float(), other.float(), atol=0.05, rtol=0.02)


def recomputed(compute):
    """As in a layer whose activations the backward pass computes again."""
    return lambda *inputs: checkpoint(compute, *inputs, use_reentrant=False)


def by_pieces_and_kernel(lengths, options, monkeypatch, *, sinks, again):
    """What both compute of the same, with its gradients."""
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(1, heads, sum(lengths), 16, generator=generator, requires_grad=True)
        for heads in (4, 2, 2)
    ]
    if sinks:
        inputs.append(torch.randn(4, generator=generator, requires_grad=True))
        options = {**options, "s_aux": inputs[-1]}
    results = []
    segments = Segments.of(lengths, torch.device("cpu"))

    def of(query, key, value):
        return attend(torch.nn.Module(), query, key, value, None, segments=segments, **options)[0]

    for device, compute in (("cuda", of), ("cpu", recomputed(of) if again else of)):
        monkeypatch.setattr(attention, "FLASH_DEVICE", device)
        out = compute(*inputs[:3])
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    return results


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("again", "kind", "window"),
    evenly_crossed(7, [False, True], ["cap", "sinks", "both"], [None, 1, 40, 1000]),
)
def test_one_kernel_for_caps_and_sinks_gives_what_the_pieces_give(
    flex_here, monkeypatch, window, kind, again
):
    options = {"sliding_window": window, "scaling": 0.3}
    if kind != "sinks":
        options["softcap"] = 1.5
    lengths = [300, 129, 128, 20, 1]
    pieces, kernel = by_pieces_and_kernel(
        lengths, options, monkeypatch, sinks=kind != "cap", again=again
    )
    assert len(flex_here) == 2 + again  # forward, backward
    for one, other in zip(pieces, kernel, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=5),
    st.one_of(st.none(), st.integers(1, 400)),
)
def test_a_mask_by_blocks_is_that_of_each_token(lengths, window):
    borders = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    tokens = sum(lengths)
    mask = flex.block_mask(borders, tokens, window)
    segment_T = np.repeat(np.arange(len(lengths)), lengths)
    place_T = np.arange(tokens)
    behind_TT = place_T[:, None] - place_T[None]
    seen_TT = (segment_T[:, None] == segment_T[None]) & (behind_TT >= 0)
    if window is not None:
        seen_TT &= behind_TT < window
    told_TT = mask.mask_mod(None, None, *map(torch.from_numpy, np.ix_(place_T, place_T)))
    assert np.array_equal(told_TT.numpy(), seen_TT)
    # A block that is listed as seen by all is, and none that is seen is left out.
    size = flex.BLOCK_TOKENS
    for rows in range(-(-tokens // size)):
        some, whole = (
            set(indices[0, 0, rows, : counts[0, 0, rows]].tolist())
            for counts, indices in (
                (mask.kv_num_blocks, mask.kv_indices),
                (mask.full_kv_num_blocks, mask.full_kv_indices),
            )
        )
        for columns in range(-(-tokens // size)):
            part = seen_TT[rows * size :][:size, columns * size :][:, :size]
            assert (columns in some) == (part.any() and not part.all())
            assert (columns in whole) == part.all()


def test_the_kernel_for_caps_and_sinks_is_for_what_it_can_compute(monkeypatch):
    monkeypatch.setattr(flex, "flex_kernel", lambda device: "kernel")

    def taken(dtype=torch.bfloat16, size=16):
        return attention._flex_for(torch.empty(1, 2, 7, size, dtype=dtype)) is not None

    assert not taken()
    monkeypatch.setattr(attention, "FLASH_DEVICE", "cpu")
    assert taken()
    assert taken(torch.float16, 192)
    assert not taken(torch.float32)
    assert not taken(size=8)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="this machine has no GPU that torch can use"
)
@pytest.mark.parametrize("window", [None, 50])
def test_on_gpus_one_kernel_for_caps_and_sinks_gives_what_the_pieces_give(monkeypatch, window):
    segments, generator = (
        Segments.of([300, 129, 20], torch.device("cuda")),
        torch.Generator().manual_seed(0),
    )
    shapes = [(1, heads, 449, 64) for heads in (8, 2, 2)]
    made = [torch.randn(shape, generator=generator) for shape in (*shapes, (8,))]
    inputs = [x.to("cuda", torch.bfloat16).requires_grad_() for x in made]
    results = []
    for device in ("cuda", "none"):
        monkeypatch.setattr(attention, "FLASH_DEVICE", device)
        *qkv, sinks = inputs
        options = {"sliding_window": window, "softcap": 20.0, "s_aux": sinks}
        out, _ = attend(torch.nn.Module(), *qkv, None, segments=segments, **options)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), inputs)))
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one.float(), other.float(), atol=0.05, rtol=0.02)


def test_values_that_are_narrower_than_keys_are_attended_to_without_all_scores() -> None:
    rng, lengths = torch.Generator().manual_seed(0), (40, 23)
    sizes = (12, 12, 8)
    query, key, value = (
        torch.randn(1, 4, sum(lengths), size, generator=rng, requires_grad=True) for size in sizes
    )
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda one: kept.append(one.numel()) or one, lambda one: one
    ):
        out_1SHD, _ = attend(
            torch.nn.Module(), query, key, value, None, segments=Segments.of(lengths, query.device)
        )
    assert max(kept) <= query.numel()
    start = 0
    for length in lengths:
        own = slice(start, start + length)
        scores = query[0, :, own] @ key[0, :, own].mT / 12**0.5
        ahead = torch.ones(length, length, dtype=torch.bool).triu(1)
        expected = scores.masked_fill(ahead, float("-inf")).softmax(-1) @ value[0, :, own]
        torch.testing.assert_close(out_1SHD[0, own].transpose(0, 1), expected)
        start += length
