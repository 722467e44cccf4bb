"""Groups of workers: N replicas of a role, called by method name, wherever they run.

A worker is any object; `make(rank)` makes it in the place where it will run. Calls to one worker
run one after another, in the order they were made; cancelling a caller does not stop the call. A
worker holds a lease: it regularly gives a sign of life, and after `lease` seconds without one (it
was suspended, or its machine has vanished) it is declared dead. `agentrl/cluster/processes.py`
starts workers on this machine, `agentrl/cluster/ray_actors.py` on a cluster.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from pydantic import Field

from agentrl.cluster.supervised import RESTARTS, START_SECONDS, STARTS_PER_NODE
from agentrl.errors import AgentRLError, WorkerDiedError
from agentrl.flow import Flow, span
from agentrl.placement.device_map import DeviceMap
from agentrl.placement.inventory import Inventory
from agentrl.plugins import Component
from agentrl.protocols import Engine
from agentrl.settings.base import Settings

logger = logging.getLogger(__name__)

Make = Callable[[int], object]
"""Makes the worker of a rank. It is sent to the place where the worker runs, so it must be
picklable.
"""


class Worker(Protocol):
    """One replica."""

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the worker: return or raise what it does.

        Raises:
            WorkerDiedError: the worker is gone, or its lease has lapsed; it is unknown whether the
            call took effect.
        """
        ...

    async def check(self) -> None:
        """Return if the worker is alive.

        Raises:
            WorkerDiedError: the worker is gone, or its lease has lapsed.
        """
        ...

    async def stop(self) -> None:
        """End the worker, by force if it does not end by itself. May be called more than once."""
        ...


LEASE_SECONDS = 30.0
"""How long a worker may go without a sign of life, by default."""

PLACE_SECONDS = 120.0
"""How long a worker's process may take to begin: a fresh interpreter on a busy machine, a place on
a busy cluster.
"""

_NEWS_SECONDS = 0.5
"""How long to wait for news of a death after an error: a lost connection may be noticed before the
death behind it.
"""

StartWorker = Callable[[str, Make, int], Awaitable[Worker]]
"""Starts a worker, given its role, `make` and its rank. Raises the errors of `StartWorkers`."""


@dataclass(frozen=True, slots=True)
class InOwnProcess:
    """A `Make` of a worker that cannot share its process with another one, even if it is the only
    one of its group: as a rank of torch.distributed, of which a process is one.
    """

    make: Make

    def __call__(self, number: int) -> object:
        return self.make(number)


@dataclass(frozen=True, slots=True)
class Forked:
    """A `Make` of a worker whose process may be forked from one that has imported these modules.
    Where processes are not forked, as on a cluster, they import by themselves.
    """

    make: Make
    imports: tuple[str, ...]

    def __call__(self, number: int) -> object:
        return self.make(number)


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """The replicas of a role, in order of rank."""

    role: str
    workers: Sequence[Worker]

    def __len__(self) -> int:
        return len(self.workers)

    async def one(self, method: str, *args: Any, rank: int = 0) -> Any:
        """Call one worker."""
        with span(self.role, method, rank):
            return await self.workers[rank].call(method, *args)

    async def all(self, method: str, *args: Any) -> list[Any]:
        """Call all workers with the same arguments; the results by rank."""
        return await self.scatter(method, [args] * len(self.workers))

    async def scatter(self, method: str, args_by_rank: Sequence[Sequence[Any]]) -> list[Any]:
        """Call each worker with its own arguments; the results by rank.

        The first error is raised at once, because the other workers may wait forever for the one
        that failed. But if a worker has died, its death is raised, instead of the lost connections
        that the others report.
        """
        if len(args_by_rank) != len(self.workers):
            raise ValueError(f"{len(self.workers)} workers but arguments for {len(args_by_rank)}")
        try:
            async with Flow(f"{self.role}.{method}") as flow:
                calls = [
                    flow.start(self.one(method, *args, rank=rank), name=str(rank))
                    for rank, args in enumerate(args_by_rank)
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


StartWorkers = Callable[[str, Make, int], Awaitable[WorkerGroup]]
"""Starts a group, given its role, `make` and the number of workers: the seam between code that
needs workers and the place where they run. When it returns, all have been made. Raises
`WorkerDiedError` if one did not start; errors of `make` are raised unchanged.
"""


class ClusterSettings(Settings):
    """Settings of every cluster."""

    engines: int = Field(default=1, ge=1)
    """Replicas of the engine when the run starts or is resumed; `agentrl engines add RUN` changes
    their number."""
    env_workers: int = Field(default=0, ge=0)
    """Processes that run the environments; with 0, the controller runs them."""
    reward_workers: int = Field(default=0, ge=0)
    """Processes that evaluate rules; with 0, the controller has `rollout.rules.workers` of them."""
    lease: float = Field(default=LEASE_SECONDS, gt=0)
    """Seconds that a worker may go without a sign of life before it is given up and replaced."""
    restarts: int = Field(default=RESTARTS, ge=0)
    """How many times in a row an engine, a worker, or the trainer with all its ranks may be
    restarted without doing any work in between (an answer, an episode, a verdict, a step). After
    that, the run ends with the reason."""
    start_seconds: float = Field(default=START_SECONDS, gt=0)
    """Seconds that an engine, a worker or a rank may take to start, in which it loads its model."""
    starts_per_node: int = Field(default=STARTS_PER_NODE, ge=1)
    """How many engines may start at the same time on a machine, each of which reads its model from
    the same disk. The others wait, and their `start_seconds` begin after that. vLLM's engines that
    share a GPU must start one by one (1), since each measures its free memory."""

    @property
    def has_others(self) -> bool:
        """True if it has machines that other people set up: what is installed here says nothing of
        those.
        """
        return False


@dataclass(frozen=True, slots=True)
class EngineFactory:
    """Makes a replica of an engine, and again when it has died."""

    make: Callable[[], Engine]
    """Makes the engine, which is not entered yet."""
    node: str = ""
    """The machine that it will run on. Equal for two that share one."""

    def __call__(self) -> Engine:
        return self.make()


class Cluster(Protocol):
    """Where workers run: the seam behind `cluster=local` and `cluster=ray`. An async context
    manager.
    """

    @property
    def config(self) -> ClusterSettings:
        """The settings; a cluster may have more than these."""
        ...

    @property
    def start(self) -> StartWorkers:
        """Starts groups."""
        ...

    @property
    def start_one(self) -> StartWorker:
        """Starts a worker in its own process."""
        ...

    @property
    def spans_machines(self) -> bool:
        """True if a worker may run on a machine other than this one."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    def engines(self, chosen: Component, model: Path) -> Sequence[EngineFactory]:
        """A factory for each replica of an engine that serves `model`; it is called again when a
        replica has died.
        """
        ...

    def another_engine(
        self, chosen: Component, model: Path, number: int
    ) -> AbstractAsyncContextManager[EngineFactory]:
        """A factory for one more engine, with a number that none has. Its place is held while the
        block lasts, also for its replacements.

        Raises:
            ConfigError: there is no place for it; says what is free.
        """
        ...

    def gpus(self) -> Inventory | None:
        """The GPUs that the cluster can assign; None if it has none, or assigns none. It asks each
        machine, which may take minutes.

        Raises:
            ConfigError: a machine does not have what the cluster counts there.
        """
        ...

    def placed(self, devices: DeviceMap) -> AbstractAsyncContextManager[None]:
        """While the block lasts, engines and trainers are started on the devices of the map.

        Raises:
            ConfigError: the devices are not free.
        """
        ...


async def start_all(role: str, starting: Sequence[Awaitable[Worker]]) -> WorkerGroup:
    """Start the workers of a group concurrently; if one fails, the others are stopped.

    Raises:
        WorkerDiedError: a worker has died, or several have at once, as when a node is lost.
    """
    started: list[Worker] = []

    async def start(coming: Awaitable[Worker]) -> Worker:
        worker = await coming
        started.append(worker)
        return worker

    try:
        async with Flow(f"{role}.start") as flow:
            tasks = [
                flow.start(start(coming), name=str(rank)) for rank, coming in enumerate(starting)
            ]
    except BaseException as error:
        await WorkerGroup(role, started).stop()
        died = error.subgroup(WorkerDiedError) if isinstance(error, BaseExceptionGroup) else None
        if died is not None:
            raise died.exceptions[0] from error
        raise
    return WorkerGroup(role, [task.result() for task in tasks])


async def under_lease(
    answer: "asyncio.Future[Any]", sign_of_life: Callable[[], Awaitable[None]], lease: float
) -> Any:
    """The answer of a worker, if it stays alive until then: `sign_of_life` is called repeatedly,
    and raises if there was none for `lease` seconds. The worker finishes its answer even if the
    caller stops waiting.
    """
    # The caller may not wait for it.
    answer.add_done_callback(lambda done: done.cancelled() or done.exception())
    while not (await asyncio.wait({answer}, timeout=lease / 3))[0]:
        await sign_of_life()
    return answer.result()
