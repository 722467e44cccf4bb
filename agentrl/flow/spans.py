"""Spans: when each part of a run worked, for profiles.

Code that keeps a resource busy does so in a `span`. Spans are kept only while a `SpanLog` records
them; otherwise one costs a look at a variable.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import ClassVar, NamedTuple, Self

SHORTEST_WORK = 1e-3
"""Work of the event loop that takes less than these seconds is only summed."""


class Span(NamedTuple):
    """A stretch of time in which a resource was busy. Times are those of the event loop's clock,
    gaps included (`elapsed`), in seconds.
    """

    resource: str
    """The resource: engine, environments, rewards, weights, controller, or the role of a worker."""
    name: str
    """The name of the work."""
    worker: int | None
    """The worker's number, where there are several."""
    task: str
    """The name of the asyncio task."""
    begin: float
    """The start."""
    end: float
    """The end."""


class SpanLog:
    """The spans that have ended since they were last taken. Another thread than the event loop's
    may take them.

    `loop_seconds`: how long the event loop has worked, without what computes on it by design.
    `spans` and `loop_turns`: how many spans and turns of the loop have been counted, which is what
    the log itself costs.
    """

    def __init__(self) -> None:
        self.loop_seconds = 0.0
        self.loop_turns = 0
        self.spans = 0
        self._ended: deque[Span] = deque()

    def add(self, ended: Span) -> None:
        """A span has ended."""
        self.spans += 1
        self._ended.append(ended)

    def loop_worked(self, begin: float, end: float, where: str) -> None:
        """The event loop has called back from `begin` to `end`. `where`: the line that took long,
        if it is known.
        """
        self.loop_turns += 1
        self.loop_seconds += end - begin
        if end - begin >= SHORTEST_WORK:
            self._ended.append(Span("controller", where or "callbacks", None, "", begin, end))

    def take(self) -> list[Span]:
        """The spans since the last call, in the order in which they ended."""
        return [self._ended.popleft() for _ in range(len(self._ended))]


class _Recording:
    """The log that records, if any: one for the process, as workers are called from several
    modules.
    """

    log: ClassVar[SpanLog | None] = None


def recording() -> SpanLog | None:
    """The log that records now."""
    return _Recording.log


@contextmanager
def record_spans(log: SpanLog) -> Iterator[SpanLog]:
    """Inside the block, spans that begin are recorded in `log`, in all threads."""
    before, _Recording.log = _Recording.log, log
    try:
        yield log
    finally:
        _Recording.log = before


class span:  # noqa: N801  used as a keyword, like `deadline`
    """`with span("engine", "generate"): ...` records that the resource was busy. Use it on an event
    loop.
    """

    __slots__ = ("_begin", "_log", "_name", "_resource", "_worker")

    def __init__(self, resource: str, name: str, worker: int | None = None) -> None:
        self._resource = resource
        self._name = name
        self._worker = worker

    def __enter__(self) -> Self:
        self._log = _Recording.log
        if self._log is not None:
            self._begin = _clock()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._log is not None:
            task = asyncio.current_task()
            name = "" if task is None else task.get_name()
            self._log.add(
                Span(self._resource, self._name, self._worker, name, self._begin, _clock())
            )


def _clock() -> float:
    """`elapsed`, which cannot be imported here: its loop records spans."""
    loop = asyncio.get_running_loop()
    seconds: float = getattr(loop, "elapsed", loop.time)()
    return seconds
