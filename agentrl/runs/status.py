"""`RunStatus`: the step and the phase that a run is in, for other processes and the terminal."""

import json
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agentrl.files.durable import append_line, unfinished, write_whole
from agentrl.observe.ending import Ending
from agentrl.observe.live_status import LiveStatus
from agentrl.observe.machine import MachineLog
from agentrl.observe.profiler import Profiler
from agentrl.observe.progress import ProgressDisplay
from agentrl.rollout.accounts import SchedulerStatus


class RunStatus:
    """Writes `status.json`, `timeline.jsonl`, `live.json`, `machine.jsonl` and profiles. A context
    manager.

    `profiled`: whether every step is profiled. `check_place` raises if the run is not in its
    folder any more, and is called before a phase begins.
    """

    def __init__(
        self,
        folder: Path,
        display: ProgressDisplay,
        *,
        profiled: bool,
        check_place: Callable[[], None],
    ) -> None:
        self.check_place = check_place
        self._folder = folder
        self._display = display
        self._live = LiveStatus(folder)
        self._profiler = Profiler(folder, always=profiled)
        self._row: dict[str, Any] = {}
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            opened.enter_context(self._profiler)
            opened.enter_context(self._live)
            opened.enter_context(MachineLog(self._folder))
            self._write(None, None, datetime.now(UTC))
            self._open = opened.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

    @property
    def step(self) -> int | None:
        """The present step; None before the first."""
        step: int | None = self._row.get("step")
        return step

    @property
    def phase(self) -> str | None:
        """The present phase; None before the first."""
        phase: str | None = self._row.get("phase")
        return phase

    def watch(self, underway: Callable[[], SchedulerStatus]) -> None:
        """Show what a scheduler does, in the terminal and in `live.json`. `underway` is called by
        other threads.
        """
        self._display.watch(underway)
        self._live.watch(underway)

    def begin_phase(self, step: int, phase: str) -> None:
        """Record in `status.json` and `timeline.jsonl` that `phase` of step `step` begins.

        Raises:
            StorageError: the run is not in its folder any more.
        """
        self.check_place()
        begin = datetime.now(UTC)
        self._profiler.begin_phase(step, phase, begin.timestamp())
        self._display.begin_phase(phase)
        self._live.begin_phase()
        row = self._write(step, phase, begin)
        append_line(self._folder / "timeline.jsonl", json.dumps(row))

    def end(self, ending: Ending) -> None:
        """Record in `status.json` how the run has ended."""
        self._row["ended"] = ending.as_row()
        write_whole(self._folder / "status.json", json.dumps(self._row) + "\n")

    def _write(self, step: int | None, phase: str | None, since: datetime) -> Mapping[str, Any]:
        """Replace `status.json`, which also forgets how an earlier process has ended. Before its
        first step, a run has no step and no phase.
        """
        row = {"pid": os.getpid(), "step": step, "phase": phase, "since": since.isoformat()}
        self._row = {**row, "host": socket.gethostname()}
        path = self._folder / "status.json"
        # A loss of power may lose it, so nothing is flushed to the disk.
        unfinished(path).write_text(json.dumps(self._row) + "\n")
        unfinished(path).replace(path)
        return row
