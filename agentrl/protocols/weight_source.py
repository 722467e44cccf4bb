"""A trainer's weights as each of its ranks sends them: piece by piece, never all at once."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WeightUnit:
    """Published weights that are made of the same tensors of the model, and so are sent together: a
    single one, or those of a layer whose tensors have other names in a folder (`WeightNames`).
    """

    own: tuple[str, ...]
    """The names of the model's own tensors."""
    shapes: Mapping[str, tuple[int, ...]]
    """The shapes of the published weights, by their Hugging Face names."""

    @property
    def numel(self) -> int:
        """The number of elements of all its weights."""
        return sum(math.prod(shape) for shape in self.shapes.values())


@dataclass(frozen=True, slots=True)
class LowRankBase:
    """What the sent factors are an update of: the weights in the folder `base`. The weight W of
    `scales` becomes W + scale * B @ A, whose factors are sent as W/A and W/B.
    """

    base: Path
    scales: Mapping[str, float]


class WeightSource(Protocol):
    """The current weights as one rank of a trainer sees them. All ranks get the same calls in one
    order.
    """

    @property
    def rank(self) -> int:
        """This rank's number."""
        ...

    @property
    def units(self) -> Sequence[WeightUnit]:
        """What there is to send, the same on all ranks, in the order of the model."""
        ...

    @property
    def update(self) -> LowRankBase | None:
        """What the weights are an update of, if only factors are sent; else None."""
        ...

    @property
    def device(self) -> "torch.device":
        """Where `gather` makes its tensors."""
        ...

    def gather(
        self, unit: WeightUnit, to: Collection[int], dtype: "torch.dtype | None"
    ) -> "Mapping[str, Tensor]":
        """The whole weights of a unit on the ranks `to`, in the number format `dtype` (None: their
        own); nothing on the others. Factors of low rank stay in float32.
        """
        ...

    def ranks_that(self, can: bool) -> Sequence[int]:
        """The ranks that can, the same on each."""
        ...


SendWeights = Callable[[WeightSource], T]
"""Sends weights in the process of a rank, where it is called with the rank's view of them. It
pickles.
"""


class WholeWeights(WeightSource):
    """The weights of a trainer that has them whole, in this process."""

    rank = 0
    update = None

    def __init__(self, weights: "Mapping[str, Tensor]") -> None:
        self._weights = weights

    @cached_property
    def units(self) -> Sequence[WeightUnit]:
        """See `WeightSource`."""
        return [
            WeightUnit((name,), {name: tuple(weight.shape)})
            for name, weight in self._weights.items()
        ]

    @property
    def device(self) -> "torch.device":
        """See `WeightSource`."""
        return next(iter(self._weights.values())).device

    def gather(
        self, unit: WeightUnit, to: Collection[int], dtype: "torch.dtype | None"
    ) -> "Mapping[str, Tensor]":
        """See `WeightSource`."""
        return {name: in_format(self._weights[name].detach(), dtype) for name in unit.shapes}

    def ranks_that(self, can: bool) -> Sequence[int]:
        """See `WeightSource`."""
        return [0] if can else []


def in_format(weight: "Tensor", dtype: "torch.dtype | None") -> "Tensor":
    """A weight in another number format. Integers stay as they are."""
    return weight if dtype is None or not weight.is_floating_point() else weight.to(dtype)


__all__ = ["LowRankBase", "SendWeights", "WeightSource", "WeightUnit", "WholeWeights", "in_format"]
