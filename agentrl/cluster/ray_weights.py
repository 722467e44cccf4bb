"""Published weights for a machine that cannot read their folder: their files are sent through Ray's
object store.

    controller: files ──▶ object store ─ ─ network ─ ─▶ object store ──▶ files: actor

A file is put into the store once, however many actors need it, and Ray copies it to each machine
once. There it is written to a file again, so engines map files and check every byte, as they do
everywhere else.
"""

import asyncio
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from agentrl.weights.bundle import BundlePlace, Manifest, WeightBundle
from agentrl.weights.store import WeightStore, default_parent

_put: "WeakKeyDictionary[WeightBundle, dict[str, Any]]" = WeakKeyDictionary()
"""References to the files in the object store, by bundle and name; released with the bundle."""


def reference_to(bundle: WeightBundle, file: str) -> Any:
    """A reference to the content of one of a bundle's files in the object store.

    Raises:
        OSError: the file cannot be read here.
    """
    import numpy as np
    import ray

    references = _put.setdefault(bundle, {})
    if file not in references:
        references[file] = ray.put(
            np.fromfile(bundle.folder / file, np.uint8)
        )  # arrays are read without a copy
    return references[file]


class Arrivals:
    """The bundles that were sent to this machine for one engine. Close it at the end."""

    def __init__(self, parent: Path | None = None) -> None:
        self._parent = parent
        self._store: WeightStore | None = None
        self._places: dict[str, BundlePlace] = {}
        self._here: dict[str, WeightBundle] = {}

    def missing(self, bundle: WeightBundle) -> bool:
        """Whether a bundle must be sent here."""
        return bundle.manifest.checksum not in self._here and not bundle.folder.is_dir()

    def local(self, bundle: WeightBundle) -> WeightBundle:
        """The copy of a bundle on this machine, or the bundle itself if it was not sent here."""
        return self._here.get(bundle.manifest.checksum, bundle)

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

    async def keep_only(self, bundle: WeightBundle | None) -> None:
        """Remove all other bundles."""
        self._here = {key: here for key, here in self._here.items() if here == bundle}
        if self._store is not None:
            await self._store.keep_only(self._here.values())

    def close(self) -> None:
        """Remove all bundles."""
        if self._store is not None:
            self._store.close()
