"""`Restarts`: how often something that died is started again, and when that is given up."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentrl.errors import StallError
from agentrl.flow import Retries

RESTARTS = 8
"""How many restarts in a row are possible without any work in between, by default."""

START_SECONDS = 1800.0
"""How long an engine, a worker or a trainer may take to start, by default: a large model takes
minutes to load."""


class Restarts:
    """The restarts of one engine, worker or trainer.

    `allowed`: how many restarts in a row are possible without any work done in between. The owner
    calls `progress` when work was done, and `spend` before each restart.
    """

    def __init__(self, allowed: int = RESTARTS) -> None:
        self.allowed = allowed
        self.total = 0
        """All restarts so far."""
        self._in_vain = 0

    def progress(self) -> None:
        """Work was done: the restarts before it were not in vain."""
        self._in_vain = 0

    def spend(self) -> bool:
        """Count one more restart; False, and nothing is counted, if too many were in vain."""
        if self._in_vain >= self.allowed:
            return False
        self._in_vain += 1
        self.total += 1
        return True

    @property
    def pause(self) -> float:
        """Seconds to wait before the restart that was counted last: none before the first in a row,
        then half a second, doubled up to half a minute.
        """
        return Retries.pause(self._in_vain - 1) if self._in_vain > 1 else 0.0

    def in_vain(self, work: str) -> str:
        """The reason to give up, as the end of a sentence; `work` is what was not done."""
        times = f"restarted {self.allowed} times in a row" if self.allowed else "not restarted"
        return f"{times} without {work} in between (cluster.restarts)"


@asynccontextmanager
async def starting(name: str, seconds: float) -> AsyncIterator[None]:
    """Limit the start of something that gives signs of life: to start it again would not help.

    Raises:
        StallError: it takes longer.
    """
    try:
        async with asyncio.timeout(seconds) as clock:
            yield
    except TimeoutError as error:
        if not clock.expired():
            raise
        raise StallError(
            f"{name} did not start within {seconds:g} s (cluster.start_seconds), and is not dead:"
            " look what it waits for, or give it more time; then `agentrl train --resume RUN`"
            " goes on"
        ) from error
