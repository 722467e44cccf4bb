"""Files and folders that are complete or absent, even if the process is killed or the machine loses
power.

They are written under a temporary name, flushed to disk, and then renamed, which file systems do
atomically.
"""

import functools
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path

logger = logging.getLogger(__name__)

UNFINISHED = ".unfinished-"
"""Prefix of the names of incomplete files and folders."""


def unfinished(path: Path) -> Path:
    """The temporary name of `path` while it is incomplete."""
    return path.with_name(UNFINISHED + path.name)


def write_whole(path: Path, text: str) -> None:
    """Write a small file, replacing an existing one."""
    with unfinished(path).open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished(path).replace(path)
    _to_disk(path.parent)


def append_line(path: Path, line: str) -> None:
    """Add a line to a file. What a full disk has cut off before it stays a line of its own, which
    readers leave out.
    """
    with path.open("ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = f"\n{line}"
        file.write(f"{line}\n".encode())


def new_unfinished(path: Path) -> Path:
    """The temporary name of a folder to fill, for `finish_folder`. What a killed process left there
    is removed, or gets another name.
    """
    there = unfinished(path)
    remove_left(there)
    if there.exists():
        there.rename(_free_name(there))
    return there


def finish_folder(path: Path) -> None:
    """Rename the folder `unfinished(path)` to `path`. This is slow, as its whole content is flushed
    to disk first.

    Raises:
        OSError: `path` is a folder already, and not empty.
    """
    for inner in (*unfinished(path).rglob("*"), unfinished(path)):
        _to_disk(inner)
    unfinished(path).rename(path)
    for holder in path.parents[:2]:  # the folder that holds it may be new too
        _to_disk(holder)


@contextmanager
def none_unfinished(path: Path) -> Iterator[None]:
    """If the block does not come to its end, remove what it has written as `unfinished(path)`."""
    try:
        yield
    except BaseException:
        remove_left(unfinished(path))
        raise


def remove_folder(path: Path) -> None:
    """Remove a folder. It is renamed first, so `path` is never an incomplete folder.

    If it cannot be removed, this is said, and nothing is raised: it stays as it is, or under a
    temporary name.
    """
    away = unfinished(path)
    remove_left(away)
    try:
        away = path.rename(_free_name(away))
    except OSError as error:
        _warn_that_it_stays(path, error.strerror)
        return
    remove_left(away)


def remove_left(path: Path) -> bool:
    """Remove a file or a folder, if it is there. If it cannot be removed, this is said, and nothing
    is raised. Returns whether it is gone.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except FileNotFoundError:
        return True
    except OSError as error:
        _warn_that_it_stays(path, error.strerror)
        return False
    return True


def remove_unfinished(folder: Path) -> None:
    """Remove what killed processes have left incomplete in a folder, and in those in it."""
    for left in list(folder.rglob(f"{UNFINISHED}*")):
        remove_left(left)


def remove_unfinished_folders(folder: Path) -> None:
    """Remove the incomplete folders in a folder, and in those in it. Incomplete files stay: threads
    may still write them.
    """
    for left in list(folder.rglob(f"{UNFINISHED}*")):
        if left.is_dir():
            remove_left(left)


@functools.cache
def _warn_that_it_stays(path: Path, why: str | None) -> None:
    """Warn of something that cannot be removed, once."""
    logger.warning(
        "%s cannot be removed (%s): it stays for now, and is tried again later", path, why
    )


def _free_name(path: Path) -> Path:
    """The first of `path`, `path~2`, `path~3` ... that does not exist."""
    names = chain([path], (path.with_name(f"{path.name}~{number}") for number in count(2)))
    return next(name for name in names if not name.exists())


def _to_disk(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
