"""`EngineDoor`: where rollout workers ask an engine themselves, past the controller.

    worker ══ requests ═▶ EngineDoor ─▶ engine          one socket for each worker and engine
    controller ── hold, drained, release ─▶ EngineDoor  around new weights

The controller decides who may ask (`agentrl/engines/direct.py`); the door is in the process of the
engine.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from agentrl.cluster.engine_link import EngineServer, ReplicaAnswer
from agentrl.cluster.ray_prompts import HeldPrompts
from agentrl.flow import Flow
from agentrl.net.link import Door, MessageLink, open_door

if TYPE_CHECKING:
    from agentrl.protocols import Engine, GenerateRequest

Doors = tuple[Door, ...]
"""The doors of the replicas of an engine that may be asked by workers."""


class EngineDoor:
    """Requests that arrive at a door of this process, for `engine`. It listens from `open` on.

    While it is held, new requests wait, and those that `engine.interrupt` ends are marked as
    interrupted: the worker then asks for the rest of them.
    """

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._prompts = defaultdict[str, HeldPrompts](HeldPrompts)
        self._live = 0
        self._holds = 0
        self._released = asyncio.Event()
        self._released.set()
        self._idle = asyncio.Event()
        self._flow = Flow("engine door")
        self._links: set[MessageLink] = set()
        self._opened = AsyncExitStack()
        self._door: Door | None = None

    async def open(self, host: str) -> Door:
        """Listen at an address of this machine. Repeating it changes nothing.

        Raises:
            OSError: nothing can listen there.
        """
        if self._door is None:
            await self._opened.enter_async_context(self._flow)
            self._opened.callback(self._end)
            self._door = await self._opened.enter_async_context(open_door(host, self._admit))
        return self._door

    async def close(self) -> None:
        """Listen no longer, and give up what was asked here."""
        await self._opened.aclose()

    def hold(self) -> None:
        """Let new requests wait."""
        self._holds += 1
        self._released.clear()

    def release(self) -> None:
        """Let requests pass."""
        self._released.set()

    async def drained(self) -> None:
        """Return when the engine works on nothing that was asked here."""
        while self._live:
            self._idle.clear()
            await self._idle.wait()

    def _end(self) -> None:
        self._flow.cancel()
        for link in self._links:
            link.close()

    def _admit(self, rank: int, link: MessageLink) -> Callable[[Any], bool]:
        served = EngineServer(link, self._flow, self._generate, self._prompts, "an engine")
        self._links.add(link)
        link.closed.add_done_callback(lambda _: self._links.discard(link))
        link.closed.add_done_callback(lambda _: served.end())
        return served.take

    async def _generate(self, name: str, request: "GenerateRequest") -> ReplicaAnswer:
        while not self._released.is_set():
            await self._released.wait()
        holds = self._holds  # a count: the door may be held and released before the answer
        self._live += 1
        try:
            completion = await self._engine.generate(request)
        finally:
            self._live -= 1
            if not self._live:
                self._idle.set()
        return ReplicaAnswer(
            completion, completion.finish_reason == "abort" and holds != self._holds
        )


@runtime_checkable
class OffersDoors(Protocol):
    """An engine with replicas, of which workers may ask some themselves."""

    def follow_doors(self, told: Callable[[Doors], None]) -> None:
        """Open the doors of the replicas. `told` gets those that may be used, now and after each
        change.
        """
        ...

    def note_direct(self, rank: int, door: Door, live: int, answers: int) -> None:
        """The worker of this rank has so many requests at a door, and got so many answers there
        since it said so last.
        """
        ...

    def forget_worker(self, rank: int) -> None:
        """This worker has no requests any more."""
        ...


__all__ = ["Doors", "EngineDoor", "OffersDoors"]
