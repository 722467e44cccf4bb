"""How the weights of a trainer lie over its ranks: the seam behind `local`, `fsdp` and `deepspeed`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from agentrl.trainers.forward import DeviceMicroBatch


class Sharding(Protocol):
    """How weights, gradients and optimizer lie over the ranks. All ranks make the same calls in the same order."""

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        ...

    def predict(self, rows: DeviceMicroBatch) -> Tensor:
        """What the model says of the loss tokens, shape N (see `Predictor`); differentiable where gradients are on."""
        ...

    def clear(self) -> None:
        """Forget all gradients."""
        ...

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add this rank's gradients of `loss`; after the `last` micro-batch, those of all ranks are summed."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, the same on each."""
        ...

    def max(self, value: Tensor) -> Tensor:
        """The largest of all ranks, the same on each."""
        ...

    def update(self, lr: float, largest: float | None) -> float:
        """One step of the optimizer, by gradients that are scaled down where their norm is above the `largest`.

        Returns the norm of the whole gradient before that, the same on each rank. Where it is not finite, no weight
        has been changed, and the gradients are forgotten.
        """
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """All weights by Hugging Face names, whole, on rank 0; of tied weights the first name only."""
        ...

    def save(self, folder: Path, step: int) -> None:
        """Write weights, optimizer and `step` into a folder."""
        ...

    def load(self, folder: Path) -> int:
        """Take up what `save` wrote; returns the step."""
        ...

    def sleep(self) -> None:
        """Move all that is held to the CPU's memory; gradients are forgotten. Weights can still be asked for."""
        ...

    def wake(self) -> None:
        """Move it back."""
        ...

    def close(self) -> None:
        """Leave the other ranks."""
        ...
