"""Groups of workers: N replicas of a role, called by the names of their methods, wherever they live.

A worker is any object; `make(rank)` makes it where it shall live. Calls to one worker run one after another, in the
order they were made, and a caller that is cancelled does not stop the call. A worker holds a lease: it gives a sign of
life all the time, and one that gives none for `lease` seconds (it is stopped, its machine has vanished) is as good as
dead, and said to be. `agentrl/cluster/processes.py` starts workers on this machine,
`agentrl/cluster/ray_actors.py` on a cluster.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from pydantic import Field

from agentrl.errors import AgentRLError, WorkerDiedError
from agentrl.flow import Flow, Retries
from agentrl.placement.device_map import DeviceMap
from agentrl.placement.devices import Inventory
from agentrl.plugins import Component
from agentrl.protocols import Engine, Settings

logger = logging.getLogger(__name__)

Make = Callable[[int], object]
"""Makes the worker of a rank. It is sent to where the worker lives, so it has to pickle."""


class Worker(Protocol):
    """One replica."""

    async def call(self, method: str, *args: Any) -> Any:
        """What the worker's method returns, or raises.

        Raises:
            WorkerDiedError: the worker is gone, or its lease has lapsed; whether the call took effect is not known.
        """
        ...

    async def check(self) -> None:
        """Returns if it lives.

        Raises:
            WorkerDiedError: it is gone, or its lease has lapsed.
        """
        ...

    async def stop(self) -> None:
        """End it, by force where it does not end by itself. May be called more than once."""
        ...


LEASE_SECONDS = 30.0
"""How long a worker may give no sign of life, by default."""

START_SECONDS = 120.0
"""How long a worker may take to begin: a fresh interpreter on a busy machine, a place on a busy cluster."""

START_ATTEMPTS = 8
"""How often a worker that is to replace another may die before it is made: for about a minute, with the pauses."""

_NEWS_SECONDS = 0.5
"""A lost connection may be known before the death that it was lost by."""

StartWorker = Callable[[str, Make, int], Awaitable[Worker]]
"""Starts the worker of a role, by `make`, for a rank. Raises as `StartWorkers`."""


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

        The first error is raised at once: the other workers may wait for ever for the one that failed. But where a
        worker has died, that is the error, whatever the others say of the connection that they have lost.
        """
        if len(args_by_rank) != len(self.workers):
            raise ValueError(f"{len(self.workers)} workers but arguments for {len(args_by_rank)}")
        try:
            async with Flow(f"{self.role}.{method}") as flow:
                calls = [
                    flow.start(worker.call(method, *args), name=str(rank))
                    for rank, (worker, args) in enumerate(zip(self.workers, args_by_rank, strict=True))
                ]
        except AgentRLError:
            raise
        except Exception:
            await asyncio.sleep(_NEWS_SECONDS)
            for worker in self.workers:
                await worker.check()
            raise
        return [call.result() for call in calls]

    async def stop(self) -> None:
        """End all workers."""
        async with Flow(f"{self.role}.stop") as flow:
            for rank, worker in enumerate(self.workers):
                flow.start(worker.stop(), name=str(rank))


class ClusterSettings(Settings):
    """Settings of every cluster."""

    engines: int = Field(default=1, ge=1)
    """Replicas of the engine."""
    env_workers: int = Field(default=0, ge=0)
    """Processes that play the environments; 0 plays them where the run is."""
    reward_workers: int = Field(default=0, ge=0)
    """Processes that judge by rules; 0 has `rollout.rules.workers` of them where the run is."""
    lease: float = Field(default=LEASE_SECONDS, gt=0)
    """Seconds for which a worker may give no sign of life, before it is given up and replaced."""
    restarts: int = Field(default=8, ge=0)
    """How often the trainer may be restarted after the death of a rank, without completing a step in between."""


class Cluster(Protocol):
    """Where workers live: the seam behind `cluster=local` and `cluster=ray`. An async context manager."""

    @property
    def config(self) -> ClusterSettings:
        """Its settings, and more where it has more."""
        ...

    @property
    def start(self) -> StartWorkers:
        """Starts groups."""
        ...

    @property
    def start_one(self) -> StartWorker:
        """Starts a worker in a process of its own."""
        ...

    @property
    def spans_machines(self) -> bool:
        """Whether a worker may live on another machine than this."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    def engines(self, chosen: Component, model: Path) -> Sequence[Callable[[], Engine]]:
        """What makes each replica of an engine that serves the model in `model`; called again when one has died."""
        ...

    def gpus(self) -> Inventory | None:
        """The GPUs that it can give out; None where it has none, or gives out none."""
        ...

    def placed(self, devices: DeviceMap) -> AbstractAsyncContextManager[None]:
        """While the block lasts, engines and trainers are started where the map says.

        Raises:
            ConfigError: the devices are not free.
        """
        ...


async def start_all(role: str, starting: Sequence[Awaitable[Worker]]) -> WorkerGroup:
    """A group of workers that come up at the same time; where one fails, the others are stopped.

    Raises:
        WorkerDiedError: one has died, or several have at once, as on a node that was lost.
    """
    started: list[Worker] = []

    async def start(coming: Awaitable[Worker]) -> Worker:
        worker = await coming
        started.append(worker)
        return worker

    try:
        async with Flow(f"{role}.start") as flow:
            tasks = [flow.start(start(coming), name=str(rank)) for rank, coming in enumerate(starting)]
    except BaseException as error:
        await WorkerGroup(role, started).stop()
        died = error.subgroup(WorkerDiedError) if isinstance(error, BaseExceptionGroup) else None
        if died is not None:
            raise died.exceptions[0] from error
        raise
    return WorkerGroup(role, [task.result() for task in tasks])


async def start_another(start: Callable[[], Awaitable[Worker]]) -> Worker:
    """Start the replacement of a dead worker, with retries: its machine may be lost too, which takes a while to notice.

    Raises:
        WorkerDiedError: it has died `START_ATTEMPTS` times before it was made.
    """
    for failures in range(1, START_ATTEMPTS):
        try:
            return await start()
        except WorkerDiedError as error:
            logger.warning("%s; it is started again", error)
            await asyncio.sleep(Retries.pause(failures))
    return await start()


async def under_lease(answer: "asyncio.Future[Any]", sign_of_life: Callable[[], Awaitable[None]], lease: float) -> Any:
    """The answer of a worker, if it lives until then: `sign_of_life` is called repeatedly, and raises if there was none
    for `lease` seconds. The worker finishes its answer even if the caller stops waiting.
    """
    answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may be given up before it is made
    while not (await asyncio.wait({answer}, timeout=lease / 3))[0]:
        await sign_of_life()
    return answer.result()


def own_address() -> str:
    """How other machines reach this one: the address it would use to talk to the outside. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address
