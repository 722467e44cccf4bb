"""Checkpoints: each is complete or absent, its bytes are checked, and only the newest and the best
are kept.
"""

import asyncio
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from agentrl.errors import CheckpointError, ConfigError
from agentrl.files.durable import (
    finish_folder,
    new_unfinished,
    none_unfinished,
    remove_folder,
    remove_unfinished,
    unfinished,
)
from agentrl.protocols import Savable
from agentrl.runs.state import STATE_FILE

CHECKSUMS = "checksums.json"
"""The file of a checkpoint that has the XXH3-128 of every other file."""
_STATE = {".pt"}
"""Suffixes of the trainer's own files, which lie next to the model. Folders in a checkpoint are the
trainer's too.
"""

_LOADED = {*_STATE, ".safetensors"}
"""Suffixes of the files with numbers that training continues from."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The folder `checkpoints/` of a run: `step_000010/` holds the trainer after ten steps.

    Each is written under a temporary name, flushed to disk and renamed, so a folder with a final
    name is complete.
    """

    folder: Path
    keep: int = 1
    """Number of the newest checkpoints to keep."""
    keep_best: int = 0
    """Number of the checkpoints with the largest values to keep in addition."""
    awaited: set[int] = field(default_factory=set)
    """Steps whose value is pending: their checkpoints are kept too."""

    def latest(self) -> tuple[int, Path] | None:
        """(steps done, folder) of the newest checkpoint, or `None`."""
        return max(self.all().items(), default=None)

    def best(self, values: Mapping[int, float]) -> list[tuple[int, Path]]:
        """(steps done, folder) of the checkpoints with a value, the largest first; the newest first
        among equals.
        """
        valued = [
            (step, path)
            for step, path in self.all().items()
            if not math.isnan(values.get(step, math.nan))
        ]
        return sorted(valued, key=lambda one: (-values[one[0]], -one[0]))

    def find(self, which: str, values: Mapping[int, float]) -> Path:
        """The folder of the checkpoint `latest`, of the `best` by `values`, or of the one after a
        number of steps.

        Raises:
            ConfigError: there is no such checkpoint.
        """
        named = {str(step): path for step, path in sorted(self.all().items())}
        if newest := self.latest():
            named["latest"] = newest[1]
        if ranked := self.best(values):
            named["best"] = ranked[0][1]
        if which not in named:
            there = ", ".join(named) or "none yet"
            raise ConfigError(f"{self.folder} has no checkpoint {which!r}; there is {there}")
        return named[which]

    def all(self) -> dict[int, Path]:
        """The folder of each checkpoint, by the steps done."""
        paths = self.folder.glob("step_*")
        return {
            int(match[1]): path
            for path in paths
            if (match := re.fullmatch(r"step_(\d+)", path.name))
        }

    async def save(
        self, step: int, state: Savable, values: Mapping[int, float] | None = None
    ) -> Path:
        """Save the state after `step` steps, then remove the checkpoints not to keep; `values` are
        for `best`.

        Raises:
            CheckpointError: this step has a checkpoint already.
        """
        return await (await self.begin(step, state, values)).finish()

    async def begin(
        self, step: int, state: Savable, values: Mapping[int, float] | None = None
    ) -> "BegunCheckpoint":
        """Begin to save the state after `step` steps, which may change when this returns. It counts
        when it is finished, and must be before the next one begins.

        Raises:
            CheckpointError: this step has a checkpoint already.
        """
        final = self.folder / f"step_{step:06d}"
        if final.exists():
            raise CheckpointError(
                f"{final} exists already: a run saves each step once. Remove it, or use another "
                "run_dir"
            )
        remove_unfinished(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        await state.begin_save(new_unfinished(final))
        return BegunCheckpoint(self, final, state, values or {})

    def set_aside_damaged(self, announce: Callable[[str], None]) -> None:
        """Rename the checkpoints whose files are not as they were written, so that a run resumes
        from a sound one.

        Raises:
            CheckpointError: no sound one is left.
        """
        damaged = {
            path: problem for path in self.all().values() if (problem := damage(path)) is not None
        }
        if damaged and len(damaged) == len(self.all()):
            listed = "; ".join(f"{path.name}: {problem}" for path, problem in damaged.items())
            raise CheckpointError(
                f"every checkpoint in {self.folder} is damaged ({listed}): restore one from a "
                "copy, or start a new run with run_dir=ANOTHER"
            )
        for path, problem in damaged.items():
            announce(
                f"{path} is damaged ({problem}); it is set aside as "
                f"{set_aside(path, 'damaged').name}"
            )

    def check_origin(self) -> None:
        """Check that the checkpoints are this run's own: others decide what the model does.

        Raises:
            CheckpointError: one lies outside of the run's folder, by a link, or belongs to another
            user.
        """
        run, me = self.folder.parent.resolve(), os.geteuid()
        for checkpoint in self.all().values():
            for path in (checkpoint, *checkpoint.rglob("*")):
                foreign = None
                if not path.resolve().is_relative_to(run):
                    foreign = f"leads to {path.resolve()}, outside of the run's folder"
                elif me != 0 and path.lstat().st_uid != me:
                    foreign = "belongs to another user"
                if foreign:
                    raise CheckpointError(
                        f"{path} {foreign}. Its author decides what the model does that goes on "
                        "from it: if you trust them, write checkpoint.allow_foreign=true"
                    )

    def go_back_to(self, step: int) -> None:
        """Rename the checkpoints after more than `step` steps, so that a run resumes from that of
        `step`.

        Raises:
            ConfigError: there is none.
        """
        self.find(str(step), {})
        for later, path in self.all().items():
            if later > step:
                set_aside(path, "left")

    def thin_out(self, values: Mapping[int, float]) -> None:
        """Remove the checkpoints that are neither among the newest nor among the best by these
        values.
        """
        newest = sorted(self.all())[-self.keep :]
        best = [step for step, _ in self.best(values)[: self.keep_best]]
        for step, path in self.all().items():
            if step not in {*newest, *best, *(self.awaited if self.keep_best else ())}:
                remove_folder(path)


@dataclass(frozen=True, slots=True)
class BegunCheckpoint:
    """A checkpoint that is being written, under a temporary name."""

    checkpoints: Checkpoints
    final: Path
    state: Savable
    values: Mapping[int, float]

    async def finish(self) -> Path:
        """Wait until it is written, give it its name, and remove the checkpoints not to keep."""
        await self.state.saved()
        # The checksums before the name, and removal last: at each moment, a kill leaves at least
        # one complete checkpoint.
        await asyncio.to_thread(_write_checksums, unfinished(self.final))
        await asyncio.to_thread(finish_folder, self.final)
        await asyncio.to_thread(self.checkpoints.thin_out, self.values)
        return self.final


def damage(checkpoint: Path) -> str | None:
    """What is wrong with the first file of a checkpoint that is missing or has changed; None if the
    checkpoint is sound.
    """
    try:
        written = json.loads((checkpoint / CHECKSUMS).read_text())
    except FileNotFoundError:
        return f"{CHECKSUMS} is missing"
    except ValueError:
        return f"{CHECKSUMS} cannot be read"
    if not isinstance(written, dict) or (not written and len(list(checkpoint.iterdir())) > 1):
        return f"{CHECKSUMS} names no files"
    loaded = sorted(
        path.name
        for path in checkpoint.iterdir()
        if path.suffix in _LOADED or path.name == STATE_FILE
    )
    for name in loaded:
        if name not in written:
            return f"{CHECKSUMS} does not name {name}"
    return next(_differences(checkpoint, written), None)


def _differences(checkpoint: Path, written: Mapping[str, str]) -> Iterator[str]:
    for name, checksum in written.items():
        path = checkpoint / name
        if not path.is_file():
            yield f"{name} is missing"
        elif _checksum(path) != checksum:
            yield f"{name} is not as it was written"


def _write_checksums(checkpoint: Path) -> None:
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    checksums = {path.relative_to(checkpoint).as_posix(): _checksum(path) for path in files}
    # Without a newline at the end, a truncated file is never valid JSON.
    (checkpoint / CHECKSUMS).write_text(json.dumps(checksums, indent=2))


def _checksum(path: Path) -> str:
    hashed = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            hashed.update(block)
    return hashed.hexdigest()


def set_aside(path: Path, why: str) -> Path:
    """Rename a checkpoint to a free name that no run resumes from: `damaged-step_000010`, then
    `damaged-step_000010-2` and so on.
    """
    free, number = path.with_name(f"{why}-{path.name}"), 1
    while free.exists():
        number += 1
        free = path.with_name(f"{why}-{path.name}-{number}")
    return path.rename(free)


def export(
    checkpoint: Path, into: Path, describe: Callable[[Path], None] = lambda folder: None
) -> None:
    """Copy the model out of a checkpoint into a new folder: weights, config and tokenizer, without
    the optimizer. `describe` adds files to the folder before it has its name.

    Raises:
        ConfigError: `into` exists already.
        CheckpointError: the checkpoint holds no model.
    """
    if into.exists():
        raise ConfigError(f"{into} exists already: name a new folder")
    files = [
        path
        for path in sorted(checkpoint.iterdir())
        if path.is_file() and path.suffix not in _STATE and path.name not in (CHECKSUMS, STATE_FILE)
    ]
    if "config.json" not in {path.name for path in files} or ".safetensors" not in {
        path.suffix for path in files
    }:
        raise CheckpointError(
            f"{checkpoint} holds no model: it has "
            f"{', '.join(path.name for path in files) or 'no files'}, where config.json and "
            "*.safetensors should be. Name the folder of a run, or one of its "
            "checkpoints/step_..."
        )
    with none_unfinished(into):
        folder = new_unfinished(into)
        folder.mkdir(parents=True)
        for path in files:
            shutil.copyfile(path, folder / path.name)
        describe(folder)
        finish_folder(into)
