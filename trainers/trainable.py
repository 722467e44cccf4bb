"""The trainable part of a model, by name, and how it becomes weights for the engines and checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from agentrl.trainers.checkpoint import named_weights, read_checkpoint, save_model
from agentrl.weights.names import WeightNames


class TrainableParameters(Protocol):
    """The trainable part of a model. Made before its tensors are sharded over the ranks."""

    @property
    def model(self) -> Any:
        """The Hugging Face model."""
        ...

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Shapes of the whole tensors by their names in the model's state; tied ones only under their first name."""
        ...

    def weights(self, whole: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """All weights of the model by their Hugging Face names, given the `whole` trainable tensors."""
        ...

    def save(self, folder: Path, whole: Mapping[str, Tensor]) -> None:
        """Write a Hugging Face folder from which any engine or trainer can start, and what `read` needs."""
        ...

    def read(self, folder: Path) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
        """The whole tensors that `save` wrote, on the CPU, and the state saved beside them.

        Raises:
            CheckpointError: the folder is missing, incomplete, damaged or of another model.
        """
        ...


def trainable_tensors(trainable: TrainableParameters) -> dict[str, Tensor]:
    """The trainable tensors as this rank has them now: whole, or its part of each."""
    model = trainable.model
    everything = {**dict(model.named_buffers()), **dict(model.named_parameters(remove_duplicate=False))}
    return {name: everything[name] for name in trainable.shapes}


@dataclass(frozen=True, slots=True)
class AllWeights:
    """`TrainableParameters`: the whole model."""

    model: Any
    origin: Path
    shapes: Mapping[str, torch.Size]
    names: WeightNames

    @staticmethod
    def of(model: Any, origin: Path) -> "AllWeights":
        """All weights of a model that was loaded from the folder `origin`."""
        shapes = {name: weight.shape for name, weight in named_weights(model).items()}
        return AllWeights(model, origin, shapes, WeightNames.of(model))

    def weights(self, whole: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `TrainableParameters`."""
        return self.names.published(whole)

    def save(self, folder: Path, whole: Mapping[str, Tensor]) -> None:
        """See `TrainableParameters`."""
        save_model(folder, self.model, self.origin, whole)

    def read(self, folder: Path) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
        """See `TrainableParameters`."""
        saved, state = read_checkpoint(folder, self.names.published_shapes(self.shapes))
        return dict(self.names.own(saved)), state
