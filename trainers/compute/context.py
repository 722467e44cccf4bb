"""Context parallelism: the tokens of a packed sequence, cut over the ranks of a group.

Each rank computes a slice of the tokens through all layers, which look at one token at a time,
except for attention. Around attention an exchange swaps what is cut: before it, each rank has all
heads of its tokens, and in it all tokens of its heads (DeepSpeed-Ulysses, arXiv:2309.14509). So
attention knows of nothing: segments, windows, sinks and shared prefixes are those of the whole
sequence.

Dimension suffixes: S tokens of the sequence, C of a rank's slice; H heads, E of these on a rank; D
head size; R ranks; N loss tokens of the sequence, O those that a rank predicts.
"""

from dataclasses import dataclass
from math import lcm
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from agentrl.errors import ConfigError
from agentrl.tokens.arrays import IntArray, ints


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """The ranks that compute the same sequences, each a slice of their tokens. `rank`: this one's
    number among them.
    """

    group: dist.ProcessGroup
    rank: int
    ranks: int


@dataclass(frozen=True, slots=True)
class ContextSlice:
    """This rank's slice of a sequence of so many `tokens`. The slices of all ranks are equally
    long, so the last ones may reach beyond the end.

    Example: 7 tokens over 3 ranks are slices of 3, which start at 0, 3 and 6; the last one has one
    token and two places of padding.
    """

    group: ContextGroup
    tokens: int

    @property
    def length(self) -> int:
        """Tokens of a slice, C."""
        return -(-self.tokens // self.group.ranks)

    @property
    def start(self) -> int:
        """The place of this slice's first token in the sequence."""
        return self.group.rank * self.length

    def cut(self, values_S: Any, filler: int = 0) -> Any:
        """The slice's entries of an array; beyond the end of the sequence, `filler`."""
        present = values_S[self.start : self.start + self.length]
        widths = [(0, self.length - len(present)), *[(0, 0)] * (present.ndim - 1)]
        return np.pad(present, widths, constant_values=filler)

    def own(self, places_N: Any) -> IntArray:
        """The numbers of those places in the sequence that are in this slice."""
        return ints(np.flatnonzero(places_N // self.length == self.group.rank))

    def to_heads(self, of_tokens: Tensor) -> Tensor:
        """(1, H, C, D) of this rank's tokens to (1, E, S, D) of its heads; differentiable.

        Heads of keys are repeated until each rank has as many: those that its queries ask.
        """
        _, heads, length, size = of_tokens.shape
        ranks = self.group.ranks
        # Fewer heads of keys than ranks, or not a multiple: repeat them up to the next one.
        times = lcm(heads, ranks) // heads
        repeated = of_tokens if times == 1 else of_tokens.repeat_interleave(times, dim=1)
        by_rank = repeated[0].transpose(0, 1).reshape(length, ranks, -1, size).transpose(0, 1)
        return _exchange(by_rank, self.group).flatten(0, 1)[: self.tokens].transpose(0, 1)[None]

    def to_tokens(self, of_heads: Tensor) -> Tensor:
        """(1, S, E, D) of this rank's heads to (1, C, H, D) of its tokens; differentiable."""
        ranks, own = self.group.ranks, of_heads.shape[2:]
        filled = pad(of_heads[0], (0, 0, 0, 0, 0, self.length * ranks - self.tokens))
        by_rank = filled.view(ranks, self.length, *own)
        return _exchange(by_rank, self.group).transpose(0, 1).flatten(1, 2)[None]

    def own_heads(self, of_heads: Tensor) -> Tensor:
        """This rank's part of a vector with an entry for each head of queries."""
        return of_heads.chunk(self.group.ranks)[self.group.rank]


def check_heads(heads: int, ranks: int, model: str) -> None:
    """Refuse a model whose heads of queries cannot be divided over the ranks of a context group.

    Raises:
        ConfigError: they cannot.
    """
    if heads % ranks:
        ways = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ConfigError(
            f"trainer.context_parallel={ranks} divides the attention heads of {model} over as many"
            f" ranks, and there are {heads}: write one of {ways}"
        )


@dataclass(frozen=True, slots=True)
class OwnTokens:
    """The loss tokens of a sequence that this rank of a group predicts, by their numbers among all
    `count` loss tokens.
    """

    group: ContextGroup
    numbers_O: Tensor
    count: int

    def gathered(self, values: Tensor) -> Tensor:
        """The values of all loss tokens, (..., N), from those that each rank has, (..., O).

        They are the same on each rank, and so is a loss of them. Its gradient goes to the rank's
        own values only: those of all ranks together are the whole gradient.
        """
        empty = values.new_zeros(*values.shape[:-1], self.count)
        own = empty.index_copy(-1, self.numbers_O, values)
        total: Tensor = _Sum.apply(own, self.group)  # type: ignore[no-untyped-call]
        return total


def _exchange(by_rank: Tensor, group: ContextGroup) -> Tensor:
    found: Tensor = _Exchange.apply(by_rank, group)  # type: ignore[no-untyped-call]
    return found


class _Exchange(torch.autograd.Function):
    """All-to-all: entry r of the first dimension goes to rank r, and is what came from it there."""

    @staticmethod
    def forward(ctx: Any, by_rank: Tensor, group: ContextGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(by_rank, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, by_rank.contiguous(), group=group.group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradients[0], ctx.group), None


class _Sum(torch.autograd.Function):
    """The sum over the ranks, of which each has its own share of the gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: ContextGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group.group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
