"""An event loop whose clock leaves out the time in which the loop could not run.

A callback that computes for long blocks the loop, and so does a stop of the whole process. Workers
continue and answer, but the loop cannot read their answers, and timers fall due. With an ordinary
clock the loop would then first expire all lapsed deadlines and leases, and the controller would
replace healthy workers because of its own pause. Here that time is a gap: the clock does not count
it, so every deadline has as many seconds left after the gap as before it.

    callbacks ... | select | one callback, 9 s            | select | ...
    clock         0.1      0.1                            0.1        a gap of 9 s, which is logged
"""

import asyncio
import gc
import logging
import selectors
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from agentrl.flow.spans import recording

T = TypeVar("T")
GAP_SECONDS = 0.25
"""In a pause the clock runs for this long and then stands still, so a shorter pause is not a gap.
"""
_REPORTED_SECONDS = 2.0
"""Gaps of at least this many seconds are logged."""
_TICK_SECONDS = 0.1
"""The loop wakes up at least this often, so that it notices a stop of the process while nothing was
due.
"""
_NEW_OBJECTS = 4_000
"""So many new objects make a collection; one of ten takes about as many milliseconds as there are
thousands.
"""
_FULL_EVERY = 30
"""So many collections of the second generation make a full one, which looks at all live episodes:
0.4 s for ten thousand. With Python's 10, that came every 3,000 episodes.
"""
_PACKAGE = Path(__file__).resolve().parents[1]
_log = logging.getLogger("agentrl.flow")


class SteadyLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock leaves out its gaps. `clock` reads the machine's time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._gaps = _GapSelector(clock)
        self._spares: tuple[int, int, int] | None = None
        super().__init__(self._gaps)

    def time(self) -> float:
        """Seconds without the gaps so far. The clock stands still during a gap, so a timer set at
        the end of a long callback is not delayed by the length of that callback.
        """
        return min(self._gaps.clock(), self._gaps.left + GAP_SECONDS) - self._gaps.lost

    def elapsed(self) -> float:
        """Seconds, gaps included."""
        return self._gaps.clock()

    def take_longest(self) -> tuple[float, float]:
        """The longest gap since the last call, and the longest in which an engine computed here,
        both in seconds.
        """
        longest, self._gaps.longest = self._gaps.longest, {True: 0.0, False: 0.0}
        return longest[False], longest[True]

    @property
    def busy_seconds(self) -> float:
        """Seconds in which callbacks ran so far, and nothing else of the loop could."""
        return self._gaps.busy

    def expect_long_callback(self) -> None:
        """Declare that the running callback computes on the loop on purpose: count its gap apart
        and do not log it.
        """
        self._gaps.by_design = True

    def freeze_gc(self) -> None:
        """Exclude all present objects from garbage collection until the loop closes, and collect
        new ones less often.

        A full collection stops the loop for about half a microsecond per object, and a run's
        libraries alone have 400,000 objects. Thousands of live episodes make Python's 700 new
        objects in no time; most of them are still in use then, and are looked at in vain. If the
        process has frozen objects itself, nothing happens.
        """
        if gc.get_freeze_count() == 0:
            gc.collect()
            gc.freeze()
            self._spares = gc.get_threshold()
            gc.set_threshold(_NEW_OBJECTS, self._spares[1], _FULL_EVERY)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Report an error that nobody waits for. A second Ctrl-C is none: it has ended the loop
        already, and where it struck says nothing.
        """
        if not isinstance(context.get("exception"), KeyboardInterrupt):
            super().call_exception_handler(context)

    def close(self) -> None:
        """Close the loop."""
        if self._spares:
            gc.unfreeze()
            gc.set_threshold(*self._spares)
        self._gaps.watch.end()
        super().close()


class _GapSelector(selectors.DefaultSelector):
    """Measures the time between two selects, and by how much a select exceeds its timeout."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self.clock = clock
        self.lost = 0.0
        self.busy = 0.0
        self.longest = {True: 0.0, False: 0.0}
        self.left = clock()
        self.by_design = False
        self.watch = _Watch(self)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        entered = self.clock()
        where = self.watch.take()
        self.busy += entered - self.left
        self._count(entered - self.left, where)
        if (log := recording()) is not None and not self.by_design:
            log.loop_worked(self.left, entered, where)
        self.by_design = False
        wait = _TICK_SECONDS if timeout is None else min(timeout, _TICK_SECONDS)
        ready = super().select(wait)
        self.left = self.clock()
        self._count(self.left - entered - max(0.0, wait), "")
        return ready

    def _count(self, seconds: float, where: str) -> None:
        if seconds < GAP_SECONDS:
            return
        self.lost += seconds - GAP_SECONDS
        self.longest[self.by_design] = max(self.longest[self.by_design], seconds)
        if seconds >= _REPORTED_SECONDS and not self.by_design:
            _log.warning(
                "the event loop was blocked for %.1f s by %s; deadlines and leases are extended by"
                " that",
                seconds,
                where or "no callback: the process was stopped, or its machine",
            )


class _Watch:
    """A thread that notes which line the loop's thread executes when a callback takes long."""

    def __init__(self, selector: _GapSelector) -> None:
        self._selector = selector
        self._loop_thread = 0
        self._where = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="event-loop-watch", daemon=True)

    def take(self) -> str:
        """The line noted during the callbacks that have just ended, or "" if they were short."""
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
            if (
                not self._where
                and self._selector.clock() - self._selector.left > GAP_SECONDS - _TICK_SECONDS / 2
            ):
                frame = sys._current_frames().get(self._loop_thread)
                if frame is not None and frame.f_code.co_filename != __file__:
                    self._where = _place(frame)


def _place(frame: FrameType) -> str:
    """The innermost line, and the innermost line of agentrl if that is another one."""
    ours: FrameType | None = frame
    while ours is not None and not _is_ours(ours):
        ours = ours.f_back
    called_by = f", called from {_line(ours)}" if ours is not None and ours is not frame else ""
    return f"{_line(frame)}{called_by}"


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename != __file__ and Path(frame.f_code.co_filename).is_relative_to(
        _PACKAGE
    )


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"


def run_steadily(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a `SteadyLoop`.

    The task itself returns None: `asyncio.Runner` restores the handler of SIGINT, for which
    `signal` formats the whole task with its result. That takes long for the trajectories of an
    evaluation.
    """
    results: list[T] = []

    async def keep_result() -> None:
        results.append(await main)

    with asyncio.Runner(loop_factory=SteadyLoop) as runner:
        runner.run(keep_result())
    return results[0]


def expect_long_callback() -> None:
    """Call `SteadyLoop.expect_long_callback` of the running loop; other loops ignore this."""
    loop = asyncio.get_running_loop()
    if isinstance(loop, SteadyLoop):
        loop.expect_long_callback()


def freeze_gc() -> None:
    """Call `SteadyLoop.freeze_gc` of the running loop; other loops ignore this."""
    loop = asyncio.get_running_loop()
    if isinstance(loop, SteadyLoop):
        loop.freeze_gc()


def elapsed() -> float:
    """Seconds on the running loop's clock, gaps included: for measuring durations."""
    loop = asyncio.get_running_loop()
    return loop.elapsed() if isinstance(loop, SteadyLoop) else loop.time()


def busy_seconds() -> float:
    """`SteadyLoop.busy_seconds` of the running loop; 0 on a loop of another kind."""
    loop = asyncio.get_running_loop()
    return loop.busy_seconds if isinstance(loop, SteadyLoop) else 0.0


def loop_metrics() -> dict[str, float]:
    """The longest gaps of the running loop since the last call; empty on a loop of another kind.

    `loop/longest_engine_seconds` is for engines that compute on the loop by design
    (docs/decisions/0004-local-engine-on-the-event-loop.md), `loop/longest_gap_seconds` for
    everything else. A pause below a quarter of a second is not a gap.
    """
    loop = asyncio.get_running_loop()
    if not isinstance(loop, SteadyLoop):
        return {}
    gap, engine = loop.take_longest()
    return {"loop/longest_gap_seconds": gap, "loop/longest_engine_seconds": engine}


__all__ = [
    "GAP_SECONDS",
    "SteadyLoop",
    "busy_seconds",
    "elapsed",
    "expect_long_callback",
    "freeze_gc",
    "loop_metrics",
    "run_steadily",
]
