"""Cores of simulated runs, which compute one piece of work after the other."""

import asyncio
import heapq

from agentrl.flow import now


class Cores:
    """Cores that compute pieces of work in order of arrival, each one piece at a time.

    A piece whose caller has left is computed to its end: event loops and environments are not
    interrupted.
    """

    def __init__(self, count: int) -> None:
        self._free_at = [0.0] * count
        self._taken = 0.0

    async def compute(self, seconds: float) -> None:
        """Wait until a core has computed for so many seconds."""
        if seconds <= 0:
            return
        # Work is fixed, so the core that is free first and its end are known on arrival.
        ends = max(now(), self._free_at[0]) + seconds
        heapq.heapreplace(self._free_at, ends)
        self._taken += seconds
        await asyncio.sleep(ends - now())

    def load(self) -> float:
        """The share of the time since the clock's 0 in which the cores computed."""
        to_come = sum(max(0.0, free - now()) for free in self._free_at)
        return (self._taken - to_come) / (len(self._free_at) * now()) if now() else 0.0
