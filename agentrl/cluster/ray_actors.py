"""Workers as Ray actors, on this machine or on any machine of a cluster.

An actor gives a sign of life by answering on a thread other than the one that works. Ray is
imported when a worker is started, and must be running by then (`agentrl/cluster/ray_cluster.py`).
"""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from agentrl.cluster.call_sender import CallSender
from agentrl.cluster.environment import allocator_variables, chosen_allocator
from agentrl.cluster.ray_errors import errors_of_actor
from agentrl.cluster.ray_placement import RayPlacement, Unplaced
from agentrl.cluster.ray_process import RayProcess, Surroundings, end
from agentrl.cluster.supervised import START_SECONDS, start_deadline
from agentrl.cluster.workers import (
    LEASE_SECONDS,
    PLACE_SECONDS,
    Make,
    Worker,
    WorkerGroup,
    start_all,
    under_lease,
)
from agentrl.errors import WorkerDiedError


class _Host:
    """The actor: makes an object, and calls its methods by name.

    `allocator`: the driver's settings of torch's allocator.
    """

    def __init__(self, role: str, allocator: Mapping[str, str]) -> None:
        # The environment is the node's; nothing here has imported torch yet.
        os.environ.update(allocator_variables(role, os.environ, allocator))

    def begin(self, surroundings: Surroundings) -> RayProcess:
        surroundings.settle()
        return RayProcess.own()

    def make(self, make: Make, rank: int) -> None:
        self._made = make(rank)

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._made, method)(*args)

    def beat(self) -> None:
        """Return, as a sign of life."""


@dataclass(frozen=True, slots=True)
class RayWorkers:
    """Starts workers with Ray, on the nodes and devices that `placement` chooses."""

    placement: RayPlacement = field(default_factory=Unplaced)
    lease: float = LEASE_SECONDS
    start_seconds: float = START_SECONDS

    async def __call__(self, role: str, make: Make, count: int) -> WorkerGroup:
        """See `StartWorkers`."""
        ranks = [self._start(role, make, rank, count) for rank in range(count)]
        return await start_all(role, ranks)

    async def one(self, role: str, make: Make, rank: int) -> Worker:
        """See `StartWorker`."""
        return await self._start(role, make, rank)

    async def _start(self, role: str, make: Make, rank: int, count: int = 0) -> Worker:
        """Start a worker, of a group of `count` ranks or of none."""
        import ray

        remote: Any = ray.remote
        # Its name in Ray's dashboard, `ray list actors` and `ps`.
        named = type(f"{role}_{rank}", (_Host,), {})
        host = remote(max_restarts=0, concurrency_groups={"beside": 1})(named)
        worker = RayWorker(
            role,
            rank,
            host.options(**self.placement.options(role, rank, count)).remote(
                role, chosen_allocator(os.environ)
            ),
            self.lease,
        )
        try:
            worker.process = await worker.ask(worker.actor.begin.remote(Surroundings.own()))
            async with start_deadline(f"{role} {rank}", self.start_seconds):
                await worker.ask(worker.actor.make.remote(make, rank))
            worker.made = True
        except BaseException:
            await worker.stop()
            raise
        return worker


@dataclass(slots=True)
class RayWorker:
    """One actor."""

    role: str
    rank: int
    actor: Any
    lease: float
    process: RayProcess | None = None
    made: bool = False
    calls: CallSender = field(init=False)

    def __post_init__(self) -> None:
        self.calls = CallSender(self.role, self.rank)

    @property
    def pid(self) -> int:
        """Id of the actor's process; 0 before it has one."""
        return self.process.pid if self.process else 0

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the object in the actor. Ray pickles the arguments where it is asked."""
        return await self.ask(await self.calls.send(self.actor.call.remote, method, *args))

    async def ask(self, answer: Any) -> Any:
        """Wait for the value of a Ray reference.

        Raises:
            WorkerDiedError: the actor is gone, or gives no sign of life.
        """
        with errors_of_actor(partial(WorkerDiedError, self.role, self.rank)):
            return await under_lease(asyncio.wrap_future(answer.future()), self.check, self.lease)

    async def check(self) -> None:
        """See `Worker.check`. Another thread of the actor must answer."""
        beat = self.actor.beat.options(concurrency_group="beside").remote()
        patience = self.lease if self.made else PLACE_SECONDS
        try:
            # Not `wait_for`: before Python 3.12 it loses a cancellation that arrives together with
            # the answer.
            with errors_of_actor(partial(WorkerDiedError, self.role, self.rank)):
                async with asyncio.timeout(patience):
                    await asyncio.wrap_future(beat.future())
        except TimeoutError as error:
            why = f"its process {self.pid} gave no sign of life for {patience:g} s (cluster.lease)"
            if not self.process:
                why = (
                    f"Ray found no place for it in {patience:g} s; `ray status` shows what is free"
                )
            raise WorkerDiedError(self.role, self.rank, why) from error

    async def stop(self) -> None:
        """Kill the actor."""
        self.calls.stop()
        await end(self.actor, self.process)
