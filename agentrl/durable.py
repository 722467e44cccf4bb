"""Files and folders that are complete or absent, even if the process is killed or the machine loses power.

They are written under a temporary name, flushed to disk, and then renamed, which file systems do atomically.
"""

import os
import shutil
from pathlib import Path

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


def new_unfinished(path: Path) -> Path:
    """The temporary name of a folder to fill, for `finish_folder`. Removes what a killed process left there."""
    shutil.rmtree(unfinished(path), ignore_errors=True)
    return unfinished(path)


def finish_folder(path: Path) -> None:
    """Rename the folder `unfinished(path)` to `path`. This is slow, as its whole content is flushed to disk first.

    Raises:
        OSError: `path` is a folder already, and not empty.
    """
    for inner in (*unfinished(path).rglob("*"), unfinished(path)):
        _to_disk(inner)
    unfinished(path).rename(path)
    for holder in path.parents[:2]:  # the folder that holds it may be new too
        _to_disk(holder)


def remove_folder(path: Path) -> None:
    """Remove a folder. It is renamed first, so `path` is never an incomplete folder."""
    shutil.rmtree(unfinished(path), ignore_errors=True)
    path.rename(unfinished(path))
    shutil.rmtree(unfinished(path))


def _to_disk(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
