"""`LiveStatus`: renews a small file of a run every second: its workers that are alive, and what
waits for what.

RUN/live.json    there while the run's process lives. A killed process leaves it: check its `pid`
"""

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter, ValidationError

from agentrl.cluster.worker_registry import WorkerCount, registered_workers
from agentrl.files.durable import remove_left, unfinished
from agentrl.flow import PendingWait, PeriodicThread, wait_reasons, waits
from agentrl.rollout.accounts import SchedulerStatus

logger = logging.getLogger(__name__)

FILE = "live.json"
_RENEWED_SECONDS = 1.0
_WHOLE = ("episode", "group")
"""Deadlines of what waits inside for something else."""


@dataclass(frozen=True, slots=True)
class LiveState:
    """The state of the process `pid` of a run at a Unix time: its workers, the calls that wait for
    an answer, the longest wait first, the reasons for waits outside, and the episodes, if any are
    played.
    """

    pid: int
    at: float
    workers: tuple[WorkerCount, ...] = ()
    waits: tuple[PendingWait, ...] = ()
    notices: tuple[str, ...] = ()
    underway: SchedulerStatus | None = None


_FORMAT = TypeAdapter(LiveState)


class LiveStatus(AbstractContextManager["LiveStatus"]):
    """Writes the file from its beginning to its end, in a thread, so that it is also written while
    the loop is busy.

    The file is replaced at once, every `every` seconds. If it cannot be written, this is logged,
    and the run goes on without it.
    """

    def __init__(self, run: Path, *, every: float = _RENEWED_SECONDS) -> None:
        self._path = run / FILE
        self._every = every
        self._loop: asyncio.AbstractEventLoop | None = None
        self._underway: Callable[[], SchedulerStatus] | None = None
        self._thread = PeriodicThread(self._write, name="live status")

    def __enter__(self) -> Self:
        self._thread.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.__exit__(*exc)
        remove_left(self._path)

    def begin_phase(self) -> None:
        """A phase of the run begins on this event loop, whose waits are shown from now on."""
        self._loop = asyncio.get_running_loop()

    def watch(self, underway: Callable[[], SchedulerStatus]) -> None:
        """Show a scheduler's work from now on. `underway` is called by the writing thread."""
        self._underway = underway

    def _write(self) -> float | None:
        try:
            write_live_state(self._path, self._state())
        except OSError as error:
            logger.warning(
                "%s cannot be written, so pages do not show what this run waits for: %s",
                self._path,
                error,
            )
            return None
        return self._every

    def _state(self) -> LiveState:
        loop, underway = self._loop, self._underway
        return LiveState(
            os.getpid(),
            datetime.now(UTC).timestamp(),
            tuple(registered_workers()),
            () if loop is None else tuple(wait for wait in waits(loop) if wait.phase not in _WHOLE),
            tuple(map(str, wait_reasons())),
            None if underway is None else underway(),
        )


def write_live_state(path: Path, state: LiveState) -> None:
    """Replace the file by one with this state. It need not survive a loss of power."""
    unfinished(path).write_bytes(_FORMAT.dump_json(state) + b"\n")
    unfinished(path).replace(path)


def read_live_state(run: Path) -> LiveState | None:
    """The newest state of the run in a folder; None if there is none, or it cannot be read."""
    try:
        return _FORMAT.validate_json((run / FILE).read_bytes())
    except (OSError, ValidationError):
        return None
