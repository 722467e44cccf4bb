"""Requests to change the number of engines of a live run, by files in its folder.

RUN/engines/NAME.request    asks for engines to be added or removed
RUN/engines/NAME.taken      the run works on it
RUN/engines/NAME.answer     the result; the process that asked removes it
RUN/engines/changes.jsonl   each engine that was added, removed or lost, a row each
"""

import functools
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import Field, TypeAdapter, ValidationError

from agentrl.files.durable import append_line, remove_left, write_whole
from agentrl.settings.base import Settings

logger = logging.getLogger(__name__)

FOLDER = "engines"
_REQUEST, _TAKEN, _ANSWER = ".request", ".taken", ".answer"
_CHANGES = "changes.jsonl"


class EngineRequest(Settings):
    """So many engines shall be added, or removed."""

    change: Literal["add", "remove"]
    count: int = Field(ge=1)


class EngineAnswer(Settings):
    """What has become of a request, in words. `done`: all of it was done."""

    text: str
    done: bool


@dataclass(frozen=True, slots=True)
class EngineChange:
    """A change of the number of engines: when (ISO 8601), in which step, of which engine, and in
    how many seconds. `serving`: the engines that serve after it. `why`: the reason of a loss.
    """

    at: str
    step: int | None
    change: Literal["added", "removed", "lost"]
    engine: int
    seconds: float
    serving: int
    why: str = ""

    def __str__(self) -> str:
        took = f" in {self.seconds:.1f} s" if self.seconds else ""
        why = f" ({self.why})" if self.why else ""
        return f"engine {self.engine} was {self.change}{took}{why}; {self.serving} serve"


_FORMAT = TypeAdapter(EngineChange)


@functools.cache
def _warn_that_it_stays(path: Path, why: str | None) -> None:
    """Warn of a request that cannot be taken, once."""
    logger.warning(
        "%s cannot be taken (%s): the run needs to write into that folder, which may be another"
        " user's",
        path,
        why,
    )


class AskedRun:
    """The asking side: one request to the run in a folder."""

    def __init__(self, run: Path, request: EngineRequest) -> None:
        name = f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}-{os.getpid()}"
        self._path = run / FOLDER / name
        self._path.parent.mkdir(exist_ok=True)
        write_whole(self._path.with_suffix(_REQUEST), f"{request.model_dump_json()}\n")

    def answer(self) -> EngineAnswer | None:
        """The answer, once; None if there is none yet."""
        path = self._path.with_suffix(_ANSWER)
        if not path.exists():
            return None
        answer = EngineAnswer.model_validate_json(path.read_text())
        path.unlink()
        return answer

    @property
    def is_taken(self) -> bool:
        """True if the run works on it."""
        return self._path.with_suffix(_TAKEN).exists()

    def withdraw(self) -> bool:
        """Take the request back; returns False if the run has taken it already."""
        try:
            self._path.with_suffix(_REQUEST).unlink()
        except FileNotFoundError:
            return False
        return True


class EngineRequests:
    """The side of the run: the requests in its folder, of which those of earlier launches are
    removed first.
    """

    def __init__(self, run: Path) -> None:
        self._folder = run / FOLDER

    def clear(self) -> None:
        """Remove what was asked before: a run begins with the engines of its config."""
        for suffix in (_REQUEST, _TAKEN, _ANSWER):
            for left in self._folder.glob(f"*{suffix}"):
                remove_left(left)

    def take(self) -> Sequence[tuple[str, EngineRequest]]:
        """The new requests with their names, the oldest first. One that cannot be read is answered
        with the reason; one that cannot be taken stays, and is warned of once.
        """
        taken = []
        # Names with a leading dot are files that are still being written.
        for path in sorted(self._folder.glob(f"[!.]*{_REQUEST}")):
            try:
                path.rename(path.with_suffix(_TAKEN))
            except FileNotFoundError:  # it was withdrawn
                continue
            except OSError as error:
                _warn_that_it_stays(path, error.strerror)
                continue
            try:
                request = EngineRequest.model_validate_json(
                    path.with_suffix(_TAKEN).read_bytes(), strict=True
                )
            # As a file of another user, it may be unreadable.
            except (ValidationError, OSError) as error:
                self.answer(path.stem, EngineAnswer(text=f"no request: {error}", done=False))
                continue
            taken.append((path.stem, request))
        return taken

    def answer(self, name: str, answer: EngineAnswer) -> None:
        """Answer a request."""
        write_whole(self._folder / f"{name}{_ANSWER}", f"{answer.model_dump_json()}\n")
        remove_left(self._folder / f"{name}{_TAKEN}")

    def record(self, change: EngineChange) -> None:
        """Add a change to those of the run."""
        self._folder.mkdir(exist_ok=True)
        append_line(self._folder / _CHANGES, json.dumps(asdict(change)))


def read_changes(run: Path) -> Sequence[EngineChange]:
    """The changes of the engines of a run that can be read, the oldest first."""
    try:
        rows = (run / FOLDER / _CHANGES).read_bytes().splitlines()
    except FileNotFoundError:
        return ()
    found = []
    for row in rows:
        try:
            found.append(_FORMAT.validate_json(row))
        except ValidationError:
            continue
    return found
