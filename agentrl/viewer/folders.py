"""The folders of runs that the viewer shows, and the contents of the small files in each."""

import json
import os
import re
import socket
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from itertools import zip_longest
from pathlib import Path
from sys import intern
from typing import Any, TypedDict

from agentrl.errors import ConfigError
from agentrl.observe.ending import ending_kept
from agentrl.observe.launches import read_launches
from agentrl.observe.live_status import read_live_state
from agentrl.observe.machine import MachineState, read_machine
from agentrl.settings.yaml_values import read_yaml, value_of

_STEP_FILE = re.compile(r"step_(\d{1,9})\.parquet")
_EVALUATION_FILE = re.compile(r"(.+)_(\d{6,9})\.parquet")
EVALUATION = "eval:"
"""With a name after it, a kind of episodes: those of that evaluation."""
_CHECKPOINT = re.compile(r"step_(\d{1,9})")
_Stamp = tuple[int, int, int]


class Phase(TypedDict):
    """A phase of a step: Unix times in seconds; `end` is `None` while it goes on."""

    step: int
    phase: str
    begin: float
    end: float | None


class Changed(TypedDict):
    """A config of a run: its number, the step from which on it counts, the time, and the settings
    that it changed, each with its old and its new value.
    """

    config: int
    step: int
    at: str
    changed: dict[str, Any]


class Warned(TypedDict):
    """A warning: the step that gave rise to it, and the metrics that it is about, if the run said
    which.
    """

    step: int
    text: str
    metrics: list[str]


@dataclass(slots=True)
class RunFolder:
    """A run's folder, which a run may be writing to, and which may be deleted at any time.

    Rows of metrics that have been read once are kept, and small files are read again only when they
    have changed. Calls may come from several threads.
    """

    name: str
    path: Path
    generation: int = 0
    """Counts how often the metrics began again, as they do when a run is resumed."""
    _rows: list[dict[str, Any]] = field(default_factory=list)
    _read: tuple[int, int] = (0, 0)  # the file's inode, and how many of its bytes have been read
    _kept: dict[str, tuple[_Stamp | None, Any]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def exists(self) -> bool:
        """True if the folder is still there and still a run's."""
        return (self.path / "config.yaml").exists()

    @property
    def stamp(self) -> str:
        """A stamp that changes with the metrics."""
        try:
            found = (self.path / "metrics.jsonl").stat()
        except OSError:
            return ""
        return f"{found.st_ino}-{found.st_size}"

    def metrics(self) -> Sequence[Mapping[str, Any]]:
        """The complete rows of `metrics.jsonl`. Lines that are no rows are left out."""
        with self._lock:
            inode, known = self._read
            try:
                with (self.path / "metrics.jsonl").open("rb") as file:
                    found = os.fstat(file.fileno())
                    if found.st_ino != inode or found.st_size < known:
                        self._rows, known = [], 0
                        self.generation += 1
                    file.seek(known)
                    lines = file.read().split(b"\n")
            except OSError:
                return ()
            # After the last newline there is nothing, or a line that is still being written.
            self._rows += [row for line in lines[:-1] if (row := _parse_row(line)) is not None]
            self._read = found.st_ino, known + sum(len(line) + 1 for line in lines[:-1])
            return self._rows

    def status(self) -> dict[str, Any]:
        """The step and phase, since when, whether its process lives here, what waits for what in
        it, its summary, its warnings, and how it ended (an `Ending`). A run that lives and has no
        phase is starting.
        """
        status, summary = self._json("status.json"), self._json("summary.json")
        now = read_live_state(self.path)
        if now is not None and not _is_alive(now.pid):
            now = None
        if now is not None and now.pid != status.get("pid"):
            status = {}  # of an earlier process: this one is starting
        ended = "ended" in status or (self.path / "summary.json").exists()
        live = now is not None or (_is_alive(status.get("pid")) and not ended)
        since = _time(status.get("since"))
        return {
            "name": self.name,
            "folder": str(self.path),
            "step": status.get("step"),
            "phase": status.get("phase"),
            "since": None if since is None else status["since"],
            "steps": self.settings().get("steps"),
            "live": live,
            "ended": None if live else self._ending(status, summary),
            "now": None if now is None else asdict(now),
            "summary": summary,
            "warnings": self.warnings(),
            "about": self.about(),
        }

    def _ending(
        self, status: Mapping[str, Any], summary: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """The end of a run whose process is dead; `None` if unknown."""
        if "ended" not in status and (
            summary or not status or status.get("host") not in (None, socket.gethostname())
        ):
            return (
                None  # a run of an earlier release, or one whose process another machine knows of
            )
        steps = [
            int(found[1])
            for path in self._names("checkpoints")
            if (found := _CHECKPOINT.fullmatch(path))
        ]
        ending = ending_kept(status, self.path, max(steps, default=None))
        return None if ending is None else ending.as_row()

    def warnings(self) -> list[Warned]:
        """The warnings of the run, in order; once, also if a resumed run repeated them."""
        found = self._read_cached("warnings.jsonl", _parse_warnings)
        return [] if found is None else list(found)

    def settings(self, number: int | None = None) -> dict[str, Any]:
        """The settings of the run, by dotted name: the newest ones, or those of its config with
        this number.
        """
        return dict(
            self._read_cached(
                "config.yaml" if number is None else f"config.{number}.yaml", _parse_settings
            )
            or {}
        )

    def changes(self) -> list[Changed]:
        """The configs that the run has had, in order, each with what it changed."""
        return list(self._read_cached("changes.jsonl", _parse_changes) or ())

    def origins(self) -> dict[str, str]:
        """The origin of each setting, by dotted name."""
        return {name: str(origin) for name, origin in self._json("origins.json").items()}

    def phases(self) -> list[Phase]:
        """The phases of the run's loop, in order. A phase that the end of its launch has cut short
        has no length.
        """
        begun = self._read_cached("timeline.jsonl", _parse_timeline) or []
        launches = self._read_cached("launches.jsonl", read_launches) or []
        launched = sorted(at for row in launches if (at := _time(row["at"])) is not None)
        phases = []
        for (row, begin), follows in zip_longest(begun, begun[1:]):
            end: float | None = begin
            if follows is None:
                status = self.status()
                end = None if status["live"] and status["phase"] else begin
            # A notebook resumes in the same process, and in containers each may be number 1.
            elif follows[0].get("pid") == row.get("pid") and bisect_right(
                launched, begin
            ) == bisect_right(launched, follows[1]):
                end = max(begin, follows[1])
            phases.append(Phase(step=row["step"], phase=str(row["phase"]), begin=begin, end=end))
        return phases

    def files(self, kind: str) -> dict[int, Path]:
        """The Parquet files of `trajectories`, `untrained` or `samples`, by step, or those of the
        evaluation NAME (`eval:NAME`), by the number of steps before it.
        """
        if kind.startswith(EVALUATION):
            return self.evaluations().get(kind.removeprefix(EVALUATION), {})
        names = sorted(self._names(kind))
        return {
            int(found[1]): self.path / kind / name
            for name in names
            if (found := _STEP_FILE.fullmatch(name))
        }

    def evaluations(self) -> dict[str, dict[int, Path]]:
        """The files with the episodes of evaluations: by name, and by the number of steps before
        each.
        """
        found: dict[str, dict[int, Path]] = {}
        for name in sorted(self._names("trajectories")):
            if (match := _EVALUATION_FILE.fullmatch(name)) and not _STEP_FILE.fullmatch(name):
                found.setdefault(match[1], {})[int(match[2])] = self.path / "trajectories" / name
        return found

    def about(self) -> dict[str, Any]:
        """The run's start (time, host, commit), and its notes and tags."""
        launches = self._read_cached("launches.jsonl", read_launches) or []
        status, settings = self._json("status.json"), self.settings()
        ending = status.get("ended")
        ended = ending.get("at") if isinstance(ending, dict) else None
        newest = launches[-1] if launches else {}
        notes = (
            str(settings.get("observe.notes") or ""),
            self._read_cached("notes.md", lambda text: text.decode("utf-8", "replace")) or "",
        )
        tags = settings.get("observe.tags")
        return {
            "began": launches[0]["at"] if launches else None,
            "last": next(
                (at for at in (ended, status.get("since")) if _time(at) is not None), None
            ),
            "launches": len(launches),
            **{name: newest.get(name) for name in ("host", "commit", "changed", "version")},
            "notes": "\n\n".join(note.strip() for note in notes if note.strip()),
            "tags": [str(tag) for tag in tags] if isinstance(tags, list) else [],
        }

    def machine(self, begin: float, end: float) -> list[MachineState]:
        """The load of the controller's machine between two Unix times, as far as it was sampled."""
        found: list[MachineState] = self._read_cached("machine.jsonl", read_machine) or []
        return [state for state in found if begin <= state.at <= end]

    def tokenizer(self) -> Path | None:
        """The tokenizer of the run's model, if there is one."""
        model = self.settings().get("model.name", "")
        folders = [
            *sorted((self.path / "checkpoints").glob("step_*")),
            self.path / "model",
            Path(str(model)),
        ]
        return next(
            (path for folder in folders if (path := folder / "tokenizer.json").exists()), None
        )

    def _names(self, folder: str) -> list[str]:
        try:
            return os.listdir(self.path / folder)
        except OSError:
            return []

    def _json(self, name: str) -> dict[str, Any]:
        found = self._read_cached(name, json.loads)
        return found if isinstance(found, dict) else {}

    def _read_cached(self, name: str, read: Callable[[bytes], Any]) -> Any:
        """The value that `read` makes of a file, which is read again only after a change; `None` if
        it is unreadable.
        """
        path = self.path / name
        try:
            found = path.stat()
            stamp = found.st_ino, found.st_mtime_ns, found.st_size
            kept = self._kept.get(name)
            if kept is None or kept[0] != stamp:
                kept = self._kept[name] = stamp, read(path.read_bytes())
            return kept[1]
        except (OSError, ValueError, ConfigError, RecursionError):
            return None


def find_runs(places: Iterable[Path]) -> list[RunFolder]:
    """The runs in some folders, each of which is a run or has runs in it, by the time of their
    beginning.

    Raises:
        ConfigError: a place is no folder.
    """
    found: dict[Path, float] = {}
    for place in places:
        if not place.is_dir():
            raise ConfigError(
                f"there is no folder {str(place)!r}: give the folder of a run, or one with runs"
                " in it"
            )
        is_run = (place / "config.yaml").exists()
        configs = (
            [place / "config.yaml"]
            if is_run
            else [*place.glob("*/config.yaml"), *place.glob("*/*/config.yaml")]
        )
        for config in configs:
            try:
                found.setdefault(config.parent.resolve(), config.stat().st_mtime)
            except OSError:  # it has just been deleted
                continue
    paths = sorted(found, key=lambda path: (found[path], path))
    names = [path.name for path in paths]
    return [
        RunFolder(name if names.count(name) == 1 else f"{path.parent.name}/{name}", path)
        for name, path in zip(names, paths, strict=True)
    ]


def _parse_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    # Thousands of rows have the same names.
    return {intern(name): value for name, value in row.items()}


def _parse_settings(text: bytes) -> dict[str, Any]:
    root = read_yaml(text.decode(errors="replace"), "")
    found = None if root is None else value_of(root)
    return dict(_leaves(found)) if isinstance(found, dict) else {}


def _parse_warnings(text: bytes) -> list[Warned]:
    found: dict[str, Warned] = {}
    for line in text.split(b"\n"):
        if (row := _parse_row(line)) is not None:
            names = row.get("metrics")
            metrics = [str(name) for name in names] if isinstance(names, list) else []
            said = str(row.get("text"))
            found.setdefault(said, Warned(step=row["step"], text=said, metrics=metrics))
    return list(found.values())


def _parse_changes(text: bytes) -> list[Changed]:
    found = []
    for line in text.split(b"\n"):
        row = _parse_row(line)
        if (
            row is None
            or not isinstance(row.get("config"), int)
            or not isinstance(row.get("changed"), dict)
        ):
            continue
        found.append(
            Changed(
                config=row["config"],
                step=row["step"],
                at=str(row.get("at")),
                changed=row["changed"],
            )
        )
    return found


def _parse_timeline(text: bytes) -> list[tuple[dict[str, Any], float]]:
    """The rows of a timeline, each with its Unix time."""
    rows = (_parse_row(line) for line in text.split(b"\n")[:-1])
    return [
        (row, begin)
        for row in rows
        if row is not None and "phase" in row and (begin := _time(row.get("since"))) is not None
    ]


def _time(written: object) -> float | None:
    """The Unix time of an ISO date; `None` if it is none."""
    try:
        return datetime.fromisoformat(written).timestamp() if isinstance(written, str) else None
    except (ValueError, OverflowError, OSError):
        return None


def _is_alive(pid: object) -> bool:
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
