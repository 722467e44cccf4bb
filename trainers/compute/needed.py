"""Attention of the few tokens whose results are used, to all tokens of their segments.

In the layer after which tokens do not mix any more, the results of other tokens have no influence
(see `agentrl/models/last_layer.py`). Dimension suffixes: as in
`agentrl/trainers/compute/attention.py`; P needed tokens of the sequence, Q of them in a segment.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentrl.tokens.arrays import IntArray
from agentrl.trainers.compute.prefixes import SharedPrefixes

if TYPE_CHECKING:
    from agentrl.trainers.compute.attention import Block

MAX_NEEDED_PER_SEGMENT = 256
"""Needed tokens of a segment: what they see is held in a mask, whose size then stays linear in the
tokens.
"""
MAX_NEEDED_SHARE = 0.5
"""If more of a segment is needed, attention without a mask is as fast."""


@dataclass(frozen=True, slots=True)
class NeededOfBlock:
    """The needed tokens of a block's segments. `queries_RQ`: their places in the sequence; rows are
    filled up with the block's first token. `seen_RQL`: the tokens of its segment that each one
    sees. `kept_P`: the places of rows that are needed tokens, flat.
    """

    queries_RQ: Tensor
    seen_RQL: Tensor
    kept_P: Tensor

    def attend(
        self, query: Tensor, key_RKLD: Tensor, value_RKLD: Tensor, scaling: float | None
    ) -> Tensor:
        """The attention of the needed tokens, (P, H, D), to their segments; `query`: (1, H, S, D),
        of all tokens.
        """
        heads, size = query.shape[1], query.shape[3]
        query_NHD = query[0].transpose(0, 1).index_select(0, self.queries_RQ.flatten())
        out_RHQD = scaled_dot_product_attention(
            query_NHD.reshape(*self.queries_RQ.shape, heads, size).transpose(1, 2),
            key_RKLD,
            value_RKLD,
            attn_mask=self.seen_RQL[:, None],
            scale=scaling,
            enable_gqa=heads != key_RKLD.shape[1],
        )
        return out_RHQD.transpose(1, 2).flatten(0, 1).index_select(0, self.kept_P)


@dataclass(frozen=True, slots=True)
class Needed:
    """The tokens of a sequence whose results are used, `places_P`, in its order; and those of each
    of its blocks that has some, by the block's number.
    """

    places_P: Tensor
    blocks: tuple[tuple[int, NeededOfBlock], ...]

    @staticmethod
    def of(
        places_P: IntArray,
        lengths: Sequence[int],
        blocks: Sequence["Block"],
        device: torch.device,
        shared: SharedPrefixes | None = None,
    ) -> "Needed | None":
        """The needed tokens of segments of these lengths; None if too many to be worth it."""
        # A token that segments share is computed in the first of them.
        places_P = np.asarray(places_P)
        of_segments_P = places_P if shared is None else shared.computed_S[places_P]
        ends_M = np.cumsum(lengths)
        found: list[tuple[int, NeededOfBlock]] = []
        for number, block in enumerate(blocks):
            inside_P = (of_segments_P >= block.first) & (of_segments_P < block.stop)
            if not inside_P.any():
                continue
            ends_R = ends_M[(ends_M > block.first) & (ends_M <= block.stop)]
            one = _needed_of_block(
                of_segments_P[inside_P], places_P[inside_P], block.first, ends_R, device
            )
            if one is None:
                return None
            found.append((number, one))
        return Needed(torch.from_numpy(places_P.astype(np.int64)).to(device), tuple(found))

    def spread(self, out_PHD: Tensor, tokens: int) -> Tensor:
        """(P, H, D) to (S, H, D), with 0 for the tokens that are not needed."""
        return out_PHD.new_zeros(tokens, *out_PHD.shape[1:]).index_copy(0, self.places_P, out_PHD)


def _needed_of_block(
    tokens_P: IntArray, places_P: IntArray, first: int, ends_R: IntArray, device: torch.device
) -> NeededOfBlock | None:
    """`tokens_P`: places among the tokens of all segments; `places_P`: the same in the sequence; of
    one block.
    """
    starts_R = np.concatenate([[first], ends_R[:-1]])
    longest = int((ends_R - starts_R).max())
    rows_P = np.searchsorted(ends_R, tokens_P, side="right")
    counts_R = np.bincount(rows_P, minlength=len(ends_R))
    most = int(counts_R.max())
    if most > min(MAX_NEEDED_PER_SEGMENT, MAX_NEEDED_SHARE * longest):
        return None
    columns_P = np.arange(len(tokens_P)) - (np.cumsum(counts_R) - counts_R)[rows_P]
    queries_RQ = np.full((len(ends_R), most), places_P[0], np.int64)
    queries_RQ[rows_P, columns_P] = places_P
    # What fills up a row sees one token, so that it is finite.
    positions_RQ = np.zeros((len(ends_R), most), np.int64)
    positions_RQ[rows_P, columns_P] = tokens_P - starts_R[rows_P]
    seen_RQL = positions_RQ[..., None] >= np.arange(longest)
    kept_P = rows_P * most + columns_P
    return NeededOfBlock(
        *(torch.from_numpy(array).to(device) for array in (queries_RQ, seen_RQL, kept_P))
    )
