"""`run_to_completion`: work that must finish even if its caller is cancelled; `made_in_thread`:
what a thread makes belongs to somebody, also then.
"""

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


async def run_to_completion(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` until it has ended, and only then raise a cancellation that came meanwhile.

    This call owns the task and does not return before it ends. `work` must end by itself: a thread,
    or something under a deadline.
    """
    task = asyncio.get_running_loop().create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # retrieve it, since the cancelled caller will not
        raise cancelled
    return task.result()


async def made_in_thread(make: Callable[[], T], undo: Callable[[T], object]) -> T:
    """What `make` returns in a thread: a folder, a process, a file that is open.

    A cancelled caller does not wait for the thread, and never gets what that makes: `undo`, which
    must be quick, is called with it on the event loop when it is made. (After a mere
    `asyncio.to_thread`, nobody would know of it.)
    """
    context = contextvars.copy_context()
    making = asyncio.get_running_loop().run_in_executor(None, context.run, make)
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(partial(_undo, undo))
        raise


def _undo(undo: Callable[[T], object], making: "asyncio.Future[T]") -> None:
    if not making.cancelled() and making.exception() is None:
        undo(making.result())
