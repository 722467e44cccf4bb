"""Published weights on a machine that does not see where they lie: their files come through Ray's object store.

    controller: files ──▶ object store ─ ─ network ─ ─▶ object store ──▶ files: actor

A file is put into the store once, however many actors ask for it, and Ray copies it to each machine once. There it is
written to a file again, so engines map files and check every byte, as they do everywhere else.
"""

import asyncio
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from agentrl.weights.bundle import BundlePlace, Manifest, WeightBundle
from agentrl.weights.store import WeightStore, default_parent

_put: "WeakKeyDictionary[WeightBundle, dict[str, Any]]" = WeakKeyDictionary()
"""References to the files that are in the object store, by bundle and name; let go with the bundle."""


def reference_to(bundle: WeightBundle, file: str) -> Any:
    """The content of one of a bundle's files, in the object store.

    Raises:
        OSError: it cannot be read here.
    """
    import numpy as np
    import ray

    references = _put.setdefault(bundle, {})
    if file not in references:
        references[file] = ray.put(np.fromfile(bundle.folder / file, np.uint8))  # arrays are read where they lie
    return references[file]


class Arrivals:
    """The bundles that were brought to this machine for one engine. Close it at the end."""

    def __init__(self, parent: Path | None = None) -> None:
        self._parent = parent
        self._store: WeightStore | None = None
        self._places: dict[str, BundlePlace] = {}
        self._here: dict[str, WeightBundle] = {}

    def missing(self, bundle: WeightBundle) -> bool:
        """Whether a bundle has to be brought here."""
        return bundle.manifest.checksum not in self._here and not bundle.folder.is_dir()

    def local(self, bundle: WeightBundle) -> WeightBundle:
        """The same bundle, as it lies here."""
        return self._here.get(bundle.manifest.checksum, bundle)

    async def take(self, manifest: Manifest, file: str, content: Any) -> None:
        """Write a file of a bundle.

        Raises:
            OSError: it cannot be written.
        """
        if self._store is None:
            self._store = WeightStore.open(self._parent or default_parent())
        place = self._places.setdefault(manifest.checksum, self._store.place(manifest.version))
        await asyncio.to_thread(place.put, file, memoryview(content))

    async def finish(self, manifest: Manifest) -> None:
        """All files have come."""
        self._here[manifest.checksum] = self._places.pop(manifest.checksum).finish(manifest)

    async def keep_only(self, bundle: WeightBundle | None) -> None:
        """Let all others go."""
        self._here = {key: here for key, here in self._here.items() if here == bundle}
        if self._store is not None:
            await self._store.keep_only(self._here.values())

    def close(self) -> None:
        """Remove them all."""
        if self._store is not None:
            self._store.close()
