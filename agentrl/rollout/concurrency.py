"""The limit on live episodes: a controller that follows the engine's load, and the slots
that it limits.

With too many live episodes, some only wait, grow old and fill the engine's KV cache; with too few,
the engine is idle while environments compute. So the limit starts from the requests that all
engines serve at the same time, grows while they have room, and shrinks immediately under pressure.
When engines are added or removed, it changes in proportion to their number. It grows slowly if
batches are full. If they stay partly empty, because episodes spend much of their time in their
environments, it grows by the missing share, and at most doubles in one step. After meeting pressure
at some limit, the controller avoids that limit for a time that doubles each time, which keeps it
from oscillating. It counts episodes, never seconds, so it behaves the same under both clocks.
"""

import asyncio
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import Self

from agentrl.rollout.staleness import Ticket

_FULL_KV_SHARE = 0.95
"""Share of the KV cache in use from which requests soon lose theirs."""
_ROOMY_KV_SHARE = 0.80
"""Share of the KV cache in use below which more episodes may begin."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The engine's load."""

    running: int
    """Requests in its batch."""
    waiting: int
    """Requests that wait for it."""
    kv_use: float = 0.0
    """Share of the KV cache in use."""
    preemptions: int = 0
    """Since the previous observation."""
    places: int = 0
    """Requests that fit into its batches; 0 if that is not known."""

    @property
    def pressed(self) -> bool:
        """Requests lose their KV or soon will, or more of them wait than run."""
        return self.preemptions > 0 or self.kv_use >= _FULL_KV_SHARE or self.waiting > self.running

    @property
    def roomy(self) -> bool:
        """Hardly any request waits for the batch, and memory is left."""
        return (
            self.waiting * 16 <= self.running
            and self.kv_use < _ROOMY_KV_SHARE
            and self.preemptions == 0
        )


@dataclass(frozen=True, slots=True)
class ConcurrencyController:
    """The controller's state; `observe` returns the next state."""

    limit: int
    """Episodes that may run at once, in [`low`, `high`]."""
    low: int
    high: int
    met: int
    """The limit at which the engine was last overloaded; `high` + 1: never. The limit is capped at
    7/8 of it until the engine has had room there for `patience` observations."""
    patience: int = 8
    """Observations; doubled with each overload."""
    quiet: int = 0
    """Observations in a row with room at the cap."""

    @classmethod
    def between(cls, low: int, high: int) -> Self:
        """A new controller whose limit is `low`."""
        low = min(low, high)
        return cls(low, low, high, met=high + 1)

    def between_others(self, low: int, high: int) -> Self:
        """The next state, with other bounds, as when engines were added or removed.

        The limit grows or shrinks in proportion to `low`. Earlier overloads are forgotten, as they
        were those of other engines.
        """
        low = min(low, high)
        if (low, high) == (self.low, self.high):
            return self
        limit = min(max(low, self.limit * low // self.low), high)
        return replace(self, limit=limit, low=low, high=high, met=high + 1, quiet=0)

    def observe(self, load: EngineLoad, live: int) -> Self:
        """The next state, after observing the engine's `load` with `live` episodes running."""
        if load.pressed:
            met = max(self.low, min(self.limit, live))
            return replace(
                self,
                limit=max(self.low, met * 3 // 4),
                met=met,
                patience=self.patience * 2,
                quiet=0,
            )
        if not load.roomy or live < self.limit:  # busy enough, or not limited by us
            return self
        ceiling = self.high if self.met > self.high else max(self.low, self.met * 7 // 8)
        # Below the ceiling, grow. At it, wait until the engine has had room for `patience`
        # observations in a row, and then forget the overload.
        if self.limit < ceiling:
            return replace(self, limit=min(ceiling, self._larger_limit(load)))
        if self.quiet + 1 < self.patience or ceiling == self.high:
            return replace(self, quiet=min(self.quiet + 1, self.patience))
        return replace(self, met=self.high + 1, quiet=0)

    def _larger_limit(self, load: EngineLoad) -> int:
        """An eighth more, or as many episodes as fill the engines' batches if the share of episodes
        that wait for their environments stays the same.

        Example: with 64 live episodes, 16 requests in the engines and 64 places, three quarters of
        the episodes are in their environments, and 256 would fill the batches. The limit becomes
        128, as it doubles at most.
        """
        slightly_more = self.limit + max(1, self.limit // 8)
        to_fill_batches = self.limit * load.places // max(1, load.running + load.waiting)
        return max(slightly_more, min(to_fill_batches, 2 * self.limit))


class EpisodeSlots:
    """Lets at most `limit` episodes run at once. Earlier tickets go first; a lower limit ends no
    running episode.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._arrivals = 0
        self._waiting: list[tuple[Ticket, int, asyncio.Future[None]]] = []

    @property
    def free(self) -> bool:
        """A slot is free, and no episode waits for one."""
        return self.taken < self.limit and not self._waiting

    def reserve(self, wanted: int) -> int:
        """Take up to `wanted` free slots at once; returns how many."""
        reserved = min(wanted, self.limit - self.taken) if self.free else 0
        self.taken += reserved
        return reserved

    @property
    def queued(self) -> int:
        """Episodes that wait for a slot."""
        return len(self._waiting)

    async def acquire(self, ticket: Ticket) -> None:
        """Wait for a slot."""
        if self.free:
            self.taken += 1
            return
        self._arrivals += 1
        entry = (ticket, self._arrivals, asyncio.get_running_loop().create_future())
        heappush(self._waiting, entry)
        try:
            await entry[2]
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
                heapify(self._waiting)
            elif not entry[2].cancelled():  # the slot was granted at the same moment
                self.release()
            raise

    def release(self) -> None:
        """Return a slot."""
        self.taken -= 1
        self.grant()

    def grant(self) -> None:
        """Give free slots to waiting episodes."""
        while self._waiting and self.taken < self.limit:
            _, _, slot = heappop(self._waiting)
            if not slot.done():
                self.taken += 1
                slot.set_result(None)
