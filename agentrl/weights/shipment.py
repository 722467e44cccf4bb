"""`Shipment`: the weights of one version on their way from the trainer to an engine."""

import socket
import uuid
from abc import abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.errors import WeightsError
from agentrl.models.weight_names import MadeOnAccess

if TYPE_CHECKING:
    from torch import Tensor

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Reader:
    """A process, or a part of one, that loads weights."""

    name: str
    """A name that no other reader has."""
    device: str
    """Where it loads them, as torch names the device in its process: "cpu" or "cuda:0"."""
    place: str
    """The same for all processes on this device (`place_of`)."""

    @staticmethod
    def on(device: str) -> "Reader":
        """A new reader in this process."""
        return Reader(uuid.uuid4().hex, device, place_of(device))


def place_of(device: str) -> str:
    """A name of a device that is the same in all processes that can open each other's memory there:
    that of a GPU, or for CPUs that of the machine's shared memory.
    """
    if device.startswith("cuda"):
        import torch

        return str(torch.cuda.get_device_properties(torch.device(device)).uuid)
    if not SHARED_MEMORY.is_dir():
        return socket.gethostname()
    # Containers of a machine may have shared memory of their own.
    return f"{socket.gethostname()}/{SHARED_MEMORY.stat().st_dev}"


class Shipment(Mapping[str, "Tensor"]):
    """The tensors of one version, by Hugging Face names, as a transport delivers them.

    Equal shipments have the same content, so an engine that has staged one need not check it again.
    One that other processes can read pickles as a reference to its content. Where it is read, the
    calls come in this order: `check` and `enroll` when it is staged, `join` when it is to be
    loaded, and `arrivals` when the engine has paused.
    """

    folder: Path | None = None
    """The folder of its files (`WeightBundle`); None if only this process can read it."""
    checksum: str = ""
    """The checksum of its content, which whoever reads the files compares; "" without files."""
    is_remote: bool = False
    """True if it pickles, and engines in other processes read it themselves."""

    is_live: bool = False
    """True if it is being sent while an engine reads it: `arrivals` is the only way to it, and the
    other engines, and the sender, wait meanwhile."""

    @property
    def size(self) -> int:
        """Bytes that were moved to send it; 0 if the engine reads the trainer's own tensors."""
        return 0

    @property
    def unpacked(self) -> Mapping[str, "Tensor"]:
        """The weights in the form in which they are written to files."""
        return self

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all weights, without reading the weights.

        Raises:
            WeightsError: they cannot be known here.
        """

    @abstractmethod
    def check(self) -> None:
        """Check what can be checked before an engine pauses. Blocks; once a machine is enough.

        Raises:
            WeightsError: something is missing or damaged.
        """

    def enroll(self, reader: Reader) -> None:
        """Announce a reader that will ask for `arrivals`. Blocks for a moment. By default, there is
        nobody to tell.

        Raises:
            WeightsError: the sender cannot be reached.
        """
        return

    def join(self, reader: Reader) -> None:
        """Connect a reader that has enrolled, and will now ask for `arrivals`. Blocks until all
        that have enrolled are there. By default, there is nobody to wait for.

        Raises:
            WeightsError: there is no connection, and nothing was changed.
        """
        return

    def leave(self, reader: Reader) -> None:
        """Part with the sender: a reader that has enrolled will not ask for `arrivals`, or not for
        the rest of them. By default, nobody waits for it.
        """
        return

    def arrivals(self, reader: Reader) -> Generator[tuple[str, "Tensor"]]:
        """All weights, each once, in the order in which they arrive; blocks until they do. A tensor
        stays as it is for as long as it is held. Who needs no more of them closes the generator,
        which parts with the sender.

        Raises:
            WeightsError: something is missing or damaged.
        """
        for name in self:
            yield name, self[name]

    async def at_rest(self) -> "Shipment":
        """The same weights in a form that can be read at any time, by engines that start later and
        by others: by default, this one. Waits until there is one.

        Raises:
            WeightsError: there will be none.
        """
        return self


class DirectShipment(Shipment):
    """Tensors of this process, for an engine in the same process."""

    def __init__(self, weights: Mapping[str, "Tensor"]) -> None:
        self._weights = weights
        sources: Iterable[Tensor] = weights.values() if isinstance(weights, dict) else ()
        if isinstance(weights, MadeOnAccess):
            sources = weights.sources
        # torch counts the changes of each tensor.
        self._changes = [(tensor, tensor._version) for tensor in sources]

    @property
    def unpacked(self) -> Mapping[str, "Tensor"]:
        """The trainer's own mapping, which may be an update of low rank."""
        return self._weights

    def check(self) -> None:
        """Nothing is on its way."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all weights."""
        return {name: tuple(weight.shape) for name, weight in self._weights.items()}

    async def at_rest(self) -> Shipment:
        """These weights, as long as the trainer has not changed them.

        Raises:
            WeightsError: it has.
        """
        if any(weight._version != changes for weight, changes in self._changes):
            raise WeightsError(
                "the trainer has changed its weights since it sent them (weights.transport=direct):"
                " an engine that starts now cannot have these. Write weights.transport=auto"
            )
        return self

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
