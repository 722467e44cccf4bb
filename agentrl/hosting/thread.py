"""`ThreadHost`: an environment in a thread of its own."""

import asyncio
import inspect
import logging
import queue
import random
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from agentrl.errors import as_exception
from agentrl.hosting.host import call_env, consult_player, has_async, inner_env, log_failure
from agentrl.protocols import Env, ScriptedPlayer

logger = logging.getLogger(__name__)

_Call = tuple[Callable[[], Any], asyncio.Future[Any] | None]


class CallThread:
    """A daemon thread that runs one call at a time, and starts with the first call."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    async def run(self, work: Callable[[], Any]) -> Any:
        """The result of `work`, which is awaited on the event loop if it is an awaitable.

        Raises:
            BaseException: whatever `work` raised.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._put(work, future)
        result, error = await future
        if error is None:
            return await result if inspect.isawaitable(result) else result
        if isinstance(error, SystemExit | asyncio.CancelledError):
            raise error
        raise as_exception(error)

    def stop_after(self, last: Callable[[], Any]) -> None:
        """Run `last` in the background when the current call returns (if ever), then end the
        thread.
        """
        self._put(last, None)
        self._calls.put(None)

    def _put(self, work: Callable[[], Any], future: asyncio.Future[Any] | None) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._calls.put((work, future))

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            work, future = call
            try:
                result, error = work(), None
            except BaseException as raised:
                result, error = None, raised
            if future is None:
                if error is not None:
                    logger.warning("closing an environment raised %r", error)
                continue
            loop = future.get_loop()
            if loop.is_closed():
                return
            # An error travels as a value: a future refuses some of them, such as StopIteration.
            loop.call_soon_threadsafe(_settle, future, result, error)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    # The caller's deadline may have passed; then nobody waits for the answer.
    if not future.done():
        future.set_result((result, error))


class ThreadHost:
    """An environment whose methods may block. One that hangs is abandoned with its thread, and the
    event loop goes on.
    """

    answers_at_once = False

    def __init__(self, env: Env) -> None:
        self.name = type(inner_env(env)).__name__
        self.broken = False
        self._env = env
        self._thread = CallThread(f"env-{self.name}")

    async def reset(self, seconds: float, *, seed: int, options: Mapping[str, Any]) -> Any:
        """The reply of `Env.reset`, within `seconds`."""
        return await self._call(
            "reset", seconds, partial(self._env.reset, seed=seed, options=options)
        )

    async def step(self, phase: str, seconds: float, action: str) -> Any:
        """The reply of `Env.step`, within `seconds`."""
        return await self._call(phase, seconds, partial(self._env.step, action))

    async def consult(self, seconds: float, player: ScriptedPlayer, rng: random.Random) -> str:
        """A scripted player's action."""
        return await consult_player(self, self._env, player, rng)

    async def close(self, seconds: float) -> None:
        """Close the instance. A sync close runs in the background, after a call that hangs (if that
        ever returns); an async one is awaited on the event loop.
        """
        if not has_async(self._env, "close"):
            self._thread.stop_after(self._env.close)
            return
        try:
            await log_failure(call_env(self, "close", seconds, self._env.close))
        finally:
            self._thread.stop_after(lambda: None)

    async def _call(self, phase: str, seconds: float, work: Callable[[], Any]) -> Any:
        return await call_env(self, phase, seconds, partial(self._thread.run, work))
