"""Where published weights lie: a folder in shared memory or on a disk, which goes when its owner does."""

import asyncio
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.flow import run_to_completion
from agentrl.weights.bundle import BundlePlace, WeightBundle

if TYPE_CHECKING:
    from torch import Tensor

SHARED_MEMORY = Path("/dev/shm")
BUCKET_BYTES = 64 << 20
_PREFIX = "agentrl-weights-"
# Reads until the pipe from the owner closes, whatever the owner died of, and then removes the folder; again where
# somebody was still writing.
_REAPER = 'read -r _; for _ in 1 2 3 4 5; do rm -rf -- "$0" && break; sleep 0.2; done'


class WeightStore:
    """A folder for the bundles of one owner. `open` makes it, `close` removes it with all that is in it.

    When the owner is killed, a shell that outlives it removes the folder at once; where that was killed too, the next
    store in the same place does (`sweep`): an owner that lives holds a lock on its folder.
    """

    def __init__(self, folder: Path, lock: int, reaper: "subprocess.Popen[bytes]", bucket_bytes: int) -> None:
        self.folder = folder
        self._lock = lock
        self._reaper = reaper
        self._bucket_bytes = bucket_bytes
        self._numbers = count()

    @classmethod
    def open(cls, parent: Path, bucket_bytes: int = BUCKET_BYTES) -> "WeightStore":
        """A new store in the folder `parent`, which is swept first.

        Raises:
            OSError: nothing can be written there.
        """
        parent.mkdir(parents=True, exist_ok=True)
        sweep(parent)
        hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))
        lock = os.open(hidden, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        # It gets the name that others look for when it is locked already.
        folder = hidden.rename(parent / hidden.name.removeprefix("."))
        command = ["/bin/sh", "-c", _REAPER, str(folder)]
        silent = subprocess.DEVNULL
        reaper = subprocess.Popen(
            command, cwd="/", stdin=subprocess.PIPE, stdout=silent, stderr=silent, start_new_session=True
        )
        return cls(folder, lock, reaper, bucket_bytes)

    def close(self) -> None:
        """Remove the folder. May be called more than once."""
        if self._reaper.stdin is not None and not self._reaper.stdin.closed:
            self._reaper.stdin.close()
            self._reaper.wait()
            os.close(self._lock)

    def place(self, version: int) -> BundlePlace:
        """Where to write a version; a new one each time."""
        return BundlePlace(self.folder / f"v{version}-{next(self._numbers)}", version, self._bucket_bytes)

    async def keep_only(self, kept: Iterable[Mapping[str, "Tensor"]]) -> None:
        """Remove all other bundles. Who has opened one of them keeps it, and its memory, until it lets go."""
        folders = {bundle.folder for bundle in kept if isinstance(bundle, WeightBundle)}
        for folder in set(self.folder.iterdir()) - folders:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def default_parent() -> Path:
    """Shared memory, where there is such a thing, else the folder of temporary files."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def sweep(parent: Path) -> None:
    """Remove the stores in `parent` whose owners are dead: their locks are free."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it lives, or is another user's, or has just gone
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


@asynccontextmanager
async def bundled(weights: Mapping[str, "Tensor"], version: int) -> AsyncIterator[WeightBundle]:
    """The weights as a bundle: themselves, if they are one, else one that lasts as long as the block."""
    if isinstance(weights, WeightBundle):
        yield weights
        return
    store = WeightStore.open(default_parent())
    try:
        yield await run_to_completion(asyncio.to_thread(store.place(version).write, weights))
    finally:
        store.close()


__all__ = ["SHARED_MEMORY", "WeightStore", "bundled", "default_parent", "sweep"]
