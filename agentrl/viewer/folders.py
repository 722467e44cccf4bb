"""The runs to look at: which folders they are, and what the small files in each say."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypedDict

import yaml

from agentrl.errors import ConfigError
from agentrl.observe.live_status import read_live_state


class Phase(TypedDict):
    """A phase of a step: Unix times in seconds; `end` is `None` while it goes on."""

    step: int
    phase: str
    begin: float
    end: float | None


@dataclass(slots=True)
class RunFolder:
    """A run's folder, which a run may be writing to. Rows of metrics that have been read once are kept."""

    name: str
    path: Path
    generation: int = 0
    """Counts how often the metrics began again, as they do when a run is resumed."""
    _rows: list[dict[str, Any]] = field(default_factory=list)
    _read: tuple[int, int] = (0, 0)  # the file's inode, and how many of its bytes have been read

    def metrics(self) -> Sequence[Mapping[str, Any]]:
        """The complete rows of `metrics.jsonl`. Lines that are no rows are left out."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return ()
        inode, known = self._read
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_ino != inode or found.st_size < known:
                self._rows, known = [], 0
                self.generation += 1
            file.seek(known)
            lines = file.read().split(b"\n")
        self._rows += [row for line in lines[:-1] if (row := _row(line)) is not None]
        self._read = found.st_ino, known + sum(len(line) + 1 for line in lines[:-1])
        return self._rows

    def status(self) -> dict[str, Any]:
        """The step and phase, since when, whether its process lives here, what waits for what in it, its summary, and
        its warnings. A run that lives and has no phase is starting.
        """
        status = _json(self.path / "status.json")
        now = read_live_state(self.path)
        if now is not None and not _lives(now.pid):
            now = None
        if now is not None and now.pid != status.get("pid"):
            status = {}  # of an earlier process: this one is starting
        ended = (self.path / "summary.json").exists()
        return {
            "name": self.name,
            "folder": str(self.path),
            "step": status.get("step"),
            "phase": status.get("phase"),
            "since": status.get("since"),
            "steps": self.settings().get("steps"),
            "live": now is not None or (_lives(status.get("pid")) and not ended),
            "now": None if now is None else asdict(now),
            "summary": _json(self.path / "summary.json"),
            "warnings": self.warnings(),
        }

    def warnings(self) -> list[str]:
        """What the run has warned of, in order; once, also where a resumed run said it again."""
        path = self.path / "warnings.jsonl"
        lines = path.read_bytes().split(b"\n") if path.exists() else []
        return list(dict.fromkeys(str(row.get("text")) for line in lines if (row := _row(line)) is not None))

    def settings(self) -> dict[str, Any]:
        """The settings of the run, by dotted name."""
        try:
            found = yaml.safe_load((self.path / "config.yaml").read_text(errors="replace"))
        except (OSError, yaml.YAMLError):
            return {}
        return dict(_leaves(found)) if isinstance(found, dict) else {}

    def origins(self) -> dict[str, str]:
        """Where each setting came from, by dotted name."""
        return {name: str(origin) for name, origin in _json(self.path / "origins.json").items()}

    def phases(self) -> list[Phase]:
        """What the run's loop did, in order. A phase that its process did not live to end has no length."""
        path = self.path / "timeline.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        begun = [row for line in lines if (row := _row(line)) is not None and "since" in row]
        phases = []
        for row, follows in zip_longest(begun, begun[1:]):
            begin = datetime.fromisoformat(row["since"]).timestamp()
            if follows is None:
                status = self.status()
                end = None if status["live"] and status["phase"] else begin
            elif follows.get("pid") == row.get("pid"):
                end = datetime.fromisoformat(follows["since"]).timestamp()
            else:
                end = begin
            phases.append(Phase(step=row["step"], phase=str(row["phase"]), begin=begin, end=end))
        return phases

    def files(self, kind: str) -> dict[int, Path]:
        """The Parquet files of `trajectories` or `samples`, by step."""
        found = (self.path / kind).glob("step_*.parquet")
        return {int(path.stem.removeprefix("step_")): path for path in sorted(found)}

    def tokenizer(self) -> Path | None:
        """The tokenizer of the run's model, if there is one."""
        model = self.settings().get("model.name", "")
        folders = [*sorted((self.path / "checkpoints").glob("step_*")), self.path / "model", Path(str(model))]
        return next((path for folder in folders if (path := folder / "tokenizer.json").exists()), None)


def find_runs(places: Iterable[Path]) -> list[RunFolder]:
    """The runs in some folders, each of which is a run or has runs in it, by the time of their beginning.

    Raises:
        ConfigError: a place is no folder.
    """
    found: dict[Path, None] = {}
    for place in places:
        if not place.is_dir():
            raise ConfigError(f"there is no folder {str(place)!r}: give the folder of a run, or one with runs in it")
        is_run = (place / "config.yaml").exists()
        configs = [place / "config.yaml"] if is_run else [*place.glob("*/config.yaml"), *place.glob("*/*/config.yaml")]
        found |= dict.fromkeys(config.parent.resolve() for config in configs)
    paths = sorted(found, key=lambda path: ((path / "config.yaml").stat().st_mtime, path))
    names = [path.name for path in paths]
    return [
        RunFolder(name if names.count(name) == 1 else f"{path.parent.name}/{name}", path)
        for name, path in zip(names, paths, strict=True)
    ]


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _lives(pid: object) -> bool:
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
