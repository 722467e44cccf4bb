"""Expert parallelism: the experts of a layer, divided over the ranks of a group, each of which
computes tokens of its own.

A token goes to the ranks that have experts of its choice, once to each, whatever the number of
these there. They compute their experts' part of its sum, weighed, and send it back; the sum of the
parts is the layer's output. So experts move through no link, and their gradients are those of all
tokens of the group. Routers are not divided: each rank chooses for its own tokens.

Dimension suffixes: S tokens of a rank, H hidden size, K experts of a token, R ranks; N tokens that
the rank sends, by rank and then in order; M those that it receives; P pairs of such a token and an
expert that is here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ComputeExperts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""transformers' experts: hidden states (S, H), the experts of each (S, K), and their weights (S, K)
to the weighted sums (S, H)."""


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """The ranks over which experts are divided. `rank`: this one's number among them."""

    group: dist.ProcessGroup
    rank: int
    ranks: int


@dataclass(frozen=True, slots=True)
class DividedExperts:
    """The experts of a layer, of which each rank of a group has `count`, in the order of the ranks.
    It stands for `compute`, which knows this rank's, by their numbers here.
    """

    compute: ComputeExperts
    count: int
    group: ExpertGroup

    def __call__(self, hidden_SH: Tensor, chosen_SK: Tensor, weights_SK: Tensor) -> Tensor:
        """All ranks of the group have to call it at the same time, also those without tokens."""
        ranks, device = self.group.ranks, hidden_SH.device
        asked_SR = torch.zeros(len(hidden_SH), ranks, dtype=torch.bool, device=device)
        asked_SR.scatter_(1, chosen_SK // self.count, value=True)
        # Transposed, so that the rows for a rank lie together, as the exchange takes them.
        ranks_N, tokens_N = asked_SR.T.nonzero(as_tuple=True)
        sent_R = asked_SR.sum(0)
        received_R = torch.empty_like(sent_R)
        # The sizes first: each rank has to know how much comes before it can make room for it.
        dist.all_to_all_single(received_R, sent_R, group=self.group.group)
        sent, received = torch.stack([sent_R, received_R]).tolist()
        # Numbers as the receiving rank counts; those outside 0 to `count` are other ranks' experts.
        here_NK = chosen_SK.index_select(0, tokens_N) - (ranks_N * self.count)[:, None]
        hidden_NH = hidden_SH.index_select(0, tokens_N)
        weights_NK = weights_SK.index_select(0, tokens_N)
        group = self.group.group
        arrived = [
            _exchange(rows_N, group, sent, received) for rows_N in (hidden_NH, here_NK, weights_NK)
        ]
        parts_MH = self._compute_own(*arrived)
        parts_NH = _exchange(parts_MH, group, received, sent)  # back to where each came from
        return _sum_rows(parts_NH, tokens_N, len(hidden_SH))

    def _compute_own(self, hidden_MH: Tensor, chosen_MK: Tensor, weights_MK: Tensor) -> Tensor:
        """The part of this rank's experts in the sums of the tokens that came."""
        places_P, choices_P = ((chosen_MK >= 0) & (chosen_MK < self.count)).nonzero(as_tuple=True)
        states_PH = hidden_MH.index_select(0, places_P)
        experts_P, weights_P = chosen_MK[places_P, choices_P], weights_MK[places_P, choices_P]
        if not len(places_P):
            # No token came here. The other ranks wait for the gradient of these experts, so the
            # experts compute a token of zeros, and their gradient is zero.
            blank = hidden_MH.new_zeros(1, hidden_MH.shape[1])
            states_PH = torch.cat([states_PH, blank])
            experts_P = torch.cat([experts_P, experts_P.new_zeros(1)])
            weights_P = torch.cat([weights_P, weights_P.new_zeros(1)])
        parts_PH = self.compute(states_PH, experts_P[:, None], weights_P[:, None])
        return _sum_rows(parts_PH[: len(places_P)], places_P, len(hidden_MH))


def _sum_rows(rows: Tensor, places: Tensor, count: int) -> Tensor:
    """The sums of the rows for each of so many places, in float32, in the rows' own type."""
    empty = torch.zeros(count, rows.shape[1], dtype=torch.float32, device=rows.device)
    return empty.index_add(0, places, rows.float()).to(rows.dtype)


def _exchange(
    rows: Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]
) -> Tensor:
    """Send so many `rows` to each rank of a group, and return those that come from each;
    differentiable.
    """
    found: Tensor = _Exchange.apply(rows, group, sent, received)  # type: ignore[no-untyped-call]
    return found


class _Exchange(torch.autograd.Function):
    """All-to-all of rows, so many to each rank and from each."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]
    ) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        found = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradients[0], ctx.group, ctx.received, ctx.sent), None, None, None
