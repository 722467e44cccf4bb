"""`PausableClock`: a clock that stands still while an engine is frozen.

    engine         answers ── asleep, takes new weights ── answers
    its clock      0 ───── 5                               5 ──────
    an episode's   that of the loop, but it stands still while the episode waits for this engine

A deadline on such a clock (`deadline(..., clock=...)`) has as many seconds left after a pause as
before it.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agentrl.flow.clock import now


class PausableClock:
    """Seconds of loop time, without those in which the clock was held.

    It belongs to one event loop. Not for other threads.
    """

    __slots__ = ("_followers", "_held_since", "_holds", "_lost", "_released")

    def __init__(self) -> None:
        self._holds = 0
        self._held_since = 0.0
        self._lost = 0.0
        self._followers: dict[PausableClock, int] = {}
        self._released: list[Callable[[], None]] = []

    @property
    def is_held(self) -> bool:
        """True while the clock stands still."""
        return self._holds > 0

    def now(self) -> float:
        """Seconds on this clock. Only differences mean something."""
        return (self._held_since if self._holds else now()) - self._lost

    def hold(self) -> None:
        """Let the clock stand still until `release` was called as often as this."""
        self._holds += 1
        if self._holds == 1:
            self._held_since = now()
            for follower, times in self._followers.items():
                for _ in range(times):
                    follower.hold()

    def release(self) -> None:
        """Undo one `hold`."""
        self._holds -= 1
        if self._holds:
            return
        self._lost += now() - self._held_since
        for follower, times in self._followers.items():
            for _ in range(times):
                follower.release()
        released, self._released = self._released, []
        for call in released:
            call()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside the block, the clock stands still."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    @contextmanager
    def following(self, leader: "PausableClock | None") -> Iterator[None]:
        """Inside the block, this clock stands still whenever the leader does."""
        if leader is None:
            yield
            return
        followers = leader._followers
        followers[self] = followers.get(self, 0) + 1
        if leader.is_held:
            self.hold()
        try:
            yield
        finally:
            followers[self] -= 1
            if not followers[self]:
                del followers[self]
            if leader.is_held:
                self.release()

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        """Call `call` when this clock shows `when`, or later: it may have been held again."""
        if self._holds:
            self._released.append(lambda: self.call_at(when, call))
            return
        loop = asyncio.get_running_loop()
        loop.call_at(loop.time() + when - self.now(), call)
