"""Runs rules on workers of the cluster; each worker has a `RulePool` of one process on its machine.

The worker's pool kills a rule that misses its deadline. A worker that dies or stops responding is
replaced while the others continue.
"""

import asyncio
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

from agentrl.cluster.supervised import RESTARTS, Supervised
from agentrl.cluster.worker_registry import WorkerCount, register_workers
from agentrl.cluster.workers import StartWorker, Worker
from agentrl.errors import WorkerDiedError
from agentrl.flow import Flow
from agentrl.scoring.config import RulePoolConfig
from agentrl.scoring.rule_pool import RuleDiedError, RulePool


class RuleWorker:
    """The worker: runs the calls that it receives, one at a time."""

    def __init__(self, config: RulePoolConfig, imports: list[str], rank: int) -> None:
        self._loop = asyncio.Runner()
        self._pool = RulePool(config.model_copy(update={"workers": 1, "cache": 0}), imports)

    def ask(self, name: str, call: bytes) -> Any:
        """Return the verdict of a call, computed in this worker's own pool."""
        return self._loop.run(self._pool.ask(name, call))

    def idle(self) -> None:
        """Return when all earlier calls have been answered."""


class RuleWorkers(RulePool):
    """A `RulePool` whose processes are those of `count` workers of the role "reward"; entering it
    starts them. `restarts`: how often in a row the worker of a rank may be replaced without a
    verdict in between.

    Raises:
        WorkerDiedError: while it is open: the workers of a rank keep dying.
    """

    def __init__(
        self,
        start: StartWorker,
        count: int,
        config: RulePoolConfig | None = None,
        imports: Iterable[str] = (),
        *,
        restarts: int = RESTARTS,
    ) -> None:
        super().__init__(config, imports)
        self._start_worker = start
        self._supervised = [
            Supervised(f"reward {rank}", "a verdict", allowed=restarts) for rank in range(count)
        ]
        self._flow = Flow("rules")
        self._idle: asyncio.Queue[tuple[int, Worker]] = asyncio.Queue()
        self._workers: dict[int, Worker] = {}
        self._registration = ExitStack()

    def worker_count(self) -> WorkerCount:
        """The number of workers that are alive. Any thread may ask."""
        restarts = sum(worker.restarts for worker in self._supervised)
        count = len(self._supervised)
        return WorkerCount("reward", len(self._workers), count, restarts, self.suspicion.set_aside)

    async def __aenter__(self) -> Self:
        await self._flow.__aenter__()
        self._registration.enter_context(register_workers(self.worker_count))
        for rank in range(len(self._supervised)):
            self._flow.start(self._start_first(rank), name=str(rank))
        return self

    async def __aexit__(self, *exc: Any) -> None:
        try:
            self._flow.cancel()
            await self._flow.__aexit__(*exc)
        finally:
            self._registration.close()
            while self._workers:
                await self._workers.popitem()[1].stop()

    async def ask(self, name: str, call: bytes) -> Any:
        """Return the verdict of a call, computed by the next idle worker.

        Raises:
            RewardError: also if the worker has died.
        """
        rank, worker = await self._idle.get()
        try:
            verdict = await worker.call("ask", name, call)
        except WorkerDiedError as error:
            raise RuleDiedError(f"{name}: {error}") from error
        else:
            self._supervised[rank].progress()
            return verdict
        finally:
            self._flow.start(self._return(rank, worker), name=str(rank))

    async def _return(self, rank: int, worker: Worker) -> None:
        """Mark the worker idle once it has answered, which takes up to a deadline if the caller
        stopped waiting.
        """
        try:
            await worker.call("idle")
            self._idle.put_nowait((rank, worker))
        except WorkerDiedError as error:
            del self._workers[rank]
            await worker.stop()
            supervised = self._supervised[rank]
            await supervised.recover(error, partial(_give_up, rank, error))
            start = partial(self._start_rank, rank)
            self._begin(rank, await supervised.start_again(start, WorkerDiedError))

    async def _start_first(self, rank: int) -> None:
        self._begin(rank, await self._start_rank(rank))

    async def _start_rank(self, rank: int) -> Worker:
        return await self._start_worker(
            "reward", partial(RuleWorker, self._config, self.imports), rank
        )

    def _begin(self, rank: int, worker: Worker) -> None:
        self._workers[rank] = worker
        self._idle.put_nowait((rank, worker))


def _give_up(rank: int, error: WorkerDiedError, reason: str) -> WorkerDiedError:
    return WorkerDiedError("reward", rank, f"{error.why}; it was {reason}")
