"""`RunLock`: at most one process trains in the folder of a run."""

from pathlib import Path
from typing import Self

from agentrl.errors import ConfigError
from agentrl.files.file_lock import FileLock, Holder


class RunLock:
    """A lock on `lock` in the folder of a run. A context manager.

    It is free when the process ends, however it ends (`FileLock`). The file says who holds it, for
    the error of others.

    Raises:
        ConfigError: on entering: another process holds it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = FileLock(folder / "lock")

    def __enter__(self) -> Self:
        if not self._lock.acquire(wait=False):
            written = (self._folder / "lock").read_text().strip()
            holder = self._lock.holder() or written or "another process"
            raise ConfigError(
                f"{self._folder} is in use: {holder} trains there. Wait until it has ended or "
                "stop it, or write run_dir=ANOTHER for a new run"
            )
        self._file = (self._folder / "lock").open("a")
        self._write(str(Holder.this()))
        return self

    def __exit__(self, *exc: object) -> None:
        self._write("")
        self._file.close()
        self._lock.release()

    def _write(self, holder: str) -> None:
        self._file.truncate(0)
        self._file.write(holder)
        self._file.flush()
