"""`Channel`: a bounded, observable queue between two stages."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from agentrl.errors import AgentRLError
from agentrl.flow.clock import now

T = TypeVar("T")


class ChannelClosedError(AgentRLError):
    """Nothing more can be put, or nothing is left to get."""


@dataclass(frozen=True, slots=True)
class ChannelStats:
    """A snapshot of a channel."""

    name: str
    """Its name."""
    capacity: int
    """Items that it holds at most."""
    depth: int
    """Items that it holds now."""
    puts: int
    """Items put so far."""
    gets: int
    """Items taken so far."""
    put_wait: float
    """Seconds that producers have waited, in total."""
    get_wait: float
    """Seconds that consumers have waited, in total."""


class Channel(Generic[T]):
    """A first-in first-out queue of at most `capacity` items that can be closed.

    `put` waits while it is full, `get` while it is empty. After `close()`, `put` raises; `get`
    returns the remaining items and then raises, and `async for` ends there. Cancelling a waiter
    loses no item.
    """

    def __init__(self, name: str, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"channel {name!r} needs a capacity of at least 1, got {capacity}")
        self.name = name
        self.capacity = capacity
        self._items: deque[T] = deque()
        self._getters: deque[asyncio.Future[None]] = deque()
        self._putters: deque[asyncio.Future[None]] = deque()
        self._closed = False
        self._puts = self._gets = 0
        self._put_wait = self._get_wait = 0.0

    def __len__(self) -> int:
        return len(self._items)

    async def put(self, item: T) -> None:
        """Append `item`, waiting for room.

        Raises:
            ChannelClosedError: the channel is closed.
        """
        started = now()
        while len(self._items) >= self.capacity and not self._closed:
            await self._wait(self._putters)
        self._put_wait += now() - started
        if self._closed:
            raise ChannelClosedError(f"channel {self.name!r} is closed: nothing can be put into it")
        self._items.append(item)
        self._puts += 1
        self._wake(self._getters)

    async def get(self) -> T:
        """Take the oldest item, waiting for one.

        Raises:
            ChannelClosedError: the channel is closed and empty.
        """
        started = now()
        while not self._items and not self._closed:
            await self._wait(self._getters)
        self._get_wait += now() - started
        if not self._items:
            raise ChannelClosedError(f"channel {self.name!r} is closed and empty")
        return self._take()

    def drain(self) -> list[T]:
        """Take all present items, without waiting."""
        return [self._take() for _ in range(len(self._items))]

    def close(self) -> None:
        """Accept no more items, and wake all waiters."""
        self._closed = True
        for waiters in (self._getters, self._putters):
            while waiters:
                self._wake(waiters)

    async def __aiter__(self) -> AsyncIterator[T]:
        while True:
            try:
                yield await self.get()
            except ChannelClosedError:
                return

    def snapshot(self) -> ChannelStats:
        """Depth, counts and waiting times now."""
        return ChannelStats(
            self.name,
            self.capacity,
            len(self._items),
            self._puts,
            self._gets,
            self._put_wait,
            self._get_wait,
        )

    def _take(self) -> T:
        item = self._items.popleft()
        self._gets += 1
        self._wake(self._putters)
        return item

    async def _wait(self, waiters: deque[asyncio.Future[None]]) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._wake(waiters)  # our turn had come: pass it to the next waiter
            elif turn in waiters:
                waiters.remove(turn)
            raise

    @staticmethod
    def _wake(waiters: deque[asyncio.Future[None]]) -> None:
        while waiters:
            turn = waiters.popleft()
            if not turn.done():
                turn.set_result(None)
                return
