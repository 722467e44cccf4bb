"""The load of the processes, threads and GPUs of a run, sampled from outside of them."""

import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil

_LOOK_FOR_PROCESSES = 5
"""Samples between two looks for new processes, for which the whole process table is read."""


class Usage:
    """Samples the CPU time of this process by thread, of those that it has started by process, and
    the GPUs' load.

    Threads whose names differ only in a number count as one, and so do the threads of libraries. A
    GPU is seen if the package `nvidia-ml-py` is installed.
    """

    def __init__(self) -> None:
        self._own = psutil.Process()
        self._children: dict[int, Any] = {}
        self._samples = 0
        self._before: dict[str, float] = {}
        self._at = time.monotonic()
        self._gpus = gpu_readers()
        self.sample()

    def sample(self) -> Mapping[str, float]:
        """CPU time since the last call, in percent of one core, by worker; 0 is left out."""
        if self._samples % _LOOK_FOR_PROCESSES == 0:
            known = self._children
            found = self._own.children(recursive=True)
            self._children = {child.pid: known.get(child.pid, child) for child in found}
        self._samples += 1
        seconds = dict(self._threads()) | dict(self._processes())
        at, before = time.monotonic(), self._before
        length = max(at - self._at, 1e-9)
        self._before, self._at = seconds, at
        grown = {name: value - before.get(name, value) for name, value in seconds.items()}
        return {name: 100 * value / length for name, value in grown.items() if value > 0}

    def gpus(self) -> Mapping[str, float]:
        """The load of each GPU, in percent: the share of the last moments in which a kernel ran."""
        return {name: 100 * read()[0] for name, read in self._gpus.items()}

    def _threads(self) -> Iterator[tuple[str, float]]:
        named = {thread.native_id: thread.name for thread in threading.enumerate()}
        summed = defaultdict[str, float](float)
        for thread in self._own.threads():
            name = named.get(thread.id, "libraries' threads")
            name = (
                "event loop"
                if name == "MainThread"
                else re.sub(r"[-_ ]?\d+$", "", re.sub(r" \(.*\)$", "", name))
            )
            summed[f"controller: {name}"] += thread.user_time + thread.system_time
        yield from summed.items()

    def _processes(self) -> Iterator[tuple[str, float]]:
        for pid, child in list(self._children.items()):
            try:
                times = child.cpu_times()
                yield f"{child.name()} {pid}", times.user + times.system
            except psutil.Error:  # it has ended, or become another user's
                del self._children[pid]


def gpu_readers() -> dict[str, Callable[[], tuple[float, float]]]:
    """For each GPU, a function that reads its load and the share of its memory in use; empty
    without GPUs, or without NVIDIA's library.
    """
    try:
        import pynvml
    except ImportError:
        return {}
    try:
        pynvml.nvmlInit()
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(number)
            for number in range(pynvml.nvmlDeviceGetCount())
        ]
    except pynvml.NVMLError:  # no driver
        return {}

    def reader(handle: Any) -> Callable[[], tuple[float, float]]:
        def read() -> tuple[float, float]:
            try:
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
                return pynvml.nvmlDeviceGetUtilizationRates(
                    handle
                ).gpu / 100, memory.used / memory.total
            except pynvml.NVMLError:  # such as a slice of a GPU, whose load is not told
                return 0.0, 0.0

        return read

    return {f"GPU {number}": reader(handle) for number, handle in enumerate(handles)}
