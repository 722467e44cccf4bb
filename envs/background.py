"""An event loop in its own thread, for work that goes on between calls to an environment."""

import asyncio
import functools
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

_Result = TypeVar("_Result")


def start(work: Coroutine[Any, Any, _Result]) -> "Future[_Result]":
    """Run a coroutine in the background; cancelling the future cancels it. The whole process shares
    one loop.
    """
    return asyncio.run_coroutine_threadsafe(work, _loop(os.getpid()))


def call_soon(work: Callable[[], object]) -> None:
    """Call a function in the background."""
    _loop(os.getpid()).call_soon_threadsafe(work)


@functools.cache
def _loop(pid: int) -> asyncio.AbstractEventLoop:
    """This process's loop, cached by process id, since a fork does not inherit its parent's
    threads.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=f"background-{pid}", daemon=True).start()
    return loop
