"""Two clocks for the same code: the wall clock of an ordinary event loop, and virtual time.

Scheduling code takes the time from the running loop, never from the machine. Under
`VirtualTimeLoop` that time jumps to the next timer whenever nothing is ready to run, so an hour of
sleeping costs microseconds, and the order of events depends only on the program and its seeds.

No library is used: looptime polls the selector 42 times per jump and lets an idle program hang, and
async-solipsism is GPL-licensed (docs/decisions/0002-virtual-time.md).
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from agentrl.errors import AgentRLError

T = TypeVar("T")


class VirtualDeadlockError(AgentRLError):
    """Under virtual time, every task waits and no timer is set: nothing can ever happen again."""


class _JumpingSelector(selectors.BaseSelector):
    """Polls real file descriptors without waiting, and turns waits into jumps of the clock."""

    def __init__(self) -> None:
        self._real = selectors.DefaultSelector()
        self._jumps = 0
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # A poll is a system call. While callbacks are ready (timeout 0) it is useless, and between
        # jumps only a signal can have arrived.
        if timeout is not None and timeout <= 0:
            return []
        self._jumps += 1
        if timeout is None or self._jumps % 64 == 0:
            ready = self._real.select(0)
            if ready:
                return ready
        if timeout is None:
            waiting = sorted(
                task.get_name() for task in asyncio.all_tasks(asyncio.get_event_loop())
            )
            raise VirtualDeadlockError(
                f"virtual time cannot advance: {len(waiting)} tasks wait and none has a timer:"
                f" {', '.join(waiting[:10])}. Under the virtual clock nothing may wait for a thread"
                " or a socket"
            )
        self.now += timeout
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time starts at 0 and moves only when there is nothing else to do."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        # The rounding error of `now + (when - now)` must never leave a timer slightly in the
        # future.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.now


def run_virtual(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `main()` to its end in virtual time and return its result.

    Raises:
        VirtualDeadlockError: everything waits and nothing is due.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main())


def now() -> float:
    """Seconds on the running loop's clock."""
    return asyncio.get_running_loop().time()
