"""An environment behind HTTP, for tests: the server of `agentrl serve` in a thread."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from agentrl.cluster.local import LocalCluster
from agentrl.hosting.client_options import SAFE_OPTIONS, ClientOptions
from agentrl.protocols import Env
from agentrl.remote.openenv.server import add_openenv
from agentrl.remote.server import EnvServer
from agentrl.remote.sessions import ServerLimits
from agentrl.remote.spread_server import SpreadServer


class _Quick(EnvServer):
    """Looks a hundred times a second, and not ten, whether to end: there is one for each test."""

    async def main_loop(self) -> None:
        ticks = 0
        while not await self.on_tick(ticks):
            ticks += 1
            await asyncio.sleep(0.01)


class _QuickSpread(_Quick, SpreadServer):
    """The same, over processes."""


@contextmanager
def served(
    factory: Callable[[], Env],
    *,
    name: str = "environment",
    token: str | None = None,
    options: ClientOptions.Config | None = SAFE_OPTIONS,
    port: int = 0,
    **limits: Any,
) -> Iterator[EnvServer]:
    """The server while it listens; `limits` are those of `ServerLimits`."""
    server = _Quick(
        factory,
        name=name,
        port=port,
        token=token,
        limits=ServerLimits(**limits),
        protocols=(add_openenv,),
        options=options,
    )
    with _listening(server):
        yield server


@contextmanager
def spread(
    make: Callable[[], Callable[[], Env]], processes: int, **limits: Any
) -> Iterator[SpreadServer]:
    """A server over processes while all of them serve. `make` finds the environment in each."""
    cluster = LocalCluster(LocalCluster.Config(lease=60))
    server = _QuickSpread(
        cluster, processes, make, limits=ServerLimits(**limits), protocols=(add_openenv,)
    )
    with _listening(server):
        assert server.sessions.processes is not None
        while server.sessions.processes().alive < processes:
            time.sleep(0.01)
        yield server


@contextmanager
def _listening(server: EnvServer) -> Iterator[None]:
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        yield
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
