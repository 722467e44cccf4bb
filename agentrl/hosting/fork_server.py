"""The driver's end of the fork servers, from which the worker processes are forked.

A fork server has imported agentrl and no environment: a start takes milliseconds, and a worker
needs only the memory that its environment adds. Each interpreter
(`agentrl/hosting/interpreter.py`) has its own. The fork server imports the modules that the
environment's factory lists in `preload`: those that take seconds to import and survive a fork.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from agentrl.hosting.interpreter import agentrl_alone, environment

_START = """
import sys
rest = sys.path[:] if {foreign!r} else []
sys.path[:] = [*{path!r}, *rest]
from agentrl.hosting.fork_server_process import preload, run_fork_server
preload(*{preload!r})
run_fork_server(*{arguments!r}, rest)
"""


class ForkServer:
    """The process that the workers are forked from. It imports no environment, since not every
    package survives a fork. It reaps a worker only on request: until then no other process can get
    the worker's process id.
    """

    def __init__(self, python: str | None, preload: tuple[str, ...]) -> None:
        self._python = python
        self._lock = threading.Lock()
        with ExitStack() as unless_started, ExitStack() as theirs:
            self._socket, their_socket = socket.socketpair()
            unless_started.enter_context(self._socket)
            theirs.enter_context(their_socket)
            lifeline, self._lifeline = os.pipe()
            unless_started.callback(os.close, self._lifeline)
            theirs.callback(os.close, lifeline)
            self._calls = Connection(os.dup(self._socket.fileno()))
            unless_started.enter_context(self._calls)
            arguments = (their_socket.fileno(), lifeline)
            code = _START.format(
                path=_path(python), foreign=python is not None, preload=preload, arguments=arguments
            )
            self._process = subprocess.Popen(
                [python or sys.executable, "-u", "-P", "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=arguments,
                start_new_session=True,
                env=environment(python) if python else None,
            )
            unless_started.pop_all()
        weakref.finalize(
            self, _end_fork_server, self._process, self._calls, self._socket, self._lifeline
        )

    def start(self, address: str, folder: Path, socket_fd: int, lifeline: int, output: int) -> int:
        """Fork a worker, and return its process id."""
        return self._call(
            {
                "address": address,
                "scratch": str(folder),
                "path": _path(self._python),
                "home": str(Path.cwd()),
                "environment": environment(self._python) if self._python else dict(os.environ),
            },
            socket_fd,
            lifeline,
            output,
        )

    def end(self, pid: int) -> int:
        """Reap a worker that was killed, and return its wait status."""
        return self._call({"end": pid})

    @property
    def is_dead(self) -> bool:
        """True if the fork server has ended, for example because it was killed."""
        return self._process.poll() is not None

    def _call(self, request: Mapping[str, Any], *fds: int) -> int:
        with self._lock:
            self._calls.send_bytes(json.dumps(request).encode())
            if fds:
                socket.send_fds(self._socket, [b"+"], fds)
            return int(self._calls.recv_bytes())


def _end_fork_server(
    process: "subprocess.Popen[bytes]", calls: Connection, control: socket.socket, lifeline: int
) -> None:
    process.kill()
    process.wait()
    calls.close()
    control.close()
    os.close(lifeline)


_fork_servers: dict[tuple[int, str | None, tuple[str, ...]], ForkServer] = {}
"""By process id, interpreter and preloaded modules. One mapping for the process: hosts of several
runs and suites share a fork server, which costs a second to start, and it lives as long as they."""
_fork_servers_lock = threading.Lock()


def fork_server_for(python: str | None, preload: tuple[str, ...]) -> ForkServer:
    """This process's fork server (by process id, as this process may itself be a fork), or a new
    one if it has died.
    """
    with _fork_servers_lock:
        key = (os.getpid(), python, preload)
        found = _fork_servers.get(key)
        if found is None or found.is_dead:
            found = _fork_servers[key] = ForkServer(python, preload)
        return found


def _path(python: str | None) -> list[str]:
    """The first entries of a worker's `sys.path`: those of this process, as absolute paths. For
    another interpreter, only agentrl, and the current folder if it is on the path here.
    """
    here = [str(Path(entry).absolute()) for entry in sys.path]
    return [str(agentrl_alone()), *({str(Path.cwd())} & set(here))] if python else here
