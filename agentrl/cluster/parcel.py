"""`Parcel`: a value on its way to another process of this machine. Its arrays lie in memory that
both processes map, so they are copied once and not through a pipe.

They are pickled out of band (PEP 574). What the other process unpickles are views of that memory,
which cannot be written to.
"""

import mmap
import os
import pickle
from dataclasses import dataclass
from io import BytesIO
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

_LEAST_BYTES = 1024
"""Smaller buffers are pickled with everything else."""
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
        stream, large = BytesIO(), list[memoryview]()

        def stays_in_band(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes < _LEAST_BYTES:
                return True
            large.append(raw)
            return False

        # multiprocessing's own pickler passes tensors in shared memory; it takes these by position.
        ForkingPickler(stream, 5, True, stays_in_band).dump(value)
        if not large:
            return cls(stream.getvalue())
        memory = os.memfd_create("agentrl-call")
        places = []
        with open(memory, "wb", buffering=0, closefd=False) as file:
            end = 0
            for raw in large:
                place = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
                end = place + raw.nbytes
                os.ftruncate(memory, end)
                file.seek(place)
                _write_all(file, raw)
                places.append((place, raw.nbytes))
        return cls(stream.getvalue(), tuple(places), os.getpid(), memory)

    def open(self) -> Any:
        """Unpickle the value, in this process or in another one of this machine."""
        if not self.buffers:
            return pickle.loads(self.pickled)
        with Path(f"/proc/{self.owner}/fd/{self.memory}").open("rb") as file:
            mapped = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        views = [mapped[place : place + size] for place, size in self.buffers]
        return pickle.loads(self.pickled, buffers=views)

    def close(self) -> None:
        """Give the memory up, in the process that made it. Processes that have opened it keep what
        they map.
        """
        if self.buffers:
            os.close(self.memory)


def _write_all(file: Any, raw: memoryview) -> None:
    """Write a buffer. The kernel takes at most 2 GiB at a time."""
    while raw.nbytes:
        raw = raw[file.write(raw) :]
