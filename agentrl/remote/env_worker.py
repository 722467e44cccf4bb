"""Environments on workers of the cluster. Each worker runs a server like `agentrl serve`; a dead
one is replaced.

The cluster starts and supervises the workers. Episodes use the same link as to any server, so a
step needs no cluster call. An episode whose worker dies fails and is repeated.
"""

import asyncio
import logging
import multiprocessing
import secrets
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from agentrl.cluster.memory_pressure import prefer_to_kill
from agentrl.cluster.supervised import RESTARTS, Supervised, start_deadline
from agentrl.cluster.worker_registry import WorkerCount, register_workers
from agentrl.cluster.workers import PLACE_SECONDS, Forked, StartWorker, Worker
from agentrl.errors import WorkerDiedError
from agentrl.flow import Flow, note_played, now, waiting_for
from agentrl.hosting.client_options import ClientOptions
from agentrl.protocols.env import Env, Isolation, ResetResult
from agentrl.remote.choice import UnreachableError
from agentrl.remote.client import RemoteEnv, suspicion
from agentrl.remote.link import end_link
from agentrl.remote.server import EnvServer
from agentrl.remote.sessions import ServerLimits

logger = logging.getLogger(__name__)

MakeEnvs = Callable[[], Callable[[], Env]]
"""Called on the worker: finds an environment there and returns its factory."""
_PAUSE_SECONDS = 0.2
"""Pause before the next attempt to reset: the death of a worker may not have been noticed yet."""
_IDLE_SECONDS = 1e9
"""Longer than any run."""
_POLL_SECONDS = 0.5
"""How long each call `serves` waits for the end of a worker's server."""
_END_SECONDS = 10.0
"""Time for a worker to close its environments, in seconds; then it is killed."""
_IMPORTS = ("agentrl.remote.env_worker",)
"""What every worker needs, and takes a second to import."""
_PATIENCE_SECONDS = 10.0
"""Time for which a reset waits for a worker, in seconds; less than the deadline of a reset."""
_ALL_DEAD = "the workers of the environments are starting again"
_FIRST_ATTEMPTS = 3
"""The run fails when this many workers of a rank die before any episode has begun."""


def worker_limits(limits: ServerLimits) -> ServerLimits:
    """The same limits for a worker, which ends no session for being idle: an episode may wait as
    long as training takes for an engine that sleeps meanwhile. Those of a run that is gone end
    after `reconnect_seconds`.
    """
    return limits.model_copy(update={"idle_seconds": _IDLE_SECONDS})


class EnvWorker:
    """The worker: serves environments, in a thread, to clients that have the token. `isolation`,
    `options` and `pictures` are those of `EnvServer`.
    """

    def __init__(
        self,
        make: MakeEnvs,
        limits: ServerLimits,
        host: str,
        token: str,
        rank: int,
        *,
        isolation: Isolation | None = None,
        options: ClientOptions.Config | None = None,
        pictures: bool = False,
    ) -> None:
        self._server = EnvServer(
            make(),
            name=f"env-{rank}",
            host=host,
            token=token,
            limits=limits,
            isolation=isolation,
            options=options,
            pictures=pictures,
            on_start=self._note_loop,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._server.run, name="env-server", daemon=True)
        self._listening = threading.Event()

    def open(self) -> str:
        """Start serving, and return the address.

        Raises:
            RuntimeError: the server cannot listen.
        """
        if multiprocessing.parent_process() is not None:  # a worker of Ray is preferred already
            prefer_to_kill()
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError("the environment server did not start")
            self._listening.wait(0.01)
        return self._server.url

    def _note_loop(self, url: str) -> None:
        self._loop = asyncio.get_running_loop()

    def note_played(self) -> None:
        """Note that the run has played episodes, on other workers perhaps."""
        assert self._loop is not None, "it has been opened"
        self._loop.call_soon_threadsafe(note_played)

    def serves(self, seconds: float) -> bool:
        """True if the server goes on for this time."""
        self._thread.join(seconds)
        return self._thread.is_alive()

    def end(self) -> None:
        """End the server, which closes its environments."""
        self._server.should_exit = True
        self._thread.join(_END_SECONDS)


@dataclass(frozen=True, slots=True)
class WorkerEnvs:
    """Makes environments on workers that are alive."""

    pool: "_Pool"
    token: str

    def __call__(self) -> Env:
        """Make an environment."""
        return _WorkerEnv(self.pool, self.token)

    def count(self) -> WorkerCount:
        """The number of workers that serve. Any thread may ask."""
        return self.pool.worker_count()


@asynccontextmanager
async def env_workers(
    start: StartWorker,
    count: int,
    make: Callable[[str, int], EnvWorker],
    *,
    restarts: int | None = RESTARTS,
) -> AsyncIterator[WorkerEnvs]:
    """A factory of environments on `count` workers, each made by `make(token, rank)`. `restarts`:
    how often in a row the worker of a rank may be replaced with no episode begun in between; None:
    without end, once one has served.

    Raises:
        ConfigError: there is no such environment.
        WorkerDiedError: the workers of a rank keep dying right after their start.
    """
    token = secrets.token_urlsafe()
    pool = _Pool(start, Forked(partial(make, token), _IMPORTS), token, count, restarts=restarts)
    with register_workers(pool.worker_count):
        async with Flow("env workers") as flow:
            for rank in range(count):
                flow.start(pool.keep(rank), name=str(rank))
            await pool.servers()
            yield WorkerEnvs(pool, token)
            flow.cancel()


class _WorkerEnv(RemoteEnv):
    """An environment on any worker that is alive."""

    def __init__(self, pool: "_Pool", token: str) -> None:
        super().__init__((), token)
        self._pool = pool

    async def servers(self) -> Sequence[str]:
        """The workers that are alive; waits for the first."""
        try:
            with waiting_for(_ALL_DEAD):
                async with asyncio.timeout(_PATIENCE_SECONDS):
                    return await self._pool.servers()
        except TimeoutError:
            raise UnreachableError(_ALL_DEAD) from None

    async def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetResult:
        """Begin an episode; if its worker dies meanwhile, retry on another.

        Raises:
            UnreachableError: no worker could be used for some time; the episode waits as in an
            outage.
        """
        began = now()
        while True:
            try:
                begun = await super().reset(seed=seed, options=options)
                self._pool.works(self.server)
                return begun
            except UnreachableError:
                if now() - began >= _PATIENCE_SECONDS:
                    raise
                await asyncio.sleep(_PAUSE_SECONDS)


class _Pool:
    """Keeps the workers running, and knows the addresses of those that are alive."""

    def __init__(
        self,
        start: StartWorker,
        make: Callable[[int], object],
        token: str,
        count: int,
        *,
        restarts: int | None = RESTARTS,
    ) -> None:
        self._start = start
        self._make = make
        self._token = token
        self._endless = restarts is None
        allowed = sys.maxsize if restarts is None else restarts
        self._supervised = [
            Supervised(f"env {rank}", "an episode begun", allowed=allowed) for rank in range(count)
        ]
        self._urls: dict[int, str] = {}
        self._one_lives = asyncio.Event()
        self._has_served = False
        """A worker has been able to serve: one that dies now is replaced."""
        self._has_begun = False
        """An episode has begun."""
        self._suspicion = suspicion()

    def worker_count(self) -> WorkerCount:
        """The number of workers that serve. Any thread may ask."""
        restarts = sum(worker.restarts for worker in self._supervised)
        return WorkerCount(
            "env", len(self._urls), len(self._supervised), restarts, self._suspicion.set_aside
        )

    def works(self, url: str) -> None:
        """Record that an episode has begun on a worker: its later death is not due to how it was
        started.
        """
        self._has_served = self._has_begun = True
        for rank, address in self._urls.items():
            if address == url:
                self._supervised[rank].progress()

    async def servers(self) -> Sequence[str]:
        """The addresses of the workers that are alive; waits for the first."""
        await self._one_lives.wait()
        return tuple(self._urls.values())

    async def keep(self, rank: int) -> None:
        """Keep a worker of this rank running: start another whenever it dies."""
        start = partial(self._start, "env", self._make, rank)
        supervised = self._supervised[rank]
        while True:
            try:
                if self._has_served:
                    worker = await supervised.start_again(start, WorkerDiedError)
                else:
                    worker = await start()
                try:
                    await self._serve(worker, rank)
                except asyncio.CancelledError:
                    with suppress(WorkerDiedError, TimeoutError):
                        async with asyncio.timeout(_POLL_SECONDS + _END_SECONDS):
                            await worker.call("end")
                    raise
                finally:
                    await worker.stop()
            except WorkerDiedError as error:
                if not self._has_served and supervised.restarts == _FIRST_ATTEMPTS - 1:
                    raise
                await supervised.recover(error, partial(_give_up, rank, error))

    async def _serve(self, worker: Worker, rank: int) -> None:
        async with start_deadline(f"the server of env {rank}", PLACE_SECONDS):
            url = await worker.call("open")
            knows = await self._tell_played(worker)
        self._urls[rank] = url
        self._one_lives.set()
        self._has_served |= self._endless
        try:
            while await worker.call("serves", _POLL_SECONDS):
                knows = knows or await self._tell_played(worker)
            raise WorkerDiedError("env", rank, "its server ended")
        finally:
            # A machine that vanished does not close its connections.
            end_link(self._urls.pop(rank), self._token)
            if not self._urls:
                self._one_lives.clear()

    async def _tell_played(self, worker: Worker) -> bool:
        """Tell a worker that an episode has begun, if one has. From then on, what it cannot open
        counts as an outage, and no longer as a wrong setting.
        """
        if self._has_begun:
            await worker.call("note_played")
        return self._has_begun


def _give_up(rank: int, error: WorkerDiedError, reason: str) -> WorkerDiedError:
    return WorkerDiedError("env", rank, f"{error.why}; it was {reason}")
