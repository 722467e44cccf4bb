"""The signals that end what runs for long, in one way for all commands."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Ctrl-C, and what ends a program as Ctrl-C does: from a scheduler of jobs, which may be told to
warn by SIGUSR1, or when the terminal is closed."""
Handler = Callable[[int, FrameType | None], None]


def stop_signals_of_process() -> list[signal.Signals]:
    """Those that end this process: without SIGHUP and SIGUSR1 where it has inherited them as
    ignored, as `nohup` does.

    A shell's background job begins with SIGINT ignored. It is heeded nevertheless.
    """
    never_ignored = (signal.SIGINT, signal.SIGTERM)
    return [
        number
        for number in STOP_SIGNALS
        if number in never_ignored or signal.getsignal(number) is not signal.SIG_IGN
    ]


@contextmanager
def handle_stop_signals(handler: Handler) -> Iterator[None]:
    """In the block, the stop signals call `handler`. Nothing is changed in a thread, which gets no
    signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in stop_signals_of_process()}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
