"""An event loop whose clock leaves out the time in which the loop could not run.

While one callback computes for long, or the whole process is stopped, answers arrive that nobody reads, and timers
fall due. With an ordinary clock all deadlines and leases that lapsed meanwhile would fire first, and healthy workers
be replaced for the controller's own pause. Here that time is a gap: the clock does not count it, so whatever waited
has after the gap as long as it had before.

    callbacks ... | select | one callback, 9 s            | select | ...
    clock         0.1      0.1                            0.1        a gap of 9 s, and a log line that says where
"""

import asyncio
import logging
import selectors
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
GAP_SECONDS = 0.25
"""The clock goes on for so long in a pause, and then stands still: a shorter one is no gap."""
_REPORTED_SECONDS = 2.0
"""A gap of so many seconds has a log line."""
_TICK_SECONDS = 0.1
"""The loop wakes up so often at least: a process that was stopped while nothing was due notices by it."""
_PACKAGE = Path(__file__).resolve().parents[1]
_log = logging.getLogger("agentrl.flow")


class SteadyLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock leaves out its gaps. `clock` is what the machine's time is read from."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._gaps = _GapSelector(clock)
        super().__init__(self._gaps)

    def time(self) -> float:
        """Seconds without the gaps so far. It stands still in a gap, so that nobody begins to wait at its end."""
        return min(self._gaps.clock(), self._gaps.left + GAP_SECONDS) - self._gaps.lost

    def elapsed(self) -> float:
        """Seconds, gaps included."""
        return self._gaps.clock()

    def take_longest(self) -> tuple[float, float]:
        """The longest gap since the last call, in seconds, and the longest in which an engine computed here."""
        longest, self._gaps.longest = self._gaps.longest, {True: 0.0, False: 0.0}
        return longest[False], longest[True]

    def close(self) -> None:
        """Close the loop."""
        self._gaps.watch.end()
        super().close()


class _GapSelector(selectors.DefaultSelector):
    """Notices how long the loop was away, and how much longer than asked for it was in here."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self.clock = clock
        self.lost = 0.0
        self.longest = {True: 0.0, False: 0.0}
        self.left = clock()
        self.watch = _Watch(self)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        entered = self.clock()
        self._count(entered - self.left, self.watch.take())
        wait = _TICK_SECONDS if timeout is None else min(timeout, _TICK_SECONDS)
        ready = super().select(wait)
        self.left = self.clock()
        self._count(self.left - entered - max(0.0, wait), "")
        return ready

    def _count(self, seconds: float, where: str) -> None:
        if seconds < GAP_SECONDS:
            return
        self.lost += seconds - GAP_SECONDS
        computing = "/engines/" in where
        self.longest[computing] = max(self.longest[computing], seconds)
        if seconds >= _REPORTED_SECONDS and not computing:
            _log.warning(
                "the event loop was blocked for %.1f s by %s; deadlines and leases are longer by that",
                seconds,
                where or "no callback: the process was stopped, or its machine",
            )


class _Watch:
    """A thread that looks what the loop's thread does, when that has been away for long."""

    def __init__(self, selector: _GapSelector) -> None:
        self._selector = selector
        self._loop_thread = 0
        self._where = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="event-loop-watch", daemon=True)

    def take(self) -> str:
        """Where the callbacks that have just ended were last seen, if they took long."""
        if not self._loop_thread:
            self._loop_thread = threading.get_ident()
            self._thread.start()
        where, self._where = self._where, ""
        return where

    def end(self) -> None:
        """End the thread."""
        self._ended.set()
        if self._loop_thread:
            self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(GAP_SECONDS / 5):
            if not self._where and self._selector.clock() - self._selector.left > GAP_SECONDS - _TICK_SECONDS / 2:
                frame = sys._current_frames().get(self._loop_thread)
                if frame is not None and frame.f_code.co_filename != __file__:
                    self._where = _place(frame)


def _place(frame: FrameType) -> str:
    """The innermost line, and the innermost of ours where that is another one."""
    ours: FrameType | None = frame
    while ours is not None and not _is_ours(ours):
        ours = ours.f_back
    called_by = f", called from {_line(ours)}" if ours is not None and ours is not frame else ""
    return f"{_line(frame)}{called_by}"


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename != __file__ and Path(frame.f_code.co_filename).is_relative_to(_PACKAGE)


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"


def run_steadily(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a `SteadyLoop`."""
    with asyncio.Runner(loop_factory=SteadyLoop) as runner:
        return runner.run(main)


def elapsed() -> float:
    """Seconds on the running loop's clock and in its gaps: for measuring how long something took."""
    loop = asyncio.get_running_loop()
    return loop.elapsed() if isinstance(loop, SteadyLoop) else loop.time()


def loop_metrics() -> dict[str, float]:
    """The longest gap of the running loop since the last call; none on a loop of another kind.

    `loop/longest_gap_seconds`; `loop/longest_engine_seconds` is that of an engine that computes on the loop by design
    (docs/decisions/0004-local-engine-on-the-event-loop.md). A pause below a quarter of a second is no gap.
    """
    loop = asyncio.get_running_loop()
    if not isinstance(loop, SteadyLoop):
        return {}
    gap, engine = loop.take_longest()
    return {"loop/longest_gap_seconds": gap, "loop/longest_engine_seconds": engine}


__all__ = ["GAP_SECONDS", "SteadyLoop", "elapsed", "loop_metrics", "run_steadily"]
