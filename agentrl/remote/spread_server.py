"""`SpreadServer`: one address in front of the processes that an environment is spread over.

    client ──▶ SpreadServer ──▶ EnvServer of a worker, for each session the same one

It is an `EnvServer` like any other: its environments are `RemoteEnv`s on workers
(`agentrl/remote/env_worker.py`), of which those that die are replaced.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType

from agentrl.cluster.worker_registry import WorkerCount
from agentrl.cluster.workers import Cluster
from agentrl.hosting.client_options import SAFE_OPTIONS, ClientOptions
from agentrl.net.interfaces import LOOPBACK, own_address
from agentrl.protocols.env import Env, Isolation
from agentrl.remote.env_worker import EnvWorker, MakeEnvs, WorkerEnvs, env_workers, worker_limits
from agentrl.remote.server import AddRoutes, EnvServer, makes_processes
from agentrl.remote.sessions import ServerLimits

_ROOM_BYTES = 4096
"""How much longer a request may become on its way to a worker."""


class SpreadServer(EnvServer):
    """Serves an environment from `count` processes of `cluster`, as `EnvServer` does from one.

    `make` finds the environment, here and in each process, and returns its factory. `limits` hold
    for all processes together. A stop signal before the processes serve ends the server at once.

    Raises:
        ConfigError: other machines could reach the server, and there is no token; or there is no
        such environment.
    """

    def __init__(
        self,
        cluster: Cluster,
        count: int,
        make: MakeEnvs,
        *,
        name: str = "env",
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        limits: ServerLimits | None = None,
        isolation: Isolation | None = None,
        on_start: Callable[[str], None] = lambda url: None,
        protocols: Sequence[AddRoutes] = (),
        options: ClientOptions.Config | None = SAFE_OPTIONS,
        pictures: bool = False,
    ) -> None:
        limits = limits or ServerLimits()
        longest = limits.max_body_bytes + _ROOM_BYTES
        self._cluster = cluster
        self._count = count
        self._make_worker = partial(
            EnvWorker,
            make,
            worker_limits(limits.model_copy(update={"max_body_bytes": longest})),
            own_address() if cluster.spans_machines else LOOPBACK,
            isolation=isolation,
            options=options,
            pictures=pictures,
        )
        self._envs: WorkerEnvs | None = None
        self._starting: asyncio.Task[None] | None = None
        super().__init__(
            self._make_env,
            name=name,
            host=host,
            port=port,
            token=token,
            # The worker's own limit comes first, also where a reset begins with a session.
            limits=limits.model_copy(update={"call_seconds": 3 * limits.call_seconds}),
            on_start=on_start,
            protocols=protocols,
            options=None,
            processes=self._worker_count,
            in_processes=makes_processes(make()),
        )

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the processes, and serve until a stop signal.

        Raises:
            WorkerDiedError: the processes die before one has served.
        """
        self._starting = asyncio.current_task()
        with self.capture_signals():
            try:
                async with (
                    self._cluster,
                    env_workers(
                        self._cluster.start_one, self._count, self._make_worker, restarts=None
                    ) as self._envs,
                ):
                    await super().serve(sockets)
            except asyncio.CancelledError:
                if not self.should_exit:
                    raise

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """As `EnvServer`; but before the processes serve, there is nothing to wait for."""
        super().handle_exit(sig, frame)
        if self._envs is None and self._starting is not None:
            self.should_exit = True
            self._starting.get_loop().call_soon_threadsafe(self._starting.cancel)

    def _make_env(self) -> Env:
        assert self._envs is not None
        return self._envs()

    def _worker_count(self) -> WorkerCount:
        return WorkerCount("env", 0, self._count) if self._envs is None else self._envs.count()
