"""Checkpoints: whole or absent, never half."""

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from agentrl.protocols import Trainer


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The folder `checkpoints/` of a run: `step_000010/` holds the trainer after ten steps.

    Each is written under another name and renamed when it is complete, so one that has its name is whole.
    """

    folder: Path
    keep: int

    def latest(self) -> tuple[int, Path] | None:
        """(steps done, folder) of the newest, or `None`."""
        return max(self._all(), default=None)

    async def save(self, step: int, trainer: Trainer) -> Path:
        """Write the state after `step` steps, then remove all but the newest `keep`."""
        final = self.folder / f"step_{step:06d}"
        unfinished = self.folder / f".unfinished-{final.name}"
        for leftover in (unfinished, final):
            shutil.rmtree(leftover, ignore_errors=True)
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        await trainer.save(unfinished)
        os.replace(unfinished, final)
        for _, old in sorted(self._all())[: -self.keep]:
            shutil.rmtree(old)
        return final

    def _all(self) -> list[tuple[int, Path]]:
        if not self.folder.is_dir():
            return []
        named = ((re.fullmatch(r"step_(\d+)", path.name), path) for path in self.folder.iterdir())
        return [(int(match[1]), path) for match, path in named if match]
