"""Published weights for a machine that cannot read their folder: their files are sent through Ray's
object store.

    controller: files ──▶ object store ─ ─ network ─ ─▶ object store ──▶ files: actor

A file is put into the store once, however many actors need it, and Ray copies it to each machine
once. There it is written to a file again, so engines map files and check every byte, as they do
everywhere else.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from agentrl.errors import WeightsError
from agentrl.weights.bundle import BundlePlace, Manifest, WeightBundle
from agentrl.weights.shipment import Shipment, shipment_of
from agentrl.weights.store import WeightStore, default_parent

if TYPE_CHECKING:
    from torch import Tensor

CallActor = Callable[..., Awaitable[Any]]
"""Calls a method of an engine's actor, given its name and arguments."""

_put: "WeakKeyDictionary[WeightBundle, dict[str, Any]]" = WeakKeyDictionary()
"""References to the files in the object store, by bundle and name; released with the bundle. The
handles of all engines share them, so that a file is put into the store once."""


def reference_to(bundle: WeightBundle, file: str) -> Any:
    """A reference to the content of one of a bundle's files in the object store.

    Raises:
        OSError: the file cannot be read here.
    """
    import numpy as np
    import ray

    references = _put.setdefault(bundle, {})
    if file not in references:
        # Arrays are read without a copy.
        references[file] = ray.put(np.fromfile(bundle.folder / file, np.uint8))
    return references[file]


async def forward(shipment: Shipment, call: CallActor) -> None:
    """Send the files of a shipment to an engine's machine, if it cannot read them.

    `call` reaches the engine's actor, which passes on the calls to its `RayReceiver`.

    Raises:
        WeightsError: they cannot be sent.
    """
    # Only files are out of reach of another machine; Ray itself sends what is pickled.
    if not isinstance(shipment, WeightBundle) or not await call("misses", shipment):
        return
    try:
        for bucket in shipment.manifest.buckets:
            content = await asyncio.to_thread(reference_to, shipment, bucket.file)
            await call("take", shipment.manifest, bucket.file, content)
        await call("taken", shipment.manifest)
    except OSError as error:
        raise WeightsError(
            f"{shipment} could not be sent to the machine of an engine: {error}"
        ) from error


class RayReceiver:
    """The bundles that were sent to this machine for one engine. Close it at the end."""

    def __init__(self, parent: Path | None = None) -> None:
        self._parent = parent
        self._store: WeightStore | None = None
        self._places: dict[str, BundlePlace] = {}
        self._here: dict[str, WeightBundle] = {}

    def missing(self, bundle: WeightBundle) -> bool:
        """True if a bundle must be sent here."""
        return bundle.manifest.checksum not in self._here and not bundle.folder.is_dir()

    def local(self, weights: Mapping[str, "Tensor"]) -> Shipment:
        """The copy on this machine, or the shipment itself if it was not sent here."""
        shipment = shipment_of(weights)
        if isinstance(shipment, WeightBundle):
            return self._here.get(shipment.manifest.checksum, shipment)
        return shipment

    async def take(self, manifest: Manifest, file: str, content: Any) -> None:
        """Write a file of a bundle.

        Raises:
            OSError: the file cannot be written.
        """
        if self._store is None:
            self._store = WeightStore.open(self._parent or default_parent())
        place = self._places.setdefault(manifest.checksum, self._store.place(manifest.version))
        await asyncio.to_thread(place.put, file, memoryview(content))

    async def finish(self, manifest: Manifest) -> None:
        """Complete a bundle, all of whose files have arrived."""
        self._here[manifest.checksum] = self._places.pop(manifest.checksum).finish(manifest)

    async def keep_only(self, shipment: Shipment | None) -> None:
        """Remove all other bundles."""
        self._here = {key: here for key, here in self._here.items() if here == shipment}
        if self._store is not None:
            await self._store.keep_only(self._here.values())

    def close(self) -> None:
        """Remove all bundles."""
        if self._store is not None:
            self._store.close()
