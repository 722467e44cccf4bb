"""The configs of a run, and what each changed.

config.yaml      the newest
config.0.yaml    the first, config.1.yaml that of the first resume that changed something, ...
changes.jsonl    a row for each of these: its number, the step from which on it counts, the time,
                 and each setting that it changed, with its old and its new value
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agentrl.config.from_file import ORIGINS, load_config, saved_origins
from agentrl.config.loading import LoadedConfig
from agentrl.errors import ConfigError
from agentrl.files.durable import append_line, write_whole

CHANGES = "changes.jsonl"
_ABSENT = "(none)"
_DEFINING = re.compile(
    r"seed|model\..+|tasks\..+|recipe\.name|recipe\.\w+\.(path|player)"
    r"|env\.(?!(mixture\.\d+\.)?"
    r"(isolation|exhausted|group_size|budget|max_tokens|max_failed_tasks|reward|algorithm)\b).+"
)
"""Settings that define a run: its model, and the stream of its tasks."""


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A setting with another value than before; `_ABSENT` stands for one that is not there."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {_text(self.old)} -> {_text(self.new)}"

    @property
    def defines_the_run(self) -> bool:
        """True if another value would make another run of it."""
        return _DEFINING.fullmatch(self.key) is not None


@dataclass(frozen=True, slots=True)
class ConfigHistory:
    """The configs in the folder of a run."""

    folder: Path

    def kept(self) -> dict[int, Path]:
        """The configs that the run has had, by number."""
        paths = self.folder.glob("config.*.yaml")
        return {
            int(match[1]): path
            for path in paths
            if (match := re.fullmatch(r"config\.(\d+)\.yaml", path.name))
        }

    def newest(self) -> LoadedConfig:
        """The config that the run had last, whatever `config.yaml` says by now.

        Raises:
            ConfigError: it cannot be read any more.
        """
        kept = self.kept()
        return load_config(kept[max(kept)] if kept else self.folder / "config.yaml")

    def changes(self, loaded: LoadedConfig) -> list[SettingChange]:
        """The differences of a config from the newest one; a run's folder may have moved.

        Raises:
            ConfigError: the newest one cannot be read any more.
        """
        old, new = ({key: value for key, value, _ in one.rows()} for one in (self.newest(), loaded))
        return [
            SettingChange(key, old.get(key, _ABSENT), new.get(key, _ABSENT))
            for key in {**old, **new}
            if key != "run_dir" and old.get(key, _ABSENT) != new.get(key, _ABSENT)
        ]

    def keep(self, loaded: LoadedConfig, changes: Sequence[SettingChange], step: int) -> None:
        """Write a config, which has these changes and counts from `step` on, as the newest one."""
        path = self.folder / "config.yaml"
        before = path.read_text() if path.exists() else None
        text, kept = loaded.config.to_yaml(), self.kept()
        if changes and not kept and before is not None:  # an earlier version kept no copies
            write_whole(self.folder / "config.0.yaml", before)
            self._append(0, 0, ())
        origins = dict(self._origins(loaded, changes, step))
        write_whole(self.folder / ORIGINS, json.dumps(origins, indent=2) + "\n")
        if text != before:
            write_whole(path, text)  # with it, there is a run to resume
        if changes or before is None:
            number = max(kept, default=0 if before is not None else -1) + 1
            write_whole(self.folder / f"config.{number}.yaml", text)
            self._append(number, step, changes)

    def _append(self, number: int, step: int, changes: Sequence[SettingChange]) -> None:
        changed = {change.key: [change.old, change.new] for change in changes}
        row = {
            "config": number,
            "step": step,
            "at": datetime.now(UTC).isoformat(),
            "changed": changed,
        }
        append_line(self.folder / CHANGES, json.dumps(row))

    def _origins(
        self, loaded: LoadedConfig, changes: Sequence[SettingChange], step: int
    ) -> Iterator[tuple[str, str]]:
        """The source of each setting. A setting that a resume does not change keeps its source."""
        before, changed = (
            saved_origins(self.folder / "config.yaml"),
            {change.key for change in changes},
        )
        for key, _, origin in loaded.rows():
            if key in changed and origin != "default":
                yield key, f"{origin}, from step {step} on" if before else origin
            else:
                yield key, origin if key in changed else before.get(key, origin)


def refuse_another_run(changes: Sequence[SettingChange], folder: Path) -> None:
    """Refuse changes that would make another run of the one in a folder.

    Raises:
        ConfigError: there are such.
    """
    if refused := [change for change in changes if change.defines_the_run]:
        listed = "\n".join(f"  {change}" for change in refused)
        raise ConfigError(
            f"the run in {folder} would become another one, with another model or other"
            f" tasks:\n{listed}\nWrite run_dir=ANOTHER for a new run, leave these out, or add"
            " --change to go on with them in this one"
        )


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)
