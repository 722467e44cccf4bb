"""`Shipment`: the weights of one version on their way from the trainer to an engine."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Shipment(Mapping[str, "Tensor"]):
    """The tensors of one version, by Hugging Face names, as a transport delivers them.

    Equal shipments have the same content, so an engine that has staged one need not check it again.
    One that other processes can read pickles as a reference to its content.
    """

    folder: Path | None = None
    """The folder of its files (`WeightBundle`); None if only this process can read it."""
    checksum: str = ""
    """The checksum of its content, which whoever reads the files compares; "" without files."""

    @property
    def size(self) -> int:
        """Bytes that were moved to send it; 0 if the engine reads the trainer's own tensors."""
        return 0

    @property
    def unpacked(self) -> Mapping[str, "Tensor"]:
        """The weights in the form in which they are written to files."""
        return self

    @abstractmethod
    async def receive(self) -> None:
        """Wait until everything has arrived, and check it.

        Raises:
            WeightsError: something is missing or damaged.
        """

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all weights, without reading the weights.

        Raises:
            WeightsError: they cannot be known here.
        """


class DirectShipment(Shipment):
    """The trainer's own tensors, for an engine in the same process. Nothing is copied."""

    def __init__(self, weights: Mapping[str, "Tensor"]) -> None:
        self._weights = weights

    @property
    def unpacked(self) -> Mapping[str, "Tensor"]:
        """The trainer's own mapping, which may be an update of low rank."""
        return self._weights

    async def receive(self) -> None:
        """Nothing is on its way."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all weights."""
        return {name: tuple(weight.shape) for name, weight in self._weights.items()}

    def __getitem__(self, name: str) -> "Tensor":
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    # Its content may change between two calls, so it equals itself only.
    __eq__ = object.__eq__
    __hash__ = object.__hash__


def shipment_of(weights: Mapping[str, "Tensor"]) -> Shipment:
    """The weights as a shipment: unchanged if they are one, else as they are in this process."""
    return weights if isinstance(weights, Shipment) else DirectShipment(weights)
