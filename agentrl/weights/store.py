"""Storage of published weights: a folder in shared memory or on a disk, which is removed when its
owner ends.
"""

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.files.file_lock import FileLock
from agentrl.flow import run_to_completion
from agentrl.weights.bundle import BundlePlace, unfinished
from agentrl.weights.shipment import SHARED_MEMORY, Shipment, shipment_of

if TYPE_CHECKING:
    from torch import Tensor

BUCKET_BYTES = 64 << 20
_PREFIX = "agentrl-weights-"
_HOLDER = ".holder"
"""In the folder, so that it is renamed and removed with it. Only there on file systems without
locks.
"""
# Reads until the pipe from the owner closes, however the owner ended, and then removes the folder;
# retries while a process is still writing there. It is no child of the owner, but of a shell that
# has ended: a Ray worker whose node has died kills its children when it ends.
_REAPER = (
    'exec 3<&0; { read -r _; for _ in 1 2 3 4 5; do rm -rf -- "$0" && break; sleep 0.2; done; }'
    " <&3 >/dev/null & echo $!"
)


@dataclass(slots=True)
class _Reaper:
    """A shell that removes a folder when this process ends, or when it is told to."""

    pid: int
    pipe: int
    """Its input, which is closed to tell it."""

    @classmethod
    def of(cls, folder: Path) -> "_Reaper":
        """Start one."""
        reading, pipe = os.pipe()
        try:
            started = subprocess.run(
                ["/bin/sh", "-c", _REAPER, str(folder)],
                cwd="/",
                stdin=reading,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                check=True,
            )
            return cls(int(started.stdout), pipe)
        except BaseException:
            os.close(pipe)
            raise
        finally:
            os.close(reading)

    def __del__(self) -> None:
        self.end()

    def end(self) -> None:
        """Tell it. May be called more than once."""
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1


class WeightStore:
    """A folder for the bundles of one owner. `open` creates it, `close` removes it with all its
    contents.

    If the owner is killed, a shell that outlives it removes the folder at once. If the shell was
    killed too, the next store in the same place removes it (`sweep`): a running owner holds a lock
    on its folder.
    """

    def __init__(self, folder: Path, lock: FileLock, reaper: _Reaper, bucket_bytes: int) -> None:
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
        with ExitStack() as unless_opened:
            hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))
            folder = parent / hidden.name.removeprefix(".")
            for place in (hidden, folder):
                unless_opened.callback(_remove, place)
            lock = _lock_of(hidden)
            lock.acquire()
            unless_opened.callback(lock.release)
            # The folder gets the name that `sweep` looks for only after it is locked.
            hidden.rename(folder)
            reaper = _Reaper.of(folder)
            unless_opened.pop_all()
        return cls(folder, lock, reaper, bucket_bytes)

    def close(self) -> None:
        """Remove the folder. May be called more than once."""
        if self._reaper.pipe >= 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._reaper.end()
            self._lock.release()

    def place(self, version: int) -> BundlePlace:
        """A new place to write a version to."""
        return BundlePlace(
            self.folder / f"v{version}-{next(self._numbers)}", version, self._bucket_bytes
        )

    async def keep_only(self, kept: Iterable[Shipment]) -> None:
        """Remove all other bundles. A process that has one open keeps it, and its memory, until it
        closes it. One that is kept may still be written.
        """
        folders = {self.folder / _HOLDER}
        for folder in filter(None, (shipment.folder for shipment in kept)):
            folders |= {folder, unfinished(folder)}
        for folder in set(self.folder.iterdir()) - folders:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # where no more files may be opened, an empty one can be removed still
        folder.rmdir()


def default_parent() -> Path:
    """Shared memory if the machine has it, else the folder for temporary files."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def sweep(parent: Path) -> None:
    """Remove the stores in `parent` whose owners are dead: their locks are free."""
    for folder in parent.glob(f"{_PREFIX}*"):
        # The owner is running or another user, or the folder has just been removed.
        with suppress(OSError):
            lock = _lock_of(folder)
            marked = lock.holder() is not None
            if lock.acquire(wait=False):
                # Without a marker it is of a process that has locks, perhaps outside of this
                # container.
                if marked or not lock.by_marker:
                    shutil.rmtree(folder, ignore_errors=True)
                lock.release()


def _lock_of(folder: Path) -> FileLock:
    return FileLock(folder, folder / _HOLDER)


@asynccontextmanager
async def readable_elsewhere(
    weights: Mapping[str, "Tensor"], version: int
) -> AsyncIterator[Shipment]:
    """The weights in a form that other processes can read: unchanged if they can, else as a bundle
    that the block's end removes.
    """
    shipment = shipment_of(weights)
    if shipment.is_remote:
        yield shipment
        return
    store = WeightStore.open(default_parent())
    try:
        yield await run_to_completion(
            asyncio.to_thread(store.place(version).write, shipment.unpacked)
        )
    finally:
        store.close()


__all__ = ["SHARED_MEMORY", "WeightStore", "default_parent", "readable_elsewhere", "sweep"]
