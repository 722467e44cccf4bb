"""The choice of a server: the least loaded one that has room."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from agentrl.errors import EnvError, OutageError
from agentrl.flow import now, waiting_for

FULL_SECONDS = 10.0
"""Time for which a reset waits for a full server, in seconds; then the episode waits outside of the
deadline, as in an outage.
"""
REST_SECONDS = 5.0
"""Time for which a server that could not be used ranks last, in seconds."""

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0


class UnreachableError(OutageError):
    """This server cannot be used; another one might be."""


class LostError(EnvError):
    """The server cannot be reached, or has closed the connection."""

    lives = False
    """The server announced that it closes the connection, as one that dies does not."""


class FullError(EnvError):
    """The server has no room for another session."""

    retry_seconds: float | None = None
    """Seconds after which the server wants to be asked again, if it says so."""


class Loaded(ABC):
    """A server with a load."""

    url: str

    @property
    @abstractmethod
    def load(self) -> tuple[bool, int]:
        """True if it is out of order, and the number of its sessions. The smallest comes first."""


_Server = TypeVar("_Server", bound=Loaded)
_Session = TypeVar("_Session")


async def open_at_any(
    servers: Sequence[_Server],
    open_at: Callable[[_Server], Awaitable[_Session]],
    *,
    kind: str,
    kind_when_full: str,
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> _Session:
    """Open a session at the least loaded server that has room. If all that answer are full, wait
    and ask again, for `FULL_SECONDS`.

    `open_at` raises `LostError` or `FullError` if another server should be tried. The context
    `waiting` is entered while all are full. `kind` names the servers in messages.

    Raises:
        UnreachableError: no server can be used, or all are full.
    """
    began, pause = now(), _FIRST_PAUSE_SECONDS
    while True:
        problems: list[str] = []
        retries: list[float] = []
        for server in sorted(servers, key=lambda server: server.load):
            try:
                return await open_at(server)
            except FullError as error:
                retries.append(_seconds_until_retry(error.retry_seconds, pause))
            except LostError as error:
                problems.append(str(error))
        if not retries:
            raise UnreachableError(f"no {kind} can be used: {'; '.join(problems)}")
        full = f"all {kind_when_full} are full ({', '.join(server.url for server in servers)})"
        if now() - began >= FULL_SECONDS:
            raise UnreachableError(full)
        with waiting(), waiting_for(full):
            await asyncio.sleep(min(retries))
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _seconds_until_retry(asked: float | None, pause: float) -> float:
    """The time that a full server asks for, within bounds: no server is asked without a pause, and
    none is left alone for longer than a reset waits.
    """
    if asked is None or not asked > 0:  # NaN is no time either
        return pause
    return min(max(asked, _FIRST_PAUSE_SECONDS), FULL_SECONDS)
