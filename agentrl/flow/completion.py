"""`run_to_completion`: work that must finish even if its caller is cancelled."""

import asyncio
from collections.abc import Coroutine
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
