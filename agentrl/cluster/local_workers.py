"""Workers on this machine: one alone is a thread of this process, several are processes.

A process dies with the process that started it, and when it is stopped it is killed; a thread cannot be.
"""

import asyncio
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from agentrl.cluster.workers import Make, Worker, WorkerGroup, start_all
from agentrl.errors import WorkerDiedError

_PR_SET_PDEATHSIG = 1


async def start_local(role: str, make: Make, count: int) -> WorkerGroup:
    """`StartWorkers` on this machine."""
    start = ThreadWorker.start if count == 1 else ProcessWorker.start
    return await start_all(role, [start(role, make, rank) for rank in range(count)])


@dataclass(frozen=True, slots=True)
class ThreadWorker:
    """An object in this process, called in a thread of its own."""

    made: Any
    executor: Executor

    @staticmethod
    async def start(role: str, make: Make, rank: int) -> Worker:
        """Make the worker in its thread."""
        executor = ThreadPoolExecutor(1, thread_name_prefix=f"{role}-{rank}")
        try:
            return ThreadWorker(await _run(executor, make, rank), executor)
        except BaseException:
            executor.shutdown(wait=False)
            raise

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method in the worker's thread."""
        return await _run(self.executor, getattr(self.made, method), *args)

    async def stop(self) -> None:
        """End the thread when it has finished what it is doing; the event loop goes on meanwhile."""
        with suppress(RuntimeError):  # it was stopped before
            await _run(self.executor, int)
        self.executor.shutdown(wait=False)


_hosted: list[Any] = []
"""The object of this process, where it is a worker."""


@dataclass(slots=True)
class ProcessWorker:
    """An object in a process of its own. Tensors travel in shared memory."""

    role: str
    rank: int
    executor: ProcessPoolExecutor
    pid: int = field(default=0)

    @staticmethod
    async def start(role: str, make: Make, rank: int) -> Worker:
        """Start the process and make the worker in it."""
        executor = ProcessPoolExecutor(1, mp_context=_context(), initializer=_die_with_parent, initargs=(os.getpid(),))
        worker = ProcessWorker(role, rank, executor)
        try:
            worker.pid = await worker._run(os.getpid)
            await worker.host(make)
        except BaseException:
            await worker.stop()
            raise
        return worker

    async def host(self, make: Make) -> None:
        """Make the worker, in the place of the one that was there."""
        await self._run(_host, make, self.rank)

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method in the process."""
        return await self._run(_call, method, args)

    async def stop(self) -> None:
        """Kill the process."""
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.pid = 0
        await asyncio.get_running_loop().run_in_executor(None, self.executor.shutdown)

    async def _run(self, work: Callable[..., Any], *args: Any) -> Any:
        try:
            return await _run(self.executor, work, *args)
        except BrokenProcessPool as error:
            raise WorkerDiedError(self.role, self.rank, f"its process {self.pid} ended") from error


async def _run(executor: Executor, work: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.wrap_future(executor.submit(work, *args))


def _context() -> Any:
    """Fresh interpreters; torch's own queues, where torch is loaded, send tensors in shared memory."""
    torch = sys.modules.get("torch")
    return torch.multiprocessing.get_context("spawn") if torch else multiprocessing.get_context("spawn")


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before it could be asked for
        os._exit(1)


def _host(make: Make, rank: int) -> None:
    _hosted[:] = [make(rank)]


def _call(method: str, args: tuple[Any, ...]) -> Any:
    return getattr(_hosted[0], method)(*args)
