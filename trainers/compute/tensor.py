"""Tensor parallelism: the matrices of layers, divided over the ranks of a group that compute the
same samples.

A pair of matrices is cut so that one sum over the ranks follows the second one: the first by its
rows, whose outputs are a rank's attention heads or hidden units, the second by its columns, which
take these (Megatron-LM, arXiv:1909.08053, section 3). Embedding and output head are cut by the ids
of the vocabulary.

The ranks together compute one loss, and each of them has copies of all that is not divided. So the
gradient of a copy is a share, and the whole gradient the sum of those of all copies. Hence a sum is
summed again in the backward pass, nothing is done where a matrix takes a copy, and gradients of
undivided parameters, such as norms, are summed over the ranks. Megatron-LM sums where matrices take
copies instead, as many numbers, and its copies have whole gradients, except those of norms of
heads.

The experts of a mixture are not cut. Each rank computes a slice of the tokens with them, and gets
the results of the other slices.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """The ranks over which matrices are divided. `rank`: this one's number among them."""

    group: dist.ProcessGroup
    rank: int
    ranks: int

    def summed(self, values: Tensor) -> Tensor:
        """The sum over the ranks; differentiable."""
        found: Tensor = _Sum.apply(values, self)  # type: ignore[no-untyped-call]
        return found

    def alike(self, values: Tensor) -> Tensor:
        """Values that each rank computes from copies alone. Each gets its share of the gradient."""
        found: Tensor = _Alike.apply(values, self)  # type: ignore[no-untyped-call]
        return found

    def slice_of(self, values: Tensor) -> Tensor:
        """This rank's rows of copies, as many as any rank's: filled up with zeros at the end."""
        count = -(-len(values) // self.ranks)
        missing = count * self.ranks - len(values)
        whole = torch.cat([values, values.new_zeros(missing, *values.shape[1:])])
        return whole[self.rank * count : (self.rank + 1) * count]

    def joined(self, slices: Tensor, rows: int) -> Tensor:
        """So many rows, from the slices of the ranks; differentiable."""
        found: Tensor = _Joined.apply(slices, self)  # type: ignore[no-untyped-call]
        return found[:rows]

    def all_of(self, values: Tensor) -> Tensor:
        """The values of each rank, stacked, on each of them."""
        found = values.new_empty(self.ranks, *values.shape)
        dist.all_gather_into_tensor(found.flatten(0, 1), values.contiguous(), group=self.group)
        return found


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """The ids of a vocabulary that are this rank's: so many `ids` from `start` on."""

    group: TensorGroup
    ids: int

    @property
    def start(self) -> int:
        """The first of them."""
        return self.group.rank * self.ids

    def own(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers of ids among this rank's, and which of them it has; the others are 0."""
        numbers = ids - self.start
        is_own = (numbers >= 0) & (numbers < self.ids)
        return numbers.where(is_own, 0), is_own


@dataclass(frozen=True, slots=True)
class DividedColumns:
    """The forward pass of a linear layer of whose weight this rank has some columns. The bias is
    whole. `compute`: what the rank's columns make of their inputs, without the bias; with those of
    an adapter, if the layer has one.
    """

    compute: Callable[[Tensor], Tensor]
    layer: Any
    group: TensorGroup

    def __call__(self, inputs: Tensor) -> Tensor:
        """All ranks of the group have to call it at the same time."""
        outputs = self.group.summed(self.compute(inputs))
        bias = self.layer.bias
        return outputs if bias is None else outputs + bias.to(outputs.dtype)


@dataclass(frozen=True, slots=True)
class SplitInputs:
    """What this rank's columns make of inputs that each rank has whole."""

    compute: Callable[[Tensor], Tensor]
    group: TensorGroup

    def __call__(self, inputs: Tensor) -> Tensor:
        """Its part of the sum."""
        return self.compute(inputs.chunk(self.group.ranks, dim=-1)[self.group.rank])


@dataclass(frozen=True, slots=True)
class GatheredOutputs:
    """The forward pass of a layer of whose weight this rank has some rows, with the outputs of
    all.
    """

    compute: Callable[[Tensor], Tensor]
    group: TensorGroup

    def __call__(self, inputs: Tensor) -> Tensor:
        """All ranks of the group have to call it at the same time."""
        parts = self.group.joined(self.compute(inputs)[None], self.group.ranks)
        return parts.movedim(0, -2).flatten(-2)


@dataclass(frozen=True, slots=True)
class WithoutBias:
    """The forward pass of a linear layer without its bias."""

    layer: Any

    def __call__(self, inputs: Tensor) -> Tensor:
        """The products."""
        return linear(inputs, self.layer.weight)


@dataclass(frozen=True, slots=True)
class DividedEmbedding:
    """An embedding of which this rank has the rows of its ids. `compute` knows these."""

    compute: Callable[[Tensor], Tensor]
    part: VocabularyPart

    def __call__(self, ids: Tensor) -> Tensor:
        """All ranks of the group have to call it at the same time."""
        numbers, is_own = self.part.own(ids)
        return self.part.group.summed(self.compute(numbers) * is_own[..., None])


@dataclass(frozen=True, slots=True)
class ExpertsOfSlices:
    """The experts of a layer, of which each rank computes a slice of the tokens, by `compute`."""

    compute: Callable[[Tensor, Tensor, Tensor], Tensor]
    group: TensorGroup

    def __call__(self, hidden_SH: Tensor, chosen_SK: Tensor, weights_SK: Tensor) -> Tensor:
        """All ranks of the group have to call it at the same time. A token that fills up a slice
        weighs nothing.
        """
        own = [self.group.slice_of(one) for one in (hidden_SH, chosen_SK, weights_SK)]
        return self.group.joined(self.compute(*own), len(hidden_SH))


class _Sum(torch.autograd.Function):
    """The sum over the ranks, and that of the gradients of its copies."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return _total(values, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _total(gradients[0], ctx.group), None


class _Joined(torch.autograd.Function):
    """The rows of all ranks, on each; the sum of the gradients of the copies of its own."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return group.all_of(rows).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        group, whole = ctx.group, gradients[0].contiguous()
        own = whole.new_empty(len(whole) // group.ranks, *whole.shape[1:])
        dist.reduce_scatter_tensor(own, whole, group=group.group)
        return own, None


class _Alike(torch.autograd.Function):
    """The same values, with a share of the gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: TensorGroup) -> Tensor:
        ctx.ranks = group.ranks
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] / ctx.ranks, None


def _total(values: Tensor, group: TensorGroup) -> Tensor:
    total = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group.group)
    return total
