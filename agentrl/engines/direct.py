"""`DirectAccess`: which replicas of a router rollout workers may ask themselves, and what workers
report of their requests there.

    Router ── offer ─▶ DirectAccess ── doors ─▶ workers ══ requests ═▶ EngineDoor of a replica
           ◀────────────── note_direct ────────

Where something goes wrong, the router is asked: a worker whose replica dies sends the request there
again. The router finds the requests that kill engines among those that it has sent itself. So after
a death it offers no doors until a while has passed without another one and it suspects no request.
Once it has set a request aside, it never offers doors again.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable

from agentrl.cluster.engine_door import Doors
from agentrl.flow import Suspicion, now
from agentrl.net.link import Door

CALM_SECONDS = 60.0
"""After a death, all requests go through the router for at least so long."""


class DirectAccess:
    """See the module. `suspicion`: that of the router."""

    def __init__(self, suspicion: Suspicion) -> None:
        self._suspicion = suspicion
        self._listener: Callable[[Doors], None] | None = None
        self._offered: Doors = ()
        self._live = defaultdict[Door, dict[int, int]](dict)
        self._calm_at = 0.0

    @property
    def is_followed(self) -> bool:
        """True if there are workers that may use doors."""
        return self._listener is not None

    def follow(self, listener: Callable[[Doors], None]) -> None:
        """Call `listener` with the doors at each change from now on."""
        self._listener = listener

    def offer(self, doors: Doors) -> None:
        """Workers may use these doors and no others, unless there is a reason to use none."""
        if now() < self._calm_at or self._suspicion.is_open or self._suspicion.set_aside:
            doors = ()
        if self._listener is not None and doors != self._offered:
            self._offered = doors
            self._listener(doors)

    def live(self, door: Door | None) -> int:
        """Requests that workers have at a door, by their last reports."""
        return sum(self._live[door].values()) if door is not None and door in self._live else 0

    def note(self, rank: int, door: Door, live: int) -> None:
        """Note a report: the worker of this rank has so many requests at a door."""
        self._live[door][rank] = live

    def forget_worker(self, rank: int) -> None:
        """Note that the worker of this rank has no requests any more."""
        for by_rank in self._live.values():
            by_rank.pop(rank, None)

    def died(self, door: Door | None) -> bool:
        """Note that the replica behind a door is dead. True if it may have died of a request that
        the router does not know.
        """
        if door is None:
            return False
        self._calm_at = now() + CALM_SECONDS
        unknown = door in self._offered or self.live(door) > 0
        self._live.pop(door, None)
        return unknown

    async def until_calm(self) -> None:
        """Wait until doors may be offered again."""
        while (seconds := self._calm_at - now()) > 0 or self._suspicion.is_open:  # noqa: ASYNC110
            await asyncio.sleep(max(seconds, 1.0))


__all__ = ["CALM_SECONDS", "DirectAccess"]
