"""Causal attention of short segments on CPUs.

There, torch's fused attention computes for each query all keys of blocks of 512, of which it sees
some. So queries ask in pieces, each for the keys up to its end. All pieces write into one result,
which is kept for the backward pass once, and not again by each piece.

Dimension suffixes: R segments of L tokens, H query heads, K key heads, D head size; Q queries of a
piece, C columns that they see.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend

SHORT_PIECE = 128
"""Queries of a piece."""
LONGEST_IN_PIECES = 1024
"""Tokens of a segment that is computed in pieces: in a longer one they save little."""
_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FUSED_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def is_in_pieces(query_RHLD: Tensor, key_RKLD: Tensor, value_RKLD: Tensor) -> bool:
    """True if `attend_in_pieces` is faster than torch's attention, which would take its fused
    kernel.
    """
    if (
        query_RHLD.device.type != "cpu"
        or not SHORT_PIECE < query_RHLD.shape[2] <= LONGEST_IN_PIECES
    ):
        return False
    chosen = torch._fused_sdp_choice(
        query_RHLD,
        key_RKLD,
        value_RKLD,
        is_causal=True,
        enable_gqa=query_RHLD.shape[1] != key_RKLD.shape[1],
    )
    return bool(chosen == SDPBackend.FLASH_ATTENTION.value)


def attend_in_pieces(
    query_RHLD: Tensor,
    key_RKLD: Tensor,
    value_RKLD: Tensor,
    scaling: float | None = None,
    repeated: Sequence[int] = (),
) -> Tensor:
    """Attention of each token to its segment up to itself, (R, H, L, D).

    `repeated`: of each segment, how many of its first tokens are not asked for. The results of
    pieces that have no other tokens are 0.
    """
    pieces = tuple(_pieces(query_RHLD.shape[2], repeated))
    inputs = (query_RHLD, key_RKLD, value_RKLD, pieces, scaling)
    out: Tensor = _InPieces.apply(*inputs)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True, slots=True)
class _Piece:
    """The queries from `first` to `stop`, of the segments `rows_R`; of all if None."""

    first: int
    stop: int
    rows_R: Tensor | None

    def of(self, *tensors: Tensor) -> list[Tensor]:
        """The piece's queries in tensors of them."""
        return [self._of_rows(one[:, :, self.first : self.stop]) for one in tensors]

    def seen(self, *tensors: Tensor) -> list[Tensor]:
        """The keys and values that the queries see."""
        return [self._of_rows(one[:, :, : self.stop]) for one in tensors]

    def mask(self, dtype: torch.dtype) -> Tensor:
        """0 for what each query sees, else -inf."""
        return _mask(self.first, dtype)[: self.stop - self.first, : self.stop]

    def put(self, part: Tensor, out_RHLD: Tensor) -> None:
        """Write the piece's results among those of all."""
        own = out_RHLD[:, :, self.first : self.stop]
        if self.rows_R is None:
            own.copy_(part)
        else:
            own.index_copy_(0, self.rows_R, part)

    def add_to_seen(self, part: Tensor, sum_RKLD: Tensor) -> None:
        """Add the gradients of what the queries saw."""
        own = sum_RKLD[:, :, : self.stop]
        if self.rows_R is None:
            own.add_(part)
        else:
            own.index_add_(0, self.rows_R, part)

    def _of_rows(self, part: Tensor) -> Tensor:
        return part if self.rows_R is None else part.index_select(0, self.rows_R)


def _pieces(length: int, repeated: Sequence[int]) -> Iterator[_Piece]:
    for first in range(0, length, SHORT_PIECE):
        stop = min(first + SHORT_PIECE, length)
        asking = [row for row, count in enumerate(repeated) if count < stop]
        if asking or not repeated:
            yield _Piece(first, stop, torch.tensor(asking) if len(asking) < len(repeated) else None)


class _InPieces(torch.autograd.Function):
    """See `attend_in_pieces`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        query_RHLD, key_RKLD, value_RKLD, pieces, scaling = inputs
        # Heads of a token lie together, as the product after attention takes them.
        rows, heads, length, size = query_RHLD.shape
        out_RHLD: Tensor = query_RHLD.new_zeros(rows, length, heads, size).transpose(1, 2)
        sums = []  # of the exponentials of each query's scores, as logarithms
        for piece in pieces:
            part, sum_RHQ = _FUSED(
                *piece.of(query_RHLD),
                *piece.seen(key_RKLD, value_RKLD),
                attn_mask=piece.mask(query_RHLD.dtype),
                scale=scaling,
            )
            piece.put(part, out_RHLD)
            sums.append(sum_RHQ)
        ctx.save_for_backward(query_RHLD, key_RKLD, value_RKLD, out_RHLD, *sums)
        ctx.pieces, ctx.scaling = pieces, scaling
        return out_RHLD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RHLD: Tensor) -> tuple[Tensor | None, ...]:
        query_RHLD, key_RKLD, value_RKLD, out_RHLD, *sums = ctx.saved_tensors
        of_query_RHLD = torch.zeros_like(query_RHLD)
        of_seen = (torch.zeros_like(key_RKLD), torch.zeros_like(value_RKLD))
        for piece, sum_RHQ in zip(ctx.pieces, sums, strict=True):
            own_grad, own_query, own_out = piece.of(grad_RHLD, query_RHLD, out_RHLD)
            of_query, *parts = _FUSED_BACKWARD(
                own_grad,
                own_query,
                *piece.seen(key_RKLD, value_RKLD),
                own_out,
                sum_RHQ,
                0.0,
                False,
                attn_mask=piece.mask(query_RHLD.dtype),
                scale=ctx.scaling,
            )
            piece.put(of_query, of_query_RHLD)
            for part, whole_RKLD in zip(parts, of_seen, strict=True):
                piece.add_to_seen(part, whole_RKLD)
        return of_query_RHLD, *of_seen, None, None


@lru_cache
def _mask(first: int, dtype: torch.dtype) -> Tensor:
    """0 for the tokens that each query of a piece sees, by the place of its first query; else -inf.

    From booleans, torch would build this mask again at every call.
    """
    seen_QC = np.arange(first, first + SHORT_PIECE)[:, None] >= np.arange(first + SHORT_PIECE)
    with torch.inference_mode(False):
        return torch.zeros(seen_QC.shape, dtype=dtype).masked_fill_(
            torch.from_numpy(~seen_QC), float("-inf")
        )
