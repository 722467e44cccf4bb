"""Groups of workers: N replicas of a role, called by the names of their methods, wherever they live.

A worker is any object; `make(rank)` makes it where it shall live. Calls to one worker run one after another, in the
order they were made, and a caller that is cancelled does not stop the call. `agentrl/cluster/local_workers.py` starts
groups on this machine.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.flow import Channel, Flow

Make = Callable[[int], object]
"""Makes the worker of a rank. It is sent to where the worker lives, so it has to pickle."""


class Worker(Protocol):
    """One replica."""

    async def call(self, method: str, *args: Any) -> Any:
        """What the worker's method returns, or raises.

        Raises:
            WorkerDiedError: the worker is gone; whether the call took effect is not known.
        """
        ...

    async def stop(self) -> None:
        """End it, by force where it does not end by itself. May be called more than once."""
        ...


class StartWorkers(Protocol):
    """What starts groups: the seam between those who need workers and where these live."""

    async def __call__(self, role: str, make: Make, count: int) -> "WorkerGroup":
        """Start `count` workers; when this returns, all have been made.

        Raises:
            WorkerDiedError: one did not come up. What `make` raises comes through as it is.
        """
        ...


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """The replicas of a role, in order of rank."""

    role: str
    workers: Sequence[Worker]

    def __len__(self) -> int:
        return len(self.workers)

    async def one(self, method: str, *args: Any, rank: int = 0) -> Any:
        """Call one worker."""
        return await self.workers[rank].call(method, *args)

    async def all(self, method: str, *args: Any) -> list[Any]:
        """Call all workers with the same arguments; the results by rank."""
        return await self.scatter(method, [args] * len(self.workers))

    async def scatter(self, method: str, args_by_rank: Sequence[Sequence[Any]]) -> list[Any]:
        """Call each worker with arguments of its own; the results by rank.

        The first error is raised at once: the other workers may wait for ever for the one that failed.
        """
        if len(args_by_rank) != len(self.workers):
            raise ValueError(f"{len(self.workers)} workers but arguments for {len(args_by_rank)}")
        async with Flow(f"{self.role}.{method}") as flow:
            calls = [
                flow.start(worker.call(method, *args), name=str(rank))
                for rank, (worker, args) in enumerate(zip(self.workers, args_by_rank, strict=True))
            ]
        return [call.result() for call in calls]

    async def stream(self, method: str, items: Iterable[Any], into: Channel[tuple[int, Any]]) -> None:
        """Call the method once for each item, on whichever worker is idle; puts (index of the item, result) `into` a
        channel as they come, and returns after the last.
        """
        waiting = iter(enumerate(items))

        async def work(worker: Worker) -> None:
            for index, item in waiting:
                await into.put((index, await worker.call(method, item)))

        async with Flow(f"{self.role}.{method}") as flow:
            for rank, worker in enumerate(self.workers):
                flow.start(work(worker), name=str(rank))

    async def stop(self) -> None:
        """End all workers."""
        async with Flow(f"{self.role}.stop") as flow:
            for rank, worker in enumerate(self.workers):
                flow.start(worker.stop(), name=str(rank))


async def start_all(role: str, starting: Sequence[Awaitable[Worker]]) -> WorkerGroup:
    """A group of workers that come up at the same time; where one fails, the others are stopped."""
    started: list[Worker] = []

    async def start(coming: Awaitable[Worker]) -> Worker:
        worker = await coming
        started.append(worker)
        return worker

    try:
        async with Flow(f"{role}.start") as flow:
            tasks = [flow.start(start(coming), name=str(rank)) for rank, coming in enumerate(starting)]
    except BaseException:
        await WorkerGroup(role, started).stop()
        raise
    return WorkerGroup(role, [task.result() for task in tasks])
