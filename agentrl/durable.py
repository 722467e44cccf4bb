"""Files and folders that are whole or not there, whenever the process is killed or the machine loses its power.

They are filled under another name, forced to the disk, and then renamed, which file systems do whole or not at all.
"""

import os
import shutil
from pathlib import Path

UNFINISHED = ".unfinished-"
"""What the names of all begin with that are not whole."""


def unfinished(path: Path) -> Path:
    """The name of `path` while it is not whole."""
    return path.with_name(UNFINISHED + path.name)


def write_whole(path: Path, text: str) -> None:
    """Write a small file, replacing an old one if there is one."""
    with unfinished(path).open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished(path).replace(path)
    _to_disk(path.parent)


def new_unfinished(path: Path) -> Path:
    """The name to fill a folder under, for `finish_folder`. There is nothing: what a killed process left is removed."""
    shutil.rmtree(unfinished(path), ignore_errors=True)
    return unfinished(path)


def finish_folder(path: Path) -> None:
    """Give the folder `unfinished(path)` its name. It takes its time: all that is in it is forced to the disk.

    Raises:
        OSError: `path` is a folder already, with something in it.
    """
    for inner in (*unfinished(path).rglob("*"), unfinished(path)):
        _to_disk(inner)
    unfinished(path).rename(path)
    for holder in path.parents[:2]:  # the folder that holds it may be new too
        _to_disk(holder)


def remove_folder(path: Path) -> None:
    """Remove a folder: as a whole, it is gone first."""
    shutil.rmtree(unfinished(path), ignore_errors=True)
    path.rename(unfinished(path))
    shutil.rmtree(unfinished(path))


def _to_disk(path: Path) -> None:
    """Wait until the disk holds a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
