"""`Heartbeat`: signs of life from the processes of an engine, in memory that they share.

A thread of each process keeps writing the time there, whatever the other threads do: load weights,
compute, or wait. It falls silent when its process is stopped, dead or blocked as a whole.

The memory is a file without a name that its owner has open, so it is gone with the owner. Others
open it by the owner's process id, in which each of them has eight bytes of its own. Linux only:
elsewhere no process beats, and none is missed.
"""

import asyncio
import os
import struct
import sys
import threading
import time
from collections.abc import Callable

BEAT_SECONDS = 0.2
"""Pause between two signs of life of a process."""
_TIME = struct.Struct("d")
"""Seconds of the monotonic clock, which is the machine's, so processes can compare its values."""


class Heartbeat:
    """The memory in which an engine's processes give signs of life, as the engine's owner has
    it.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("agentrl-heartbeat") if sys.platform == "linux" else -1

    @property
    def path(self) -> str:
        """The file, for `begin_beating` in other processes of this machine; "" if nobody beats
        here.
        """
        return f"/proc/{os.getpid()}/fd/{self._file}" if self._file >= 0 else ""

    @property
    def oldest(self) -> float:
        """The last sign of life of the process that has been silent for longest, in seconds of the
        monotonic clock; infinite before the first one.
        """
        if self._file < 0:
            return float("inf")
        count = os.fstat(self._file).st_size // _TIME.size
        written = os.pread(self._file, count * _TIME.size, 0)
        return min((beat for (beat,) in _TIME.iter_unpack(written)), default=float("inf"))

    async def next(self, check: Callable[[], object]) -> None:
        """Wait until each process has given another sign of life. `check` is called repeatedly, and
        may raise.
        """
        asked = time.monotonic()
        while self.oldest < asked:
            # Shared memory cannot wake a waiting process, so this one looks again.
            await asyncio.sleep(BEAT_SECONDS / 4)
            check()

    def close(self) -> None:
        """Release the memory. May be called more than once."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


_beating: set[int] = set()
"""The files (their inodes) in which this process gives signs of life."""


def begin_beating(path: str) -> None:
    """Let a thread of this process give signs of life at a `Heartbeat.path` until the process ends,
    unless one does so already.
    """
    if not path or (inode := os.stat(path).st_ino) in _beating:
        return
    _beating.add(inode)
    # What is appended has a place that no other process has.
    with open(path, "ab", buffering=0) as file:
        file.write(_TIME.pack(time.monotonic()))
        place = file.tell() - _TIME.size
    written = os.open(path, os.O_WRONLY)
    threading.Thread(
        target=_keep_beating, args=(written, place), name="agentrl-heartbeat", daemon=True
    ).start()


def _keep_beating(file: int, place: int) -> None:
    never = threading.Event()
    while True:
        os.pwrite(file, _TIME.pack(time.monotonic()), place)
        never.wait(BEAT_SECONDS)


class BeginBeating:
    """An answer to another process that begins to beat as it reads the answer, and finds None.

    It is a way into a process that only takes pickled answers: vLLM's engine core, if its workers
    are processes of their own.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return begin_beating, (self._path,)


__all__ = ["BEAT_SECONDS", "BeginBeating", "Heartbeat", "begin_beating"]
