"""`run_to_completion`: what must not stop half-way, though its caller is cancelled."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def run_to_completion(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` until it has ended; a cancellation that came meanwhile is raised then.

    The task is owned by this call, which does not return before it has. What is awaited must end by itself: a thread,
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
            task.exception()  # the caller is gone and will not ask for it
        raise cancelled
    return task.result()
