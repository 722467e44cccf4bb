"""`PeriodicThread`: work that is done again and again beside an event loop, also while the loop is
busy.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Self


class PeriodicThread(AbstractContextManager["PeriodicThread"]):
    """Does `work` in a daemon thread from the beginning to the end of the block, first after
    `first` seconds.

    `work` returns the seconds until the next time; None ends it.
    """

    def __init__(self, work: Callable[[], float | None], *, name: str, first: float = 0.0) -> None:
        self._work, self._first = work, first
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()
        self.join()

    def end(self) -> None:
        """No work begins any more; what goes on is not waited for."""
        self._ended.set()

    def join(self, seconds: float | None = None) -> bool:
        """Wait until it has ended, for so many seconds or for ever; return whether it has."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        seconds: float | None = self._first
        while seconds is not None and not self._ended.wait(seconds):
            seconds = self._work()
