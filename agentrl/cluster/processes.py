"""Workers on this machine: a single worker is a thread of this process, if it can share it; several
are processes.

A process dies with the process that started it, and stopping it kills it; a thread cannot be
killed. As a sign of life, a thread of the process keeps writing the time to shared memory.
"""

import asyncio
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.cluster.call_sender import CallSender
from agentrl.cluster.environment import (
    THREADS,
    allocator_variables,
    inherited,
    thread_variables,
)
from agentrl.cluster.fork_server import forking_context, leave_server
from agentrl.cluster.parcel import Parcel
from agentrl.cluster.supervised import START_SECONDS, start_deadline
from agentrl.cluster.workers import (
    LEASE_SECONDS,
    PLACE_SECONDS,
    Forked,
    InOwnProcess,
    Make,
    StartWorker,
    Worker,
    WorkerGroup,
    start_all,
    under_lease,
)
from agentrl.errors import WorkerDiedError
from agentrl.files.output import make_output_lossy
from agentrl.flow.stop_signals import STOP_SIGNALS
from agentrl.placement.devices import usable_cores

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_BEAT_SECONDS = 0.5


async def start_local(
    role: str,
    make: Make,
    count: int,
    *,
    lease: float = LEASE_SECONDS,
    start_seconds: float = START_SECONDS,
) -> WorkerGroup:
    """`StartWorkers` on this machine."""
    if count == 1 and not isinstance(make, InOwnProcess):
        start: StartWorker = partial(ThreadWorker.start, start_seconds=start_seconds)
    else:
        # Each would compute with as many threads as there are cores.
        variables = thread_variables(usable_cores(), count, os.environ.get(THREADS, ""))
        variables |= allocator_variables(role, os.environ)
        start = partial(
            ProcessWorker.start, lease=lease, start_seconds=start_seconds, variables=variables
        )
    return await start_all(role, [start(role, make, rank) for rank in range(count)])


@dataclass(frozen=True, slots=True)
class ThreadWorker:
    """An object in this process, called in its own thread."""

    made: Any
    executor: Executor

    @staticmethod
    async def start(
        role: str, make: Make, rank: int, *, start_seconds: float = START_SECONDS
    ) -> Worker:
        """Make the worker in its thread."""
        executor = ThreadPoolExecutor(1, thread_name_prefix=f"{role}-{rank}")
        try:
            async with start_deadline(f"{role} {rank}", start_seconds):
                return ThreadWorker(
                    await asyncio.wrap_future(executor.submit(make, rank)), executor
                )
        except BaseException:
            executor.shutdown(wait=False)
            raise

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method in the worker's thread."""
        return await asyncio.wrap_future(self.executor.submit(getattr(self.made, method), *args))

    async def check(self) -> None:
        """Always returns: the thread lives as long as this process."""

    async def stop(self) -> None:
        """End the thread when it has finished its current call, without blocking the event loop."""
        with suppress(RuntimeError):  # it is stopped already
            # A call of nothing, which comes after all others.
            await asyncio.wrap_future(self.executor.submit(int))
        self.executor.shutdown(wait=False)


_hosted: list[Any] = []
"""The worker object, if this process is a worker. A process is one worker for all of its life, and
the functions that the executor calls by name find the object nowhere else."""


class ProcessWorker:
    """An object in its own process. Tensors and arrays are passed in shared memory."""

    def __init__(
        self,
        role: str,
        rank: int,
        lease: float,
        variables: Mapping[str, str] | None = None,
        imports: Sequence[str] = (),
    ) -> None:
        self.role = role
        self.rank = rank
        self.pid = 0
        self._lease = lease
        self._calls = CallSender(role, rank)
        context = forking_context(tuple(imports)) if imports else _spawn_context()
        # The monotonic clock is the machine's, so processes can compare its values.
        self._beat = context.RawValue("d", time.monotonic() + PLACE_SECONDS)
        name = f"{role}-{rank}"  # in `ps -e`, `top` and profilers
        self._executor = ProcessPoolExecutor(
            1, mp_context=context, initializer=_begin_process, initargs=(self._beat, name)
        )
        # The first call starts the process. It is made here, and not in the thread of the calls:
        # all threads share the environment. A fork server has the environment in which it began,
        # and lets callers wait until it has imported, so there the thread of the calls does it.
        if not imports:
            with inherited(variables or {}):
                self._executor.submit(os.getpid)

    @staticmethod
    async def start(
        role: str,
        make: Make,
        rank: int,
        *,
        lease: float = LEASE_SECONDS,
        start_seconds: float = START_SECONDS,
        variables: Mapping[str, str] | None = None,
    ) -> "ProcessWorker":
        """Start the process and make the worker in it. `variables`: of its environment, besides
        those of this process; a process that is forked has none.
        """
        imports = make.imports if isinstance(make, Forked) else ()
        worker = ProcessWorker(role, rank, lease, variables, imports)
        try:
            async with start_deadline(f"{role} {rank}", start_seconds):
                worker.pid = await worker._run(os.getpid)
                await worker.host(make)
        except BaseException:
            await worker.stop()
            raise
        return worker

    async def host(self, make: Make) -> None:
        """Make the worker, replacing the previous one."""
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
        self._calls.stop()
        # In a thread: it joins the executor's own thread, which first notices the death.
        await asyncio.get_running_loop().run_in_executor(None, self._executor.shutdown)

    async def _run(self, work: Callable[..., Any], *args: Any) -> Any:
        try:
            answer = asyncio.wrap_future(await self._calls.send(self._submit, work, args))
            return await under_lease(answer, self.check, self._lease)
        except BrokenProcessPool as error:
            raise WorkerDiedError(self.role, self.rank, f"its process {self.pid} ended") from error

    def _submit(self, work: Callable[..., Any], args: tuple[Any, ...]) -> "Future[Any]":
        # The parcel's memory stays until the answer is there: the process opens it by this one.
        parcel = Parcel.of(args)
        try:
            answer = self._executor.submit(_work_on, work, parcel)
        except BaseException:
            parcel.close()
            raise
        answer.add_done_callback(lambda _: parcel.close())
        return answer

    async def check(self) -> None:
        """See `Worker.check`."""
        if self.pid and _has_ended(self.pid):
            raise WorkerDiedError(self.role, self.rank, f"its process {self.pid} ended")
        if time.monotonic() - self._beat.value > self._lease:
            # Perhaps all processes of the run were stopped, and it has had no time yet.
            await asyncio.sleep(2 * _BEAT_SECONDS)
        silent = time.monotonic() - self._beat.value
        if silent > self._lease:
            raise WorkerDiedError(
                self.role,
                self.rank,
                f"its process {self.pid} gave no sign of life for {silent:.0f} s (cluster.lease)",
            )


def _has_ended(pid: int) -> bool:
    """True if a process has ended: a child of this one, whose exit status can still be collected,
    or one of the fork server, which collects it at once.
    """
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return not Path(f"/proc/{pid}").exists()


def _spawn_context() -> Any:
    """Fresh interpreters. If torch is loaded, they use its queues, which pass tensors in shared
    memory.
    """
    torch = sys.modules.get("torch")
    return (
        torch.multiprocessing.get_context("spawn")
        if torch
        else multiprocessing.get_context("spawn")
    )


def _begin_process(beat: Any, name: str) -> None:
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_NAME, name.encode())
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    leave_server()
    starter = multiprocessing.parent_process()
    if starter is None or not starter.is_alive():  # it died before this signal was requested
        os._exit(1)
    # Terminals and schedulers of jobs send these to all processes of a run. The driver ends its
    # workers itself, when it has saved what they train.
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)
    make_output_lossy()
    threading.Thread(target=_keep_beating, args=(beat,), name="sign-of-life", daemon=True).start()


def _keep_beating(beat: Any) -> None:
    never = threading.Event()
    while True:
        beat.value = time.monotonic()
        never.wait(_BEAT_SECONDS)


def _work_on(work: Callable[..., Any], parcel: Parcel) -> Any:
    return work(*parcel.open())


def _host(make: Make, rank: int) -> None:
    _hosted[:] = [make(rank)]


def _call(method: str, args: tuple[Any, ...]) -> Any:
    return getattr(_hosted[0], method)(*args)
