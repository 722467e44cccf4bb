"""`Scribe`: reads the episodes of steps, to write and to measure them, in a thread of the
controller or in a separate process.

    Recorder ── episodes, as arrays and bytes ─▶ Scribe ─▶ trajectories/, untrained/
             ◀──────────────── metrics ────────────┘

Episodes of rollout workers arrive sealed (`agentrl/tokens/sealed_turns.py`). Writing them opens
them, at a cost by turn that a separate process takes off the controller's core.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar, TypeVarTuple

from agentrl.cluster.memory_pressure import prefer_to_kill
from agentrl.cluster.processes import ProcessWorker
from agentrl.cluster.workers import Worker
from agentrl.errors import WorkerDiedError
from agentrl.flow import Flow

logger = logging.getLogger(__name__)
Args = TypeVarTuple("Args")
T = TypeVar("T")

_ROLE = "scribe"


class Scribe:
    """Calls functions that read episodes. Outside `in_own_process`, a thread does it."""

    def __init__(self) -> None:
        self._worker: Worker | None = None

    @asynccontextmanager
    async def in_own_process(self, wanted: bool) -> AsyncIterator[None]:
        """In the block, a separate process makes the calls if `wanted`, as soon as it has
        started.
        """
        if not wanted:
            yield
            return
        async with Flow(_ROLE) as flow:
            flow.start(self._start(), name="start")
            try:
                yield
            finally:
                flow.cancel()
                await self._end()

    async def call(self, function: Callable[[*Args], T], *args: *Args) -> T:
        """The function's result. If the process dies, a thread repeats the call, and makes all
        later ones, so that no episode stays unrecorded.
        """
        if self._worker is not None:
            try:
                result: T = await self._worker.call("call", function, args)
                return result
            except WorkerDiedError as error:
                _warn_of_fallback(error)
                await self._end()
        return await asyncio.to_thread(function, *args)

    async def _start(self) -> None:
        try:
            self._worker = await ProcessWorker.start(_ROLE, _ScribeProcess, 0)
        except WorkerDiedError as error:
            _warn_of_fallback(error)

    async def _end(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.stop()


def _warn_of_fallback(error: WorkerDiedError) -> None:
    logger.warning("%s; the controller records the episodes itself from now on", error)


class _ScribeProcess:
    """What runs in the separate process."""

    def __init__(self, rank: int) -> None:
        prefer_to_kill()

    def call(self, function: Callable[..., T], args: tuple[Any, ...]) -> T:
        return function(*args)
