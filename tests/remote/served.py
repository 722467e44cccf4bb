"""An environment behind HTTP, for tests: the server of `agentrl serve` in a thread."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from agentrl.hosting.client_options import SAFE_OPTIONS, ClientOptions
from agentrl.protocols import Env
from agentrl.remote.openenv.server import add_openenv
from agentrl.remote.server import EnvServer
from agentrl.remote.sessions import ServerLimits


class _QuickServer(EnvServer):
    """Looks a hundred times a second, and not ten, whether to end: there is one for each test."""

    async def main_loop(self) -> None:
        ticks = 0
        while not await self.on_tick(ticks):
            ticks += 1
            await asyncio.sleep(0.01)


@contextmanager
def served(
    factory: Callable[[], Env],
    *,
    name: str = "environment",
    token: str | None = None,
    options: ClientOptions.Config | None = SAFE_OPTIONS,
    **limits: Any,
) -> Iterator[EnvServer]:
    """The server while it listens; `limits` are those of `ServerLimits`."""
    server = _QuickServer(
        factory,
        name=name,
        token=token,
        limits=ServerLimits(**limits),
        protocols=(add_openenv,),
        options=options,
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        yield server
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()
