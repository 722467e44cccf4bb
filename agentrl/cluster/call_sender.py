"""The calls to a worker in another process: their arguments are pickled beside the event loop, and
their order is kept.

The shards of a step are gigabytes. Pickling them on the loop would stop all episodes meanwhile.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from agentrl.errors import WorkerDiedError

T = TypeVar("T")


class CallSender:
    """Sends the calls to one worker in a thread of its own, one after another."""

    def __init__(self, role: str, rank: int) -> None:
        self._role, self._rank = role, rank
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{role}-{rank}-calls")
        self._stopped = False

    async def send(self, submit: Callable[..., T], *args: Any) -> T:
        """Return what `submit(*args)` returns, which pickles the arguments and does not wait for
        the worker.

        A cancelled caller does not take its call back: other ranks may have got theirs, and would
        wait for this one.

        Raises:
            WorkerDiedError: the worker was stopped before the call was sent.
        """
        if self._stopped:
            raise self._death()
        sending = asyncio.wrap_future(self._thread.submit(submit, *args))
        # The caller may not wait for it.
        sending.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait({sending})
        if sending.cancelled():  # by `stop`, and not by the caller
            raise self._death()
        return sending.result()

    def _death(self) -> WorkerDiedError:
        return WorkerDiedError(self._role, self._rank, "it was stopped")

    def stop(self) -> None:
        """Send nothing from now on; the thread ends when it has sent what it has begun."""
        self._stopped = True
        self._thread.shutdown(wait=False, cancel_futures=True)
