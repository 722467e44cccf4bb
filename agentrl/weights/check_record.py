"""The record of a check: that every byte of a bundle's files was compared with its manifest.

Other processes of the machine need not read the files again as long as nobody has written to them
since, which their size and the time of their last change show. Memory that flips a bit by itself
afterwards is not noticed, as it is not in weights that an engine has loaded.
"""

from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from agentrl.settings.base import Settings

_NAME = "checked.json"


class CheckRecord(Settings):
    """What was checked: the bundle with this checksum, whose files then were in this state."""

    checksum: str
    states: dict[str, tuple[int, int]]
    """By file: its bytes, and the time of its last change as the kernel counts it, in ns."""


def record_check(folder: Path, checksum: str, files: Iterable[str]) -> None:
    """Write that these files of the bundle with this checksum have been checked and are right.

    Raises:
        OSError: it cannot be written.
    """
    states = {file: _state(folder / file) for file in files}
    record = CheckRecord(checksum=checksum, states=states)
    (folder / _NAME).write_text(record.model_dump_json())


def was_checked(folder: Path, checksum: str, files: Iterable[str]) -> bool:
    """True if these files of the bundle with this checksum have been checked, and are as they were
    then.
    """
    try:
        record = CheckRecord.model_validate_json((folder / _NAME).read_bytes())
        states = {file: _state(folder / file) for file in files}
    except (OSError, ValidationError):
        return False
    return record == CheckRecord(checksum=checksum, states=states)


def _state(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_ctime_ns
