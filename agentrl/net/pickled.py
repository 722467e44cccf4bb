"""`Pickled`: a value on its way to another process, and its large buffers beside it (PEP 574)."""

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, SupportsIndex

_LEAST_BYTES = 1 << 14
"""Smaller buffers are pickled with everything else: to handle one costs as much as to copy it."""
_MOST_BUFFERS = 1024
"""The number of buffers that are kept beside the pickled rest, the first ones."""


@dataclass(frozen=True, slots=True)
class Pickled:
    """A pickled value. Inside of another one, its buffers are not copied either."""

    rest: bytes | memoryview
    """Everything but its large buffers."""
    buffers: Sequence[memoryview] = ()
    """Those of the value itself, or wherever they have arrived."""

    @classmethod
    def of(cls, value: Any, pickler: type[pickle.Pickler] | None = None) -> "Pickled":
        """Pickle a value. It must not be changed before the buffers are written somewhere."""
        buffers = list[memoryview]()

        def stays_in_band(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes < _LEAST_BYTES or len(buffers) == _MOST_BUFFERS:
                return True
            buffers.append(raw)
            return False

        if pickler is None:
            return cls(pickle.dumps(value, 5, buffer_callback=stays_in_band), buffers)
        stream = BytesIO()
        # By position, as multiprocessing's own pickler takes them.
        pickler(stream, 5, True, stays_in_band).dump(value)
        return cls(stream.getbuffer(), buffers)

    @property
    def buffer_bytes(self) -> int:
        """The size of all large buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def open(self) -> Any:
        """Unpickle the value. Its large arrays are views of the buffers, and cannot be written."""
        return pickle.loads(self.rest, buffers=[buffer.toreadonly() for buffer in self.buffers])

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        # As buffers, so that pickling a message that holds this copies none of them.
        parts = [pickle.PickleBuffer(part) for part in (self.rest, *self.buffers)]
        return _rebuild, (parts,)


def _rebuild(parts: Iterable[Any]) -> Pickled:
    rest, *buffers = (memoryview(part) for part in parts)
    return Pickled(rest, buffers)


__all__ = ["Pickled"]
