"""`Parcel`: a value on its way to another process of this machine. Its arrays lie in memory that
both processes map, so they are copied once and not through a pipe.

They are pickled out of band (`Pickled`). What the other process unpickles are views of that memory,
which cannot be written to.
"""

import mmap
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from agentrl.net.pickled import Pickled

_ALIGNMENT_BYTES = 64
"""The places of buffers are multiples of it, as those of numpy's and torch's own arrays."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """A pickled value. It pickles small, and opens while the process that made it keeps it."""

    pickled: bytes
    """Everything but its large buffers."""
    buffers: tuple[tuple[int, int], ...] = ()
    """Place and size of each large buffer in the memory, in bytes."""
    owner: int = 0
    """Id of the process that made it."""
    memory: int = -1
    """Its file descriptor of the memory; -1 if there are no large buffers."""

    @classmethod
    def of(cls, value: Any) -> "Parcel":
        """Pickle a value, and copy its large buffers."""
        # multiprocessing's own pickler passes tensors in shared memory.
        return cls.around(Pickled.of(value, ForkingPickler))

    @classmethod
    def around(cls, pickled: Pickled) -> "Parcel":
        """Copy the large buffers of a pickled value."""
        rest = bytes(pickled.rest)
        if not pickled.buffers:
            return cls(rest)
        memory = os.memfd_create("agentrl-parcel")
        try:
            places = _copy_into(memory, pickled.buffers)
        except BaseException:  # such as a machine without memory
            os.close(memory)
            raise
        return cls(rest, places, os.getpid(), memory)

    def mapped(self) -> Pickled:
        """The pickled value in another process of this machine, with its buffers where they are.
        From then on the process that made it may give it up. It is opened with torch, which keeps
        no file descriptor open, so that thousands may be kept.

        Raises:
            OSError: that process has ended, or it has given it up.
        """
        if not self.buffers:
            return Pickled(self.pickled)
        import torch

        size = sum(self.buffers[-1])
        try:
            mapped = torch.from_file(self._path, shared=False, size=size, dtype=torch.uint8)
        except RuntimeError as error:
            raise OSError(f"{self._path} cannot be mapped: {error}") from error
        return self._view_buffers(mapped.numpy().data)

    def open(self) -> Any:
        """Unpickle the value, in this process or in another one of this machine."""
        if not self.buffers:
            return Pickled(self.pickled).open()
        with Path(self._path).open("rb") as file:
            whole = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        return self._view_buffers(whole).open()

    @property
    def _path(self) -> str:
        return f"/proc/{self.owner}/fd/{self.memory}"

    def _view_buffers(self, whole: memoryview) -> Pickled:
        return Pickled(self.pickled, [whole[place : place + size] for place, size in self.buffers])

    def close(self) -> None:
        """Give the memory up, in the process that made it. Processes that have opened it keep what
        they map.
        """
        if self.buffers:
            os.close(self.memory)


def _copy_into(memory: int, buffers: Iterable[memoryview]) -> tuple[tuple[int, int], ...]:
    """Write buffers into a file of memory. Returns where each begins, and its bytes."""
    places = []
    with open(memory, "wb", buffering=0, closefd=False) as file:
        end = 0
        for raw in buffers:
            place = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            end = place + raw.nbytes
            os.ftruncate(memory, end)
            file.seek(place)
            unwritten = raw
            while unwritten.nbytes:  # the kernel takes at most 2 GiB at a time
                unwritten = unwritten[file.write(unwritten) :]
            places.append((place, raw.nbytes))
    return tuple(places)


@dataclass(frozen=True, slots=True)
class MemoryProbe:
    """Shows whether another process can open what this one has in memory. The name is a secret, so
    that no process of another machine is taken for this one.
    """

    owner: int
    """Id of the process."""
    memory: int
    """Its file descriptor of some memory."""
    name: str
    """The name of that memory."""

    @classmethod
    def of_this_process(cls) -> "MemoryProbe":
        """One that lasts as long as this process."""
        name = f"agentrl-{secrets.token_hex(16)}"
        return cls(os.getpid(), os.memfd_create(name), name)

    def is_reachable(self) -> bool:
        """Whether this process can open the memory of the other one."""
        try:
            found = Path(f"/proc/{self.owner}/fd/{self.memory}").readlink()
        except OSError:
            return False
        return str(found) == f"/memfd:{self.name} (deleted)"
