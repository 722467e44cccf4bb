"""Places for weights on the machines of a cluster.

A trainer whose ranks are all on other machines cannot write into this machine's memory. Then the
weights are written on the machine of its first rank, and stay there until no engine needs them.
"""

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Protocol

from agentrl.weights.bundle import BundlePlace, Manifest, WeightBundle
from agentrl.weights.shipment import Shipment


class Machines(Protocol):
    """The machines of a cluster that spans several."""

    @staticmethod
    def own_name() -> str:
        """The name of the machine where it is called, which may be by a rank."""
        ...

    async def place(self, machine: str, version: int, bucket_bytes: int) -> BundlePlace:
        """A new place to write a version to, on a machine.

        Raises:
            WeightsError: nothing can be written there.
        """
        ...

    async def finish(self, place: BundlePlace, manifest: Manifest) -> WeightBundle:
        """Make a bundle of the files that were written to a `place`.

        Raises:
            WeightsError: they are gone.
        """
        ...

    async def keep_sent(self, kept: Iterable[Shipment]) -> None:
        """Remove all other bundles that were written to a `place`."""
        ...

    async def discard(self, folder: Path) -> None:
        """Remove what was written to the `place` with this folder, if that is still there."""
        ...

    def bring_here(self, bundle: WeightBundle) -> AbstractAsyncContextManager[WeightBundle]:
        """A copy of a bundle on this machine, as long as the block lasts.

        Raises:
            WeightsError: it cannot be brought.
        """
        ...


_open: list[Machines] = []
"""Those of the open cluster. One list for the process, as there is one Ray in it."""


@contextmanager
def serving(machines: Machines) -> Iterator[None]:
    """Inside the block, weights may be written on these machines."""
    _open.append(machines)
    try:
        yield
    finally:
        _open.remove(machines)


def machines_of_cluster() -> Machines | None:
    """The machines of the open cluster; None if it has only this one."""
    return _open[-1] if _open else None


@asynccontextmanager
async def readable_here(shipment: Shipment) -> AsyncIterator[Shipment]:
    """The shipment, as long as the block lasts in a form that this process can read: if its files
    are on another machine, a copy of them.

    Raises:
        WeightsError: it cannot be brought.
    """
    machines = machines_of_cluster()
    if machines is None or not isinstance(shipment, WeightBundle) or shipment.folder.is_dir():
        yield shipment
        return
    async with machines.bring_here(shipment) as copy:
        yield copy


__all__ = ["Machines", "machines_of_cluster", "readable_here", "serving"]
