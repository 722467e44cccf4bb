"""`RunTemp`: the temporary files of a run lie in its folder, so that a killed run leaves none
elsewhere.
"""

import os
import shutil
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Self

_AFTER_MULTIPROCESSING = -200
"""multiprocessing removes its own temporary folder with the priority -100, and fails if that is
gone already.
"""


class RunTemp:
    """The folder `tmp/PID` of a run, and the place of all temporary files of this process and of
    those that it starts. A context manager.

    Entering removes what dead processes have left in `tmp`: only one process at a time trains in
    the folder of a run (`RunLock`). The process's own folder is removed when it ends, after
    multiprocessing has removed its files there.
    """

    def __init__(self, folder: Path) -> None:
        self._parent = folder.absolute() / "tmp"
        self._before: tuple[str | None, str | None] = (None, None)

    def __enter__(self) -> Self:
        own = self._parent / str(os.getpid())
        for left in self._parent.glob("*"):
            if left != own:
                shutil.rmtree(left, ignore_errors=True)
        own.mkdir(parents=True, exist_ok=True)
        Finalize(None, _remove, (own, os.getpid()), exitpriority=_AFTER_MULTIPROCESSING)
        self._before = (os.environ.get("TMPDIR"), tempfile.tempdir)
        os.environ["TMPDIR"] = tempfile.tempdir = short_path(own)
        return self

    def __exit__(self, *exc: object) -> None:
        variable, tempfile.tempdir = self._before
        if variable is None:
            os.environ.pop("TMPDIR", None)
        else:
            os.environ["TMPDIR"] = variable


def short_path(folder: Path) -> str:
    """A path of a folder that is short enough for sockets in it, as long as this process lives.

    The path of a Unix socket may have 107 bytes, and Ray and vLLM make theirs in the folder for
    temporary files.
    """
    through = f"/proc/{os.getpid()}/fd"
    if not os.path.isdir(through):  # not Linux
        return str(folder)
    return f"{through}/{os.open(folder, os.O_RDONLY | os.O_DIRECTORY)}"


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # a fork of it inherits the finalizer too
        shutil.rmtree(folder, ignore_errors=True)
        if folder.parent.is_dir() and not any(folder.parent.iterdir()):
            folder.parent.rmdir()
