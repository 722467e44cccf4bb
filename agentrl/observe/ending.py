"""`Ending`: why a run has ended, and the command that resumes it.

`status.json` and `summary.json` keep it under "ended":

    {"how": "failed", "why": "step 17: the loss is nan ...", "error": "TrainingError", "at":
     "2026-11-25T13:40:02+00:00", "steps": 17, "checkpoint": 10, "resume": "agentrl train --resume
     runs/lake"}
"""

import asyncio
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from agentrl.errors import AgentRLError, describe
from agentrl.files.disk_errors import storage_problem

How = Literal["completed", "stopped", "failed", "killed"]


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a run.

    `completed`: the recipe has done its work. `stopped`: by Ctrl-C or a signal. `failed`: by an
    error. `killed`: its process is gone and has written nothing, which is read from what it has
    left.
    """

    how: How
    why: str
    """A sentence, or what the error says."""
    error: str | None
    """The name of the error's class; None if there was none."""
    at: str | None
    """The time, as in ISO 8601; None if it is unknown."""
    steps: int | None
    """Steps that were made; None if it is unknown."""
    checkpoint: int | None
    """The newest checkpoint is after so many steps; None if there is none."""
    resume: str | None
    """The command that resumes the run; None if there is nothing to resume."""

    def as_row(self) -> dict[str, Any]:
        """For a file of JSON."""
        return asdict(self)


_FORMAT = TypeAdapter(Ending)


def ending_of(
    error: BaseException | None, folder: Path, *, steps: int, checkpoint: int | None
) -> Ending:
    """The ending, now, of the run in `folder`, which `error` has ended, if any has."""
    at = datetime.now(UTC).isoformat()
    if error is None:
        return Ending("completed", "all of its work is done", None, at, steps, checkpoint, None)
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    resume = resume_command(folder)
    if isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
        return Ending(
            "stopped", f"stopped by {str(error) or 'Ctrl-C'}", None, at, steps, checkpoint, resume
        )
    # The message of our own errors; the problem of the disk; or the place where it was raised.
    why = str(error)
    if not isinstance(error, AgentRLError):
        why = storage_problem(error) or describe(error)
    return Ending("failed", why, type(error).__name__, at, steps, checkpoint, resume)


def ending_kept(status: Mapping[str, Any], folder: Path, checkpoint: int | None) -> Ending | None:
    """The ending of the run in `folder`, whose process does not live any more, by its
    `status.json`; None if what that says cannot be read.
    """
    if "ended" in status:
        try:
            return _FORMAT.validate_python(status["ended"])
        except ValidationError:
            return None
    why = (
        f"its process {status.get('pid')} is gone and has left no reason: it was killed (by"
        " SIGKILL, for want of memory), its machine stopped, or its disk had no room for one"
    )
    return Ending("killed", why, None, None, None, checkpoint, resume_command(folder))


def how_to_go_on(folder: Path, checkpoint: int | None) -> str:
    """The command that resumes the run in a folder, and where it begins."""
    command = f"`{resume_command(folder)}`"
    if checkpoint is None:
        return f"{command} begins again, since no checkpoint was saved"
    return f"{command} resumes from the checkpoint after {checkpoint} step{'s' * (checkpoint != 1)}"


def resume_command(folder: Path) -> str:
    """The command that resumes the run in a folder."""
    return f"agentrl train --resume {shlex.quote(str(folder))}"
