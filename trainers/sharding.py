"""How a trainer's weights are divided over its ranks: the interface behind `local`, `fsdp` and `deepspeed`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from agentrl.trainers.forward import DeviceMicroBatch


class Sharding(Protocol):
    """How weights, gradients and optimizer are divided over the ranks. All ranks get the same calls in one order."""

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        ...

    def predict(self, samples: DeviceMicroBatch, *, entropy: bool = False) -> Tensor:
        """The model's outputs for the loss tokens (see `Predictor`), shape N or 2N; differentiable if gradients are."""
        ...

    def clear(self) -> None:
        """Drop all gradients."""
        ...

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add this rank's gradients of `loss`; after the `last` micro-batch, those of all ranks are summed."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, the same on each."""
        ...

    def max(self, value: Tensor) -> Tensor:
        """The largest value of all ranks, the same on each."""
        ...

    def update(self, lr: float, largest: float | None) -> float:
        """One step of the optimizer, with gradients scaled down to the norm `largest` if they exceed it.

        Returns the norm of the whole gradient before scaling, the same on each rank. If it is not finite, no weight
        changes, and the gradients are dropped.
        """
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """All weights, whole, by Hugging Face names, on rank 0; tied weights only under their first name."""
        ...

    def save(self, folder: Path, step: int) -> None:
        """Write weights, optimizer and `step` into a folder."""
        ...

    def load(self, folder: Path) -> int:
        """Load what `save` wrote; returns the step."""
        ...

    def sleep(self) -> None:
        """Move everything to CPU memory, and drop gradients. `weights` still works."""
        ...

    def wake(self) -> None:
        """Move everything back."""
        ...

    def close(self) -> None:
        """Leave the other ranks."""
        ...
