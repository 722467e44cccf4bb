"""`InlineWorkers`: a fake of the places where workers run, for tests of what works with them."""

import asyncio
import pickle
from collections.abc import Mapping
from typing import Any

from agentrl.cluster.workers import Make
from agentrl.errors import WorkerDiedError


class InlineWorker:
    """`Worker` on the event loop of its caller, which may call async methods of the object only.
    `instead`: those that stand for others.
    """

    def __init__(self, role: str, rank: int, made: Any, instead: Mapping[str, str]) -> None:
        self.role = role
        self.rank = rank
        self.made = made
        self._instead = instead
        self._calls: set[asyncio.Task[Any]] = set()
        self._dead = False

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method, or what stands for it."""
        self._check_alive()
        called = getattr(self.made, self._instead.get(method, method))
        call = asyncio.get_running_loop().create_task(called(*args))
        self._calls.add(call)
        try:
            await asyncio.wait({call})
        finally:
            self._calls.discard(call)
            call.cancel()
        # A killed worker's death is the error, and not that its call was cancelled.
        self._check_alive()
        return call.result()

    async def check(self) -> None:
        """See `Worker.check`."""
        self._check_alive()

    def kill(self) -> None:
        """End the worker as the death of its process does: its calls are cancelled."""
        self._dead = True
        for call in self._calls:
            call.cancel()

    async def stop(self) -> None:
        """See `Worker.stop`."""
        self.kill()
        if self._calls:
            await asyncio.wait(self._calls)

    def _check_alive(self) -> None:
        if self._dead:
            raise WorkerDiedError(self.role, self.rank, "it was killed")


class InlineWorkers:
    """`StartWorker` of inline workers, which it keeps. `instead`: see `InlineWorker`.

    workers = RolloutWorkers(InlineWorkers(serve="play_for"), parts, 2)
    """

    def __init__(self, **instead: str) -> None:
        self._instead = instead
        self.started: list[InlineWorker] = []
        """All workers so far, in the order of their start."""

    async def __call__(self, role: str, make: Make, rank: int) -> InlineWorker:
        """Start a worker. What makes it goes through pickle, as on the way to a process."""
        made = pickle.loads(pickle.dumps(make))(rank)
        self.started.append(InlineWorker(role, rank, made, self._instead))
        return self.started[-1]
