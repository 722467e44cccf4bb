"""How a trainer's weights are divided over its ranks: the interface behind `local`, `fsdp` and
`deepspeed`.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from agentrl.placement.mesh import Mesh
from agentrl.trainers.compute.context import ContextGroup
from agentrl.trainers.compute.forward import DeviceMicroBatch
from agentrl.trainers.rank.checkpoint import Moments
from agentrl.trainers.rank.tensor_files import Part
from agentrl.trainers.rank.trainable import TrainableParameters


class Sharding(Protocol):
    """How weights, gradients and optimizer are divided over the ranks. All ranks get the same calls
    in one order.
    """

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        ...

    @property
    def rank(self) -> int:
        """This rank's number."""
        ...

    @property
    def mesh(self) -> Mesh:
        """The grid of all ranks."""
        ...

    @property
    def context(self) -> ContextGroup | None:
        """The ranks over which the tokens of a micro-batch are cut; None for this one alone."""
        ...

    @property
    def trainable(self) -> TrainableParameters:
        """The trainable part of the model."""
        ...

    def prepare(self) -> None:
        """Run `Predictor.prepare` with the weights in place."""
        ...

    def predict(self, samples: DeviceMicroBatch, *, entropy: bool = False) -> Tensor:
        """The model's outputs for the loss tokens (see `Predictor`), shape N or 2N; differentiable
        if gradients are.
        """
        ...

    def clear(self) -> None:
        """Drop all gradients."""
        ...

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add this rank's gradients of `loss`; after the `last` micro-batch, those of all ranks are
        summed.
        """
        ...

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, the same on each."""
        ...

    def max(self, value: Tensor) -> Tensor:
        """The largest value of all ranks, the same on each."""
        ...

    def gradient_squares(self) -> Mapping[str, Tensor]:
        """The sum of the squares of the gradients that are this rank's, by group of layers
        (`gradient_norms`).

        The sums over all ranks are those of the whole gradient. Empty where a gradient cannot be
        looked at.
        """
        ...

    def update(self, lr: float, largest: float | None) -> float:
        """One step of the optimizer, with gradients scaled down to the norm `largest` if they
        exceed it.

        Returns the norm of the whole gradient before scaling, the same on each rank. If it is not
        finite, no weight changes, and the gradients are dropped.
        """
        ...

    def gather_all(self, *, everywhere: bool = False) -> Mapping[str, Tensor]:
        """The trainable tensors, gathered one by one, in CPU memory; on rank 0 only, or
        `everywhere`.
        """
        ...

    def gather(
        self, names: Sequence[str], to: Collection[int], dtype: torch.dtype | None
    ) -> Mapping[str, Tensor]:
        """Trainable tensors, whole, on the ranks `to`, in the number format `dtype` (None: their
        own); nothing on the others. Where they are the weights themselves, they are not copied.
        """
        ...

    def broadcast(self, tensor: Tensor) -> Tensor:
        """A tensor in CPU memory, as rank 0 has it."""
        ...

    def local_parts(self, names: Iterable[str]) -> Mapping[str, Part]:
        """This rank's parts of tensors of the model. `Part.values` are the weights themselves, to
        read and to fill.
        """
        ...

    def after_load(self) -> None:
        """Let everything follow that depends on the weights, after they have been filled."""
        ...

    def moments(self) -> Moments:
        """The optimizer's moments themselves, or copies of those it keeps in codes; none before the
        first update.
        """
        ...

    def new_moments(self, names: Sequence[str]) -> Moments:
        """The same for an optimizer without an update, with moments that are zero, to fill and then
        to set.

        Raises:
            CheckpointError: it has others than these.
        """
        ...

    def set_moments(self, moments: Moments) -> None:
        """Set the moments of `new_moments`, filled, and how many updates each parameter has had:
        those without a number have had none.
        """
        ...

    def sleep(self) -> None:
        """Drop gradients, and move all else that is on a GPU to host memory (`HostBuffers`).
        `gather_all` and `local_parts` still work. Repeating it changes nothing.
        """
        ...

    def wake(self) -> None:
        """Move everything back."""
        ...

    def close(self) -> None:
        """Leave the other ranks."""
        ...
