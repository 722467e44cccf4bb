"""`FileLock`: one process at a time, also on file systems that have no locks."""

import errno
import fcntl
import functools
import json
import logging
import os
import socket
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

logger = logging.getLogger(__name__)

_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP}
"""Errors of `flock` on Lustre without `-o flock`, NFS without lockd, and some FUSE systems."""
_POLL_SECONDS = 0.2
_RENEW_SECONDS = 15.0
_SILENT_SECONDS = 180.0
"""Without a sign of life for so long, a holder on another machine is dead."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a lock: its id, its start in clock ticks, and where ids mean anything
    (`machine`: one boot of one kernel, and one namespace).
    """

    pid: int
    started: str
    machine: str
    host: str
    since: str
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    @classmethod
    def this(cls) -> "Holder":
        """This process, from now on."""
        since = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}"
        return cls(
            os.getpid(),
            _start_of_process(os.getpid()) or "",
            _machine(),
            socket.gethostname(),
            since,
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since} UTC,"


class FileLock:
    """An exclusive lock of the kernel (`flock`) on a file, which is made, or on a folder.

    The kernel frees it when the process ends, however it ends. Where the file system has no locks,
    this is said once, and a file (`marker`; by default PATH.holder) that only one process can make
    takes their place. Its holder renews it, and it counts no more when the holder is dead: at once
    on this machine, and elsewhere when it has not been renewed for three minutes of the file
    system's own clock.
    """

    def __init__(self, path: Path, marker: Path | None = None) -> None:
        self._path = path
        self._marker = marker or path.with_name(f"{path.name}.holder")
        self._descriptor: int | None = None
        self._held: Holder | None = None
        self._released = threading.Event()

    def acquire(self, *, wait: bool = True) -> bool:
        """Take the lock; without `wait`, only if it is free now. Returns whether it was taken.

        Raises:
            OSError: the file cannot be made.
        """
        flags = os.O_RDONLY if self._path.is_dir() else os.O_RDWR | os.O_CREAT
        descriptor = os.open(self._path, flags, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return False
            if error.errno not in _NO_LOCKS:
                raise
            _warn_of_no_locks(os.stat(self._path).st_dev, self._path.parent, error.strerror)
            return self._acquire_by_marker(wait)
        self._descriptor = descriptor
        # A marker is of a process that has no locks on this file system, as in another container.
        while self._marker.exists() and _is_alive(self.holder(), self._marker):
            if not wait:
                self.release()
                return False
            self._released.wait(_POLL_SECONDS)
        return True

    def release(self) -> None:
        """Free the lock. May be called more than once."""
        if self._held is not None:
            self._released.set()
            if _holder_in(self._marker) == self._held:
                self._marker.unlink(missing_ok=True)
            self._held = None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @property
    def by_marker(self) -> bool:
        """True if this process holds it by its marker, as the file system has no locks."""
        return self._held is not None

    def holder(self) -> Holder | None:
        """The maker of the marker; None if there is none, as where the kernel has locks."""
        return _holder_in(self._marker)

    def _acquire_by_marker(self, wait: bool) -> bool:
        """Make the marker, when no other process that lives has."""
        while not self._make_marker():
            other = self.holder()
            if not _is_alive(other, self._marker):
                self._remove_dead_marker(other)
            elif not wait:
                return False
            else:
                self._released.wait(_POLL_SECONDS)
        # Renewed through a descriptor, because the folder of the marker may be renamed.
        self._descriptor = os.open(self._marker, os.O_RDWR)
        signs = threading.Thread(
            target=self._renew_marker, args=(self._descriptor,), name="sign-of-life", daemon=True
        )
        signs.start()
        return True

    def _make_marker(self) -> bool:
        held = Holder.this()
        written = self._marker.with_name(f"{self._marker.name}.{held.token}")
        written.write_text(json.dumps(asdict(held)))
        try:
            os.link(written, self._marker)  # with its content, and only if there is none
        except FileExistsError:
            return False
        except OSError:  # no hard links either
            try:
                with self._marker.open("x") as file:
                    file.write(json.dumps(asdict(held)))
            except FileExistsError:
                return False
        finally:
            written.unlink(missing_ok=True)
        self._held = held
        return True

    def _remove_dead_marker(self, dead: Holder | None) -> None:
        """Remove the marker of a dead process. Another process may have done so first, and may
        have made a marker of its own since: that one is put back.
        """
        aside = self._marker.with_name(f"{self._marker.name}.{uuid.uuid4().hex}")
        with suppress(FileNotFoundError):
            self._marker.rename(aside)
            if _holder_in(aside) != dead:
                with suppress(FileExistsError):
                    os.link(aside, self._marker)
            aside.unlink()

    def _renew_marker(self, marker: int) -> None:
        while not self._released.wait(_RENEW_SECONDS):
            try:
                os.utime(marker)
            except OSError as error:
                logger.warning(
                    "%s cannot be renewed, so others may take the lock: %s", self._marker, error
                )
                return


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """The block is run by one process at a time.

    Raises:
        OSError: the file cannot be made.
    """
    lock = FileLock(path)
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


def has_record_locks(folder: Path) -> bool:
    """True if files in a folder have the locks that SQLite uses, as far as this can be tried."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            fcntl.lockf(probe, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _NO_LOCKS
    return True


@functools.cache
def _warn_of_no_locks(device: int, folder: Path, why: str | None) -> None:
    logger.warning(
        "the file system of %s has no locks (flock: %s): files named .holder keep other processes"
        " out. If one is left by a machine that is gone, it counts no more after three minutes",
        folder,
        why,
    )


def _holder_in(path: Path) -> Holder | None:
    try:
        return Holder(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _is_alive(holder: Holder | None, marker: Path) -> bool:
    """True if the process that made a marker lives. An unreadable marker may be half written."""
    if holder is not None and holder.machine == _machine():
        return _start_of_process(holder.pid) == holder.started
    return marker.exists() and not _is_silent(marker)


def _is_silent(marker: Path) -> bool:
    """True if a marker was not renewed for long, by the clock of its file system."""
    with (
        suppress(FileNotFoundError),
        tempfile.NamedTemporaryFile(dir=marker.parent, prefix=".now-") as now,
    ):
        return os.fstat(now.fileno()).st_mtime - marker.stat().st_mtime > _SILENT_SECONDS
    return False


@functools.cache
def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # not Linux
        return socket.gethostname()


def _start_of_process(pid: int) -> str | None:
    """The start of a process of this machine, in clock ticks; None if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return ""
