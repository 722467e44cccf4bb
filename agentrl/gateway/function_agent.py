"""`env: agent:my_package.module:run`: an async function that solves a task by calling a model.

    async def run(task, base_url, api_key):
        client = AsyncOpenAI(base_url=base_url, api_key=api_key)
        ...
        return reward

Each episode runs in a thread with an event loop of its own, so a function that blocks holds up no
other. One that hangs is cancelled at its deadline; if it ignores that, its thread is abandoned, as
that of an environment is.
"""

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable
from typing import Any

from agentrl.errors import EnvError, as_exception, describe
from agentrl.gateway.outcome import AgentOutcome, outcome_of
from agentrl.gateway.program import ProgramAssignment

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 5.0
"""Time for a cancelled function to clean up, in seconds."""


class FunctionAgent:
    """`AgentProgram` of a function `run(task, base_url, api_key)`, async or not. `name` is for
    messages.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self._function = function
        self._name = name

    async def run(self, assignment: ProgramAssignment) -> AgentOutcome:
        """Call the function for one task."""
        thread = _Thread(self._function, assignment)
        try:
            result = await asyncio.shield(thread.result)
        except asyncio.CancelledError:
            thread.cancel()
            _, running = await asyncio.wait({thread.result}, timeout=_GRACE_SECONDS)
            if running:
                logger.warning("%s ignores its cancellation; its thread is abandoned", self._name)
            raise
        except Exception as error:
            raise EnvError(f"{self._name} raised {describe(error)}") from error
        return outcome_of(result, self._name)


class _Thread:
    """A call of the function in a daemon thread. `result` is settled on the loop that made it."""

    def __init__(self, function: Callable[..., Any], assignment: ProgramAssignment) -> None:
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._function = function
        self._assignment = assignment
        self._lock = threading.Lock()
        self._cancelled = False
        self._inner: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        # Marks an error as retrieved: asyncio would log that of an abandoned call.
        self.result.add_done_callback(lambda result: result.cancelled() or result.exception())
        threading.Thread(
            target=self._serve, name=f"agent-{assignment.task.id}", daemon=True
        ).start()

    def cancel(self) -> None:
        """Cancel the function's task, now or as soon as it starts."""
        with self._lock:
            self._cancelled = True
            if self._inner is not None:
                loop, task = self._inner
                loop.call_soon_threadsafe(task.cancel)

    def _serve(self) -> None:
        try:
            result, error = asyncio.run(self._call()), None
        except BaseException as raised:
            result, error = None, raised
        with self._lock:
            self._inner = None
        loop = self.result.get_loop()
        if not loop.is_closed():  # an abandoned thread may outlive the run
            loop.call_soon_threadsafe(self._set_result, result, error)

    async def _call(self) -> Any:
        task = asyncio.current_task()
        assert task is not None
        with self._lock:
            if self._cancelled:
                return None
            self._inner = (asyncio.get_running_loop(), task)
        given = self._assignment
        try:
            result = self._function(given.task, given.base_url, given.api_key)
            return await result if inspect.isawaitable(result) else result
        finally:
            with self._lock:
                self._inner = None

    def _set_result(self, result: Any, error: BaseException | None) -> None:
        if self.result.done():  # cancelled meanwhile
            return
        if error is None:
            self.result.set_result(result)
        else:
            self.result.set_exception(as_exception(error))
