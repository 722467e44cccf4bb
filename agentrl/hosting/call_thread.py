"""`CallThread`: a thread that runs the calls of an environment."""

import asyncio
import inspect
import logging
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from agentrl.errors import as_exception

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
        try:
            result, error = await future
        except asyncio.CancelledError:
            # The answer may have arrived in the same turn of the loop.
            if not future.cancelled():
                _drop(future.result()[0])
            raise
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
                _drop(result)
                return
            # An error travels as a value: a future refuses some of them, such as StopIteration.
            loop.call_soon_threadsafe(_settle, future, result, error)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    # The caller's deadline may have passed; then nobody waits for the answer.
    if future.done():
        _drop(result)
    else:
        future.set_result((result, error))


def _drop(result: Any) -> None:
    """Close the coroutine of an async method that nobody will await."""
    if isinstance(result, Coroutine):
        result.close()
