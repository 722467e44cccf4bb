"""An event loop in a thread of its own, for what has to live between the calls of an environment."""

import asyncio
import functools
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

_Result = TypeVar("_Result")


def start(work: Coroutine[Any, Any, _Result]) -> "Future[_Result]":
    """Run a coroutine in the background; cancelling the future cancels it. Its loop is one for the whole process."""
    return asyncio.run_coroutine_threadsafe(work, _loop(os.getpid()))


def call_soon(work: Callable[[], object]) -> None:
    """Make a call in the background."""
    _loop(os.getpid()).call_soon_threadsafe(work)


@functools.cache
def _loop(pid: int) -> asyncio.AbstractEventLoop:
    """The loop of this process, by its id: a fork has none of its parent's threads."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=f"background-{pid}", daemon=True).start()
    return loop
