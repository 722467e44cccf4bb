"""`RunLock`: at most one process trains in the folder of a run, and the folder stays in place."""

import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from agentrl.errors import ConfigError
from agentrl.files.file_lock import FileLock, Holder


class RunLock:
    """A lock on `lock` in the folder of a run. A context manager.

    It is free when the process ends, however it ends (`FileLock`). The file says who holds it, for
    the error of others.

    Raises:
        ConfigError: on entering: another process holds it.
        OSError: on entering: nothing can be written there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = FileLock(folder / "lock")
        self._open = ExitStack()

    def __enter__(self) -> Self:
        if not self._lock.acquire(wait=False):
            written = (self._folder / "lock").read_text().strip()
            holder = self._lock.holder() or written or "another process"
            raise ConfigError(
                f"{self._folder} is in use: {holder} trains there. Wait until it has ended or "
                "stop it, or write run_dir=ANOTHER for a new run"
            )
        with ExitStack() as opened:
            opened.callback(self._lock.release)
            self._file = opened.enter_context((self._folder / "lock").open("ab", buffering=0))
            # While it is open, no new folder is taken for it, though it were deleted.
            self._place = os.open(self._folder, os.O_RDONLY)
            opened.callback(os.close, self._place)
            self._write(str(Holder.this()))
            self._open = opened.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._open:
            self._write("")

    @property
    def is_in_place(self) -> bool:
        """True if the folder is where it was when it was locked."""
        try:
            return os.path.samestat(self._folder.stat(), os.fstat(self._place))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _write(self, holder: str) -> None:
        self._file.truncate(0)
        self._file.write(holder.encode())
