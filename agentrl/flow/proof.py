"""Whether a run has played an episode, by event loop.

What cannot be opened before that is set up wrongly, and the run ends with an error. Afterwards the
same thing is away for a while, such as a Docker engine that is restarted, and episodes wait for it.
A process that joins a run late (a worker that replaces another) is told.
"""

import asyncio
from weakref import WeakSet

_loops: WeakSet[asyncio.AbstractEventLoop] = WeakSet()


def note_played() -> None:
    """Note that an episode of the run of this event loop has begun well, here or elsewhere."""
    _loops.add(asyncio.get_running_loop())


def has_played() -> bool:
    """True if an episode of the run of this event loop has begun well."""
    return asyncio.get_running_loop() in _loops


__all__ = ["has_played", "note_played"]
