"""`Stopping`: any stop signal ends a long command as Ctrl-C does."""

import asyncio
import signal
import threading
from collections.abc import Awaitable
from typing import Any, Self, TypeVar

import typer

from agentrl.flow import run_steadily
from agentrl.flow.stop_signals import stop_signals_of_process

T = TypeVar("T")


class Stopping:
    """All stop signals end the block as Ctrl-C does, by a `KeyboardInterrupt`. A context manager.

    Schedulers send signals to a process and to its group, or twice, and then kill. So once a run is
    stopping, further signals do not end it immediately, as a second Ctrl-C does. Signals that
    `nohup` made ignored stay ignored.

    A shell's background job begins with SIGINT ignored, and asyncio only replaces Python's own
    handler, so neither SIGINT nor other stop signals would end the job. Here SIGINT ends it too.
    """

    def __init__(self) -> None:
        self._by: signal.Signals | None = None
        self._task: asyncio.Task[Any] | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def by(self) -> signal.Signals:
        """The signal that ended the block."""
        return self._by or signal.SIGINT

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self  # the signals of a command that a thread runs are its caller's
        for number in stop_signals_of_process():
            if number is not signal.SIGINT:
                self._before[number] = signal.signal(number, self._stop)
            elif signal.getsignal(number) is signal.SIG_IGN:
                self._before[number] = signal.signal(number, signal.default_int_handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            self._by = self.by
            # The process is ending: further signals must not change its exit status.
            for number in self._before:
                if number is not signal.SIGINT:
                    signal.signal(number, signal.SIG_IGN)
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)

    async def watch(self, work: Awaitable[T]) -> T:
        """Run the work of the block."""
        self._task = asyncio.current_task()
        return await work

    def _stop(self, number: int, frame: object) -> None:
        if self._by is None and not (self._task is not None and self._task.cancelling()):
            self._by = signal.Signals(number)
            signal.raise_signal(signal.SIGINT)


def run_or_stop(work: Awaitable[T]) -> T:
    """Do the work on an event loop of its own. A stop signal ends the command, with the exit status
    of a shell's.
    """
    stopping = Stopping()
    try:
        with stopping:
            return run_steadily(stopping.watch(work))
    except KeyboardInterrupt:
        raise typer.Exit(128 + stopping.by) from None
