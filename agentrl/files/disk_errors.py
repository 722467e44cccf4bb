"""Disk errors in a sentence: errors of files are found in whatever they were wrapped in."""

import errno
import sqlite3
from collections.abc import Iterator

_REASONS = {
    errno.ENOSPC: "no space is left on the disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file would be larger than it may be",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission is denied",
    errno.EPERM: "it is not permitted",
    errno.EIO: "the disk cannot be read or written",
    errno.EEXIST: "a file is where a folder should be",
    errno.ENOTDIR: "a file is where a folder should be",
    errno.EISDIR: "a folder is where a file should be",
}
_FULL = "no space is left on the disk, or a file would be too large"
_TEXTS = {
    "no space left on device": _FULL,
    "file too large": _FULL,
    "database or disk is full": _FULL,
    "pytorchstreamwriter failed writing": _FULL,
    "inline_container.cc": _FULL,
    "attempt to write a readonly database": "the file system is read-only",
    "unable to open database file": "permission is denied",
    "malformed": "the ledger is damaged",
    "not a database": "the ledger is damaged",
    "disk i/o error": "the disk cannot be read or written",
}
"""Texts in the disk errors of SQLite, safetensors and torch."""


def storage_problem(error: BaseException) -> str | None:
    """The problem with the disk, and the file; None if that is not why this was raised."""
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.errno in _REASONS:
            where = f" ({cause.filename})" if cause.filename else ""
            return f"{_REASONS[cause.errno]}{where}"
        # No room for the index of its log.
        if getattr(cause, "sqlite_errorname", None) == "SQLITE_IOERR_SHMSIZE":
            return f"{_FULL} ({cause})"
        if isinstance(cause, sqlite3.Error | RuntimeError) or "Safetensor" in type(cause).__name__:
            for text, reason in _TEXTS.items():
                if text in str(cause).lower():
                    return f"{reason} ({cause})"
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what it was raised from, and the members of groups."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        waiting += [current.__context__, current.__cause__]
        if isinstance(current, BaseExceptionGroup):
            waiting += current.exceptions
