"""The trainable part of a model, by name, and how it becomes weights for the engines and
checkpoints.
"""

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from agentrl.models.weight_names import WeightNames
from agentrl.protocols.weight_source import LowRankBase, WeightUnit
from agentrl.trainers.rank.checkpoint import quiet
from agentrl.trainers.rank.tensor_files import Stored

if TYPE_CHECKING:
    from agentrl.trainers.rank.sharding import Sharding

_MODEL_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.pt",
    "config.json",
)


class TrainableParameters(Protocol):
    """The trainable part of a model. Made before its tensors are sharded over the ranks."""

    @property
    def model(self) -> Any:
        """The Hugging Face model."""
        ...

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Shapes of the whole tensors by their names in the model's state; tied ones only under
        their first name.
        """
        ...

    @property
    def stored(self) -> Sequence[Stored]:
        """The tensors of a checkpoint from which a run resumes, in files `stem` of its folder
        `weights_in`.
        """
        ...

    @property
    def weights_in(self) -> str:
        """See `stored`."""
        ...

    @property
    def stem(self) -> str:
        """See `stored`."""
        ...

    def weights(self, whole: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """All weights of the model by their Hugging Face names, given the `whole` trainable
        tensors.
        """
        ...

    @property
    def update(self) -> LowRankBase | None:
        """See `WeightSource`."""
        ...

    @property
    def units(self) -> Sequence[WeightUnit]:
        """See `WeightSource`."""
        ...

    def published(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The weights of a unit, given the whole tensors that it is made of."""
        ...

    def rest(self, sharding: "Sharding") -> Callable[[Path], None]:
        """What else this rank writes into a checkpoint, so that any engine or trainer can start
        from it.

        All ranks have to call it at the same time. What it returns writes the state as it was then.
        """
        ...


def trainable_tensors(trainable: TrainableParameters) -> dict[str, Tensor]:
    """The trainable tensors as this rank has them now: whole, or its part of each."""
    return {
        name: tensor
        for name, tensor in model_tensors(trainable.model).items()
        if name in trainable.shapes
    }


def model_tensors(model: Any) -> dict[str, Tensor]:
    """All parameters and buffers of a model by name, as this rank has them now, tied ones under
    each name.
    """
    return {**dict(model.named_buffers()), **dict(model.named_parameters(remove_duplicate=False))}


@dataclass(frozen=True, slots=True)
class AllWeights:
    """`TrainableParameters`: the whole model. Those that are `frozen` are in checkpoints, and
    engines keep their own.
    """

    model: Any
    origin: Path
    shapes: Mapping[str, torch.Size]
    names: WeightNames
    stored: Sequence[Stored]
    frozen: Collection[str] = ()
    weights_in: str = "."
    stem: str = "model"

    def weights(self, whole: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `TrainableParameters`."""
        return self.names.published(whole)

    @property
    def update(self) -> LowRankBase | None:
        """See `WeightSource`."""
        return None

    @property
    def units(self) -> Sequence[WeightUnit]:
        """See `WeightSource`."""
        trained = {name: one for name, one in self.shapes.items() if name not in self.frozen}
        return [WeightUnit(own, shapes) for own, shapes in self.names.groups(trained)]

    def published(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `TrainableParameters`."""
        return self.names.revert(own) if self.names.conversions else own

    def rest(self, sharding: "Sharding") -> Callable[[Path], None]:
        """See `TrainableParameters`."""
        return lambda folder: (
            write_model_files(folder, self.model, self.origin) if sharding.rank == 0 else None
        )


def write_model_files(folder: Path, model: Any, origin: Path) -> None:
    """Write what a Hugging Face folder has beside the weights: the config, and the tokenizer of the
    folder `origin`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = torch.float32
    with quiet():
        config.save_pretrained(folder)
    for file in sorted(origin.iterdir()):
        if file.is_file() and not any(file.match(pattern) for pattern in _MODEL_FILES):
            shutil.copyfile(file, folder / file.name)
