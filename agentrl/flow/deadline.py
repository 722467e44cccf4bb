"""`deadline`: a time limit on awaits, and the table of all current waits.

Every await on something outside is inside a `deadline`. So the open deadlines of a loop show what
it waits for, and since when. `waits()` lists them for the watchdog, for displays, and for the error
that ends a stalled run.

All deadlines of one kind are equally long, so they expire in the order in which they were set. One
queue and one timer per kind suffice. A timer for each deadline would cost five times as much (an
episode sets five, and a million episodes are simulated in a minute). Only those that turn out to
have time left, because their clock stood still, get a timer of their own.
"""

import asyncio
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from weakref import WeakKeyDictionary

from agentrl.errors import DeadlineError, Layer
from agentrl.flow.pausable_clock import PausableClock


@dataclass(frozen=True, slots=True)
class PendingWait:
    """The number of tasks that wait in a phase of a layer, and the longest wait in seconds."""

    layer: Layer
    phase: str
    count: int
    longest: float


class deadline:  # noqa: N801  used as a keyword, like `asyncio.timeout`
    """`with deadline("environment", "step", 30): ...` limits the awaits inside to 30 seconds of
    loop time, or of `clock`. `allowance` are seconds more, which may grow meanwhile.

    Raises:
        DeadlineError: they took longer. A TimeoutError that the awaited code raises passes through
        unchanged.
    """

    __slots__ = (
        "_began",
        "_cancelling",
        "_clock",
        "_loop",
        "_queue",
        "allowance",
        "expired",
        "task",
        "when",
    )

    def __init__(
        self, layer: Layer, phase: str, seconds: float, clock: PausableClock | None = None
    ) -> None:
        loop = self._loop = asyncio.get_running_loop()
        queues = _table.of(loop) if _table.loop() is not loop else _table.queues
        queue = queues.get((phase, seconds, layer))
        if queue is None:
            queue = queues[phase, seconds, layer] = _Queue(layer, phase, seconds)
        self._queue = queue
        self._clock = clock
        self._began = 0.0
        self.allowance = 0.0
        self.expired = False
        self.when = 0.0

    def begin(self) -> None:
        """Let all of its seconds begin now."""
        began = self._loop.time()
        self.when = began + self._queue.seconds
        self._began = began if self._clock is None else self._clock.now()

    def left(self) -> float:
        """The seconds that are left."""
        return self._queue.seconds + self.allowance - (self._now() - self._began)

    def call_when_due(self, call: Callable[[], None]) -> None:
        """Call `call` when no time is left, or later."""
        due = self._now() + self.left()
        if self._clock is None:
            self._loop.call_at(due, call)
        else:
            self._clock.call_at(due, call)

    def _now(self) -> float:
        return self._loop.time() if self._clock is None else self._clock.now()

    def __enter__(self) -> Self:
        task = asyncio.current_task(self._loop)
        if task is None:
            raise RuntimeError("a deadline must be set inside a task")
        self.task = task
        self._cancelling = task.cancelling()
        self._queue.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        queue = self._queue
        if not self.expired:
            queue.remove(self)
        elif self.task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise DeadlineError(queue.layer, queue.phase, queue.seconds) from None


@contextmanager
def pause_deadlines() -> Iterator[None]:
    """Inside the block, the deadlines of the current task stand still; afterwards, they start
    again.

    For a wait that says nothing about the party waited for, such as a restart of all engines.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    paused = []
    for queue in _table.known(loop):
        paused += [(queue, entry) for entry in queue.waiting() if entry.task is task]
    for queue, entry in paused:
        queue.remove(entry)
    try:
        yield
    finally:
        for queue, entry in paused:
            queue.add(entry)


class _Queue:
    """The open deadlines of one kind, the next to expire first, and the one timer they share."""

    def __init__(self, layer: Layer, phase: str, seconds: float) -> None:
        self.layer = layer
        self.phase = phase
        self.seconds = seconds
        self.open: OrderedDict[deadline, None] = OrderedDict()
        self.late: dict[deadline, None] = {}
        """Those that have time left although all of their seconds are over."""
        self.armed = False

    def waiting(self) -> tuple[deadline, ...]:
        """All that have not expired, those that began first at the beginning."""
        return (*self.late, *self.open)

    def remove(self, one: deadline) -> None:
        """Take out a deadline that has not expired."""
        if one in self.open:
            del self.open[one]
        else:
            del self.late[one]

    def add(self, one: deadline) -> None:
        """Let a deadline begin now: it is the last to expire."""
        loop = asyncio.get_running_loop()
        one.begin()
        self.open[one] = None
        if not self.armed:
            self.armed = True
            loop.call_at(one.when, self.fire)

    def fire(self) -> None:
        """Expire the deadlines that are due, and arm the timer for the next one. At most one timer
        is armed.
        """
        loop = asyncio.get_running_loop()
        due = loop.time() + 1e-9
        while self.open:
            first = next(iter(self.open))
            if first.when > due:
                loop.call_at(first.when, self.fire)
                return
            del self.open[first]
            self.late[first] = None
            self._end(first)
        self.armed = False

    def _end(self, one: deadline) -> None:
        """Expire a deadline that is late, or look again when it has no time left."""
        if one not in self.late:
            return  # its wait is over
        if one.left() > 1e-9:
            one.call_when_due(lambda: self._end(one))
            return
        del self.late[one]
        one.expired = True
        one.task.cancel()


_Queues = dict[tuple[str, float, Layer], _Queue]


class _Table:
    """The queues of every loop; those of the loop used last are cached."""

    def __init__(self) -> None:
        self._all: WeakKeyDictionary[asyncio.AbstractEventLoop, _Queues] = WeakKeyDictionary()
        self.loop: Callable[[], asyncio.AbstractEventLoop | None] = lambda: None
        self.queues: _Queues = {}

    def of(self, loop: asyncio.AbstractEventLoop) -> _Queues:
        self.loop = weakref.ref(loop)
        self.queues = self._all.setdefault(loop, {})
        return self.queues

    def known(self, loop: asyncio.AbstractEventLoop) -> list[_Queue]:
        """The queues of a loop, for any thread: the cache stays as it is."""
        return list(self._all.get(loop, {}).values())


_table = _Table()


def waits(loop: asyncio.AbstractEventLoop | None = None) -> list[PendingWait]:
    """All waits under a deadline on a loop, by default the running one, the longest wait first. Any
    thread may ask.
    """
    loop = loop or asyncio.get_running_loop()
    found = []
    for queue in _table.known(loop):
        if waiting := queue.waiting():  # copied at once, as the loop's thread may change it
            longest = loop.time() - min(one.when for one in waiting) + queue.seconds
            found.append(PendingWait(queue.layer, queue.phase, len(waiting), longest))
    return sorted(found, key=lambda wait: -wait.longest)
