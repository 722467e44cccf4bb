"""`RunLock`: at most one process trains in the folder of a run."""

import fcntl
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from agentrl.errors import ConfigError


class RunLock:
    """A lock of the kernel on `lock` in the folder of a run. A context manager.

    The kernel frees it when the process ends, however it ends. The file says who holds it, for the error of others.

    Raises:
        ConfigError: on entering: another process holds it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Self:
        self._file = (self._folder / "lock").open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._file.close()
            raise ConfigError(
                f"{self._folder} is in use: {holder} trains there. Wait until it has ended or stop it, or write "
                "run_dir=ANOTHER for a new run"
            ) from None
        self._write(
            f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC,"
        )
        return self

    def __exit__(self, *exc: object) -> None:
        self._write("")
        self._file.close()

    def _write(self, holder: str) -> None:
        self._file.truncate(0)
        self._file.write(holder)
        self._file.flush()
