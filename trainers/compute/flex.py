"""Attention with a soft cap or sinks in one kernel: torch's `flex_attention` (Dong et al. 2024,
arXiv:2412.05496), which builds no scores.

FlashAttention has neither. A mask by blocks of tokens says which of them see each other, so that
segments cost nothing for the others, and a window nothing for what lies before it. A sink is a
column of scores without a value (arXiv:2309.17453; gpt-oss): it takes its share of the softmax,
which follows from the kernel's own sum (`lse`), and so does its gradient.

Dimension suffixes: T tokens of all segments, H query heads, K key heads, D head size, N blocks.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

BLOCK_TOKENS = 128
"""Tokens of a block: what the kernel's own masks have."""
SMALLEST_HEAD = 16
"""What a product of its kernel takes at least."""

Kernel = Callable[..., Any]


@lru_cache
def flex_kernel(device: torch.device) -> Kernel | None:
    """The compiled kernel; None for a device that cannot run it."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return None
    compiled: Kernel = torch.compile(flex_attention, dynamic=True)
    return compiled


def block_mask(borders: Tensor, tokens: int, window: int | None) -> BlockMask:
    """What the tokens of segments end to end see: the tokens of their own segment up to
    themselves, and of these the last `window`.

    `borders`: where each segment begins, and the last one ends. It asks the device for nothing, so
    no kernel is waited for.
    """
    places_T = torch.arange(tokens, device=borders.device, dtype=torch.int32)
    segments_T = torch.searchsorted(borders[1:], places_T, right=True)
    seen_from_T = borders[segments_T]
    if window is not None:
        seen_from_T = torch.maximum(seen_from_T, places_T - window + 1)
    firsts_N = places_T[::BLOCK_TOKENS]
    lasts_N = (firsts_N + BLOCK_TOKENS - 1).clamp(max=tokens - 1)
    # What a token sees begins no earlier than for the token before it.
    some_from_N, all_from_N = seen_from_T[firsts_N], seen_from_T[lasts_N]
    some_NN = (lasts_N[None] >= some_from_N[:, None]) & (firsts_N[None] <= lasts_N[:, None])
    all_NN = (firsts_N[None] >= all_from_N[:, None]) & (lasts_N[None] <= firsts_N[:, None])

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= seen_from_T[query])

    return BlockMask.from_kv_blocks(
        *_blocks_by_row(some_NN & ~all_NN),
        *_blocks_by_row(all_NN),
        BLOCK_SIZE=BLOCK_TOKENS,
        mask_mod=sees,
        seq_lengths=(tokens, tokens),
    )


def _blocks_by_row(chosen_NN: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each block of queries sees, and their numbers first in a row of all, as
    `BlockMask.from_kv_blocks` takes them.
    """
    counts_N = chosen_NN.sum(dim=1, dtype=torch.int32)
    order_NN = chosen_NN.int().argsort(dim=1, descending=True, stable=True)
    return counts_N[None, None], order_NN.int()[None, None]


def attend_by_blocks(
    kernel: Kernel,
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: BlockMask,
    *,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Attention of (1, H, T, D) queries to (1, K, T, D) keys and values; (T, H, D). The backward
    pass computes it again.
    """

    def compute(query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor | None) -> Tensor:
        options: dict[str, Any] = {
            "score_mod": None if softcap is None else _soft_cap(softcap),
            "block_mask": mask,
            "scale": scale,
            "enable_gqa": query.shape[1] != key.shape[1],
        }
        if sinks_H is None:
            out_1HTD: Tensor = kernel(query, key, value, **options)
        else:
            out_1HTD, found = kernel(query, key, value, **options, return_aux=AuxRequest(lse=True))
            # softmax over the scores and the sink = softmax over the scores x the share that the
            # sink leaves: exp(lse) / (exp(lse) + exp(sink)).
            share_1HT = torch.sigmoid(found.lse - sinks_H.float()[None, :, None])
            out_1HTD = out_1HTD * share_1HT[..., None].to(out_1HTD.dtype)
        return out_1HTD[0].transpose(0, 1)

    out_THD: Tensor = _Recomputed.apply(compute, *inputs, sinks_H)  # type: ignore[no-untyped-call]
    return out_THD


class _Recomputed(torch.autograd.Function):
    """A result that the backward pass computes again, and differentiates only there.

    torch differentiates a cap while it runs the kernel. Inside a layer whose activations are
    recomputed, the tensors of that derivative would be taken for activations, and its values would
    be those of any memory: gradients of 1e24, without an error (torch 2.13).
    """

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
        ctx.compute = compute
        ctx.save_for_backward(*inputs)
        return compute(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        inputs = [
            None if one is None else one.detach().requires_grad_(need)
            for one, need in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            out = ctx.compute(*inputs)
        asked = [one for one, need in zip(inputs, needed, strict=True) if need and one is not None]
        found = iter(torch.autograd.grad(out, asked, gradients))
        return None, *(next(found) if need else None for need in needed)


def _soft_cap(softcap: float) -> Callable[..., Tensor]:
    def cap(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


__all__ = ["SMALLEST_HEAD", "Kernel", "attend_by_blocks", "block_mask", "flex_kernel"]
