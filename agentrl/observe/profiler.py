"""`Profiler`: records a trace of a run, from its beginning (`observe.profile`) or for a while on
request.

RUN/profile/NAME.pftrace    a trace for https://ui.perfetto.dev; `agentrl profile RUN` makes a table
RUN/profile/NAME.request    seconds: asks a live run for a trace, which appears when it is whole
RUN/profile/NAME.failed     the reason why there is none
"""

import asyncio
import heapq
import logging
import re
import statistics
import time
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Self

from agentrl.errors import ConfigError
from agentrl.files.durable import remove_left, unfinished, write_whole
from agentrl.flow import PeriodicThread, Span, SpanLog, record_spans, span
from agentrl.observe.span_export import SpanExport
from agentrl.observe.trace_file import Slice, TraceFile
from agentrl.observe.usage import Usage

logger = logging.getLogger(__name__)

FOLDER = "profile"
SUFFIX = ".pftrace"
REQUEST, FAILED = ".request", ".failed"
PHASES = "phases"
CPU, GPU, PROFILER, CONTROLLER = "CPU", "GPU", "profiler", "controller"
LOOP_BUSY, TRACING = "event loop busy", "tracing"
_PERCENT = "%"
_TICK_SECONDS = 1.0
_CALIBRATED = 200
"""Spans that are timed at once, to learn what one costs."""


class Profiler(AbstractContextManager["Profiler"]):
    """Records traces into the folder `profile` of a run's folder. `always`: from the beginning to
    the end.

    A thread writes what the event loop has recorded, samples the load of workers, and looks for
    requests. What that costs is a counter of the trace.

    Raises:
        ConfigError: with `always`, on entering: a package is missing.
    """

    def __init__(self, run: Path, *, always: bool) -> None:
        self._folder = run / FOLDER
        self._always = always
        self._thread = PeriodicThread(self._tick, name="profiler", first=_TICK_SECONDS)
        self._begun: deque[tuple[str, float]] = deque()
        self._phase: tuple[str, float] | None = None
        self._recording: _Recording | None = None
        self._staying: set[Path] = set()
        """Requests that were answered and cannot be removed, as those in another user's folder."""

    def __enter__(self) -> Self:
        if self._always:
            self._recording = _Recording(
                self._folder / f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}{SUFFIX}"
            )
        self._thread.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.__exit__(*exc)
        self._begun.append(("", datetime.now(UTC).timestamp()))
        self._tick()
        self._stop()

    def begin_phase(self, step: int, phase: str, at: float) -> None:
        """A phase of the run's loop begins, at a Unix time; the last one has ended."""
        self._begun.append((f"{phase} {step}", at))

    def _tick(self) -> float:
        """Write what is new; end a trace whose time has come, and begin one that is asked for."""
        phases = [self._begun.popleft() for _ in range(len(self._begun))]
        ended = [
            (name, begin, end)
            for (name, begin), (_, end) in pairwise(filter(None, [self._phase, *phases]))
        ]
        self._phase = phases[-1] if phases else self._phase
        try:
            if self._recording is not None:
                self._recording.write(ended)
        except OSError as error:
            logger.warning("the trace of this run cannot be written, and ends here: %s", error)
            self._recording = None
        if self._recording is not None and self._recording.is_over:
            self._stop()
        if self._folder.is_dir():
            # Names with a leading dot are files that are still being written.
            requests = set(self._folder.glob(f"[!.]*{REQUEST}"))
            for request in sorted(requests - self._staying):
                self._answer(request)
        return _TICK_SECONDS

    def _answer(self, request: Path) -> None:
        """Begin the trace that a file asks for, or say why that is not possible."""
        try:
            if self._recording is not None:
                raise ConfigError(
                    "another trace is recorded at the moment: wait for it, or read it now"
                )
            seconds = float(request.read_text())
            self._recording = _Recording(request.with_suffix(SUFFIX), seconds)
        except (ConfigError, OSError, ValueError) as error:
            try:
                write_whole(request.with_suffix(FAILED), f"{error}\n")
            except OSError as unwritten:
                logger.warning("%s cannot be answered: %s; %s", request, error, unwritten)
        if not remove_left(request):
            self._staying.add(request)

    def _stop(self) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            try:
                recording.finish()
            except OSError as error:
                logger.warning("the trace of this run cannot be finished: %s", error)


class _Recording:
    """A trace that is recorded, for some seconds or until it is finished. One for some seconds
    appears when it ends.
    """

    def __init__(self, path: Path, seconds: float | None = None) -> None:
        self._path = path
        self._written_to = path if seconds is None else unfinished(path)
        self._usage = Usage()
        self._export = SpanExport.configured(path.parents[1].name)
        self._costs = _measure_costs()
        self._stack = ExitStack()
        self._file = self._stack.enter_context(TraceFile(self._written_to))
        self._epoch = datetime.now(UTC).timestamp() - time.monotonic()
        self._begin = self._at = time.monotonic()
        self._until = None if seconds is None else self._begin + seconds
        self._lanes: dict[str, list[tuple[float, int]]] = {}
        self._counters: set[tuple[str, str]] = set()
        self._counted = (0.0, 0, 0)
        self._written_in = 0.0
        self._log = self._stack.enter_context(record_spans(SpanLog()))

    @property
    def is_over(self) -> bool:
        """True if its time has come."""
        return self._until is not None and time.monotonic() >= self._until

    def write(self, phases: Iterable[tuple[str, float, float]] = ()) -> None:
        """Write what has happened since the last call, and phases of the run's loop that have ended
        (Unix times).
        """
        started = time.thread_time()
        for name, since, until in phases:
            self._file.slice(
                Slice(PHASES, "loop", name, max(since, self._begin + self._epoch), until)
            )
        ended = self._log.take()
        self._write_spans(ended)
        if self._export is not None:
            self._export.send(ended, self._epoch)
        begin, self._at = self._at + self._epoch, time.monotonic()
        length = max(self._at + self._epoch - begin, 1e-9)
        counted = (self._log.loop_seconds, self._log.spans, self._log.loop_turns)
        seconds, spans, turns = (
            now - before for now, before in zip(counted, self._counted, strict=True)
        )
        self._counted = counted
        levels = {(CPU, name): percent for name, percent in self._usage.sample().items()}
        levels |= {(GPU, name): percent for name, percent in self._usage.gpus().items()}
        levels[CONTROLLER, LOOP_BUSY] = 100 * seconds / length
        costs = self._written_in + spans * self._costs[0] + turns * self._costs[1]
        levels[PROFILER, TRACING] = 100 * costs / length
        # A counter keeps its value in the trace until another one, so idle ones are set to 0.
        for known in self._counters - levels.keys():
            levels[known] = 0.0
        self._counters |= levels.keys()
        for (group, name), value in sorted(levels.items()):
            self._file.level(group, name, _PERCENT, begin, value)
        self._file.flush()
        # The cost of this call goes into the next one's counter.
        self._written_in = time.thread_time() - started

    def finish(self) -> None:
        """Write the rest, and close the file."""
        self.write()
        for group, name in sorted(self._counters):
            self._file.level(group, name, _PERCENT, self._at + self._epoch, 0.0)
        self._stack.close()
        if self._export is not None:
            self._export.close()
        if self._written_to != self._path:
            self._written_to.replace(self._path)

    def _write_spans(self, ended: Iterable[Span]) -> None:
        """Write spans, each on a lane of its resource that is free from its beginning."""
        for one in sorted(ended, key=lambda each: each.begin):
            if one.begin < self._begin:
                continue
            group = one.resource if one.worker is None else f"{one.resource} {one.worker}"
            lanes = self._lanes.setdefault(group, [])
            free_at, lane = lanes[0] if lanes else (one.begin, 0)
            if lanes and free_at <= one.begin:
                heapq.heapreplace(lanes, (one.end, lane))
            else:
                lane = len(lanes)
                heapq.heappush(lanes, (one.end, lane))
            where = Slice(
                group, str(lane), one.name, one.begin + self._epoch, one.end + self._epoch
            )
            self._file.slice(where, {"task": one.task} if one.task else None)


def resource_of(group: str) -> str:
    """The resource of a group of tracks: `engine` of `engine 0`."""
    return re.sub(r" \d+$", "", group)


def _measure_costs() -> tuple[float, float]:
    """The cost of a span, and of a turn of the event loop, in seconds; medians, as RL-Scope
    calibrates its book-keeping.

    Spans of other threads are not recorded meanwhile, as no trace has begun.
    """

    async def of_spans() -> float:
        begin = time.perf_counter()
        for _ in range(_CALIBRATED):
            with span("calibration", ""):
                pass
        return (time.perf_counter() - begin) / _CALIBRATED

    def of_turns() -> float:
        log, begin = SpanLog(), time.perf_counter()
        for _ in range(_CALIBRATED):
            log.loop_worked(0.0, 0.0, "")
        return (time.perf_counter() - begin) / _CALIBRATED

    with record_spans(SpanLog()):
        return statistics.median(asyncio.run(of_spans()) for _ in range(9)), statistics.median(
            of_turns() for _ in range(9)
        )
