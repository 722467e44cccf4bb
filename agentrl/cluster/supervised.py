"""`Supervised`: an engine, a worker or a trainer that is started again when it dies."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from typing import TypeVar

from agentrl.errors import StallError
from agentrl.flow import Retries, pause_deadlines

logger = logging.getLogger(__name__)
_Started = TypeVar("_Started")

RESTARTS = 8
"""How many restarts in a row are possible without any work in between, by default."""

START_SECONDS = 1800.0
"""How long an engine, a worker or a trainer may take to start, by default: a large model takes
minutes to load."""

STARTS_PER_NODE = 8
"""How many engines start at the same time on a machine, by default: one for each GPU of most."""

START_ATTEMPTS = 8
"""How often one restart is tried, which takes about a minute with the pauses: the machine may be
lost too, which takes a while to notice."""


class Supervised:
    """The restarts of one engine, worker or trainer: how many are allowed, the pauses between them,
    and how long a start may take.

    `name` is its name in messages, `work` what counts as progress ("an answer"). At most `allowed`
    restarts in a row may pass without progress.
    """

    def __init__(
        self,
        name: str,
        work: str,
        *,
        allowed: int = RESTARTS,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self.name = name
        self.restarts = 0
        """All restarts so far."""
        self._work = work
        self._allowed = allowed
        self._start_seconds = start_seconds
        self._without_progress = 0

    def progress(self) -> None:
        """Note that work was done, so the restarts before it do not count against the limit."""
        self._without_progress = 0

    async def recover(self, death: Exception, give_up: Callable[[str], Exception]) -> None:
        """Count a death, and wait before the restart: not at all the first time in a row, then half
        a second, doubled up to half a minute.

        Raises:
            Exception: what `give_up` makes of the reason, if there were too many restarts in a row.
        """
        if self._without_progress >= self._allowed:
            times = f"restarted {self._allowed} times in a row"
            raise give_up(
                f"{times if self._allowed else 'not restarted'} without {self._work} in between"
                " (cluster.restarts)"
            ) from death
        self._without_progress += 1
        self.restarts += 1
        logger.warning("restarting %s: %s", self.name, death)
        await asyncio.sleep(self.pause)

    @property
    def pause(self) -> float:
        """Seconds to wait before the restart that was counted last."""
        return Retries.pause(self._without_progress - 1) if self._without_progress > 1 else 0.0

    async def start_again(
        self,
        start: Callable[[], Awaitable[_Started]],
        failure: type[Exception],
        attempts: int = START_ATTEMPTS,
    ) -> _Started:
        """The result of `start`, which is tried again when it raises `failure`.

        Raises:
            Exception: the last `failure`, after so many attempts.
        """
        for failures in range(1, attempts):
            try:
                return await start()
            except failure as error:
                logger.warning("%s; starting it again", error)
                await asyncio.sleep(max(self.pause, Retries.pause(failures)))
        return await start()

    @staticmethod
    def outside_deadlines() -> AbstractContextManager[None]:
        """Inside the block, the deadlines of the present task stand still: a restart takes longer
        than what it waits for.
        """
        return pause_deadlines()

    def starting(self) -> AbstractAsyncContextManager[None]:
        """The deadline of a start, as `start_deadline`."""
        return start_deadline(self.name, self._start_seconds)


@asynccontextmanager
async def start_deadline(name: str, seconds: float) -> AsyncIterator[None]:
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
