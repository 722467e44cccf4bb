"""The driver's handle of a worker process: its socket, its scratch folder and its output.

The worker starts in its own empty folder, which is removed when it ends. Its stdout and stderr are
captured, and error messages quote the last lines. It leads its own process group, which is killed
when the driver dies.
"""

import os
import shutil
import signal
import socket
import tempfile
import weakref
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path

from agentrl.hosting.fork_server import ForkServer, fork_server_for

_OUTPUT_KEPT_BYTES = 1 << 20
"""Captured output above this size is discarded at the next reset."""


class WorkerHandle:
    """A running process, the driver's end of its socket, its scratch folder and its output."""

    def __init__(self, address: str, python: str | None, preload: tuple[str, ...]) -> None:
        fork_server = fork_server_for(python, preload)
        with ExitStack() as unless_started, ExitStack() as theirs:
            mine, their_socket = socket.socketpair()
            theirs.enter_context(their_socket)
            self.connection = Connection(mine.detach())
            unless_started.enter_context(self.connection)
            reads, lifeline = os.pipe()
            theirs.callback(os.close, reads)
            unless_started.callback(os.close, lifeline)
            # After these: where files run out, no folder can be removed.
            self._folder = Path(tempfile.mkdtemp(prefix="agentrl-env-")).resolve()
            unless_started.callback(shutil.rmtree, self._folder, ignore_errors=True)
            scratch = self._folder / "scratch"
            scratch.mkdir()
            output = theirs.enter_context((self._folder / "output").open("ab"))
            self.pid = fork_server.start(
                address, scratch, their_socket.fileno(), reads, output.fileno()
            )
            unless_started.pop_all()
        # Also runs at the driver's exit, and when a broken environment is garbage-collected.
        self._end = weakref.finalize(
            self, _end, fork_server, self.pid, self.connection, lifeline, self._folder
        )

    def signal_group(self) -> None:
        # The fork server reaps the process only on request; until then no other process can get its
        # id.
        if self._end.alive:  # else another process may have the id by now
            _kill_group(self.pid)

    def end(self) -> str:
        """Kill, reap and clean up; return how the process ended, by itself or by this kill."""
        status = self._end()
        if status is None:
            return "is gone"
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit status {code}"

    def forget_old_output(self) -> None:
        path = self._folder / "output"
        if path.stat().st_size > _OUTPUT_KEPT_BYTES:
            os.truncate(path, 0)  # it is open for appending, so the next line starts the file

    def last_output(self, lines: int = 16) -> str:
        try:
            with (self._folder / "output").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 2000))
                text = file.read().decode(errors="replace").strip()
        except OSError:
            return ""
        return "; it last wrote:\n  " + "\n  ".join(text.splitlines()[-lines:]) if text else ""


def _end(
    fork_server: ForkServer, pid: int, connection: Connection, lifeline: int, folder: Path
) -> int | None:
    _kill_group(pid)
    try:
        return fork_server.end(pid)
    except (OSError, EOFError):  # the fork server has died, and the system reaps the worker
        return None
    finally:
        connection.close()
        os.close(lifeline)
        shutil.rmtree(folder, ignore_errors=True)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
