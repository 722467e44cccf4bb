"""Environments on workers of the cluster: each is an `agentrl serve` of its own, and one that dies is replaced.

The cluster starts the workers and watches over them; the episodes go over the same link as to any server, so a step
costs no call of the cluster. An episode whose worker dies has failed, and is played again.
"""

import asyncio
import logging
import secrets
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from agentrl.cluster.workers import StartWorker, Worker, start_another
from agentrl.errors import WorkerDiedError
from agentrl.flow import Flow
from agentrl.protocols import Env, ResetResult
from agentrl.remote.client import RemoteEnv
from agentrl.remote.link import UnreachableError, end_link
from agentrl.remote.server import EnvServer
from agentrl.remote.sessions import ServerLimits

logger = logging.getLogger(__name__)

MakeEnvs = Callable[[], Callable[[], Env]]
"""Finds an environment where it shall live, and returns what makes it there."""
_PAUSE_SECONDS = 0.2
"""Pause before a dead worker, whose death may not be known yet, is asked again."""
_ATTEMPTS = 3
"""Workers of a rank in a row that may die before an episode has begun on any, before the run ends of it."""


class EnvWorker:
    """The worker: serves environments, in a thread, to who knows the token."""

    def __init__(self, make: MakeEnvs, limits: ServerLimits, host: str, token: str, rank: int) -> None:
        self._server = EnvServer(make(), name=f"env-{rank}", host=host, token=token, limits=limits)
        self._thread = threading.Thread(target=self._server.run, name="env-server", daemon=True)
        self._listening = threading.Event()

    def open(self) -> str:
        """Begin to serve; the address.

        Raises:
            RuntimeError: it cannot listen.
        """
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError("the server of the environments did not start")
            self._listening.wait(0.01)
        return self._server.url

    def serve(self) -> None:
        """Returns when it serves no more."""
        self._thread.join()


@asynccontextmanager
async def env_workers(
    start: StartWorker, count: int, make: Callable[[str, int], EnvWorker]
) -> AsyncIterator[Callable[[], Env]]:
    """What makes environments on `count` workers, each made by `make(token, rank)`.

    Raises:
        ConfigError: there is no such environment.
        WorkerDiedError: the workers of a rank die as soon as they live.
    """
    token = secrets.token_urlsafe()
    pool = _Pool(start, partial(make, token), token)
    async with Flow("env workers") as flow:
        for rank in range(count):
            flow.start(pool.keep(rank), name=str(rank))
        await pool.servers()
        yield partial(_WorkerEnv, pool, token)
        flow.cancel()


class _WorkerEnv(RemoteEnv):
    """An environment on whichever worker lives."""

    def __init__(self, pool: "_Pool", token: str) -> None:
        super().__init__((), token)
        self._pool = pool

    async def servers(self) -> Sequence[str]:
        """Waits for the first worker."""
        return await self._pool.servers()

    async def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetResult:
        """Begin an episode, should the worker that it begins on die, on another; for as long as the caller waits."""
        while True:
            try:
                begun = await super().reset(seed=seed, options=options)
                self._pool.works()
                return begun
            except UnreachableError:
                await asyncio.sleep(_PAUSE_SECONDS)


class _Pool:
    """The addresses of the workers that live."""

    def __init__(self, start: StartWorker, make: Callable[[int], EnvWorker], token: str) -> None:
        self._start = start
        self._make = make
        self._token = token
        self._urls: dict[int, str] = {}
        self._one_lives = asyncio.Event()
        self._died_at_once: Counter[int] = Counter()
        self._worked = False

    def works(self) -> None:
        """An episode has begun: what workers die of from now on is not how they are started."""
        self._worked = True
        self._died_at_once.clear()

    async def servers(self) -> Sequence[str]:
        """Where environments can be played; waits for the first place."""
        await self._one_lives.wait()
        return tuple(self._urls.values())

    async def keep(self, rank: int) -> None:
        """Have a worker of this rank, always."""
        start = partial(self._start, "env", self._make, rank)
        while True:
            try:
                worker = await (start_another(start) if self._worked else start())
                try:
                    await self._serve(worker, rank)
                finally:
                    await worker.stop()
            except WorkerDiedError as error:
                self._died_at_once[rank] += 1
                if self._died_at_once[rank] == _ATTEMPTS:
                    raise
                logger.warning("%s; another takes its place", error)

    async def _serve(self, worker: Worker, rank: int) -> None:
        self._urls[rank] = await worker.call("open")
        self._one_lives.set()
        try:
            await worker.call("serve")
            raise WorkerDiedError("env", rank, "its server ended")
        finally:
            end_link(self._urls.pop(rank), self._token)  # a vanished machine closes no connection
            if not self._urls:
                self._one_lives.clear()
