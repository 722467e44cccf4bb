"""The fork server's own process: it forks and reaps workers at the driver's request."""

import fcntl
import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import TextIOWrapper
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from agentrl.hosting.process_worker import serve


def preload(*modules: str) -> None:
    """Import modules for all workers. Failures are ignored here; a worker that needs the module
    reports them.
    """
    for name in modules:
        with suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that no garbage collection in a worker writes to the shared memory


def run_fork_server(control: int, lifeline: int, rest_of_path: Sequence[str]) -> None:
    """Fork and reap workers at the driver's request, until the driver is gone. In a worker: serve
    its environment.
    """
    os.set_inheritable(control, False)
    _die_with_the_driver(lifeline)
    with socket.socket(fileno=control) as channel:
        calls = Connection(os.dup(control))
        while True:
            try:
                request = json.loads(calls.recv_bytes())
            except (EOFError, OSError):
                return
            if "end" in request:
                os.kill(request["end"], signal.SIGKILL)
                _, answer = os.waitpid(request["end"], 0)
            else:
                _, fds, _, _ = socket.recv_fds(channel, 1, 3)
                answer = os.fork()
                if answer == 0:
                    break
                # In the parent too, so that the driver can kill the group as soon as it has the
                # process id.
                os.setpgid(answer, answer)
                for fd in fds:
                    os.close(fd)
            calls.send_bytes(str(answer).encode())
        calls.close()
        os.close(lifeline)
    _become_worker({**request, "path": [*request["path"], *rest_of_path]}, *fds)


def _become_worker(request: Mapping[str, Any], fd: int, lifeline: int, output: int) -> None:
    os.setpgid(0, 0)  # the parent does the same; whichever comes first
    _die_with_the_driver(lifeline)
    for inherited in (fd, lifeline):
        os.set_inheritable(inherited, False)
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    for stream in (sys.stdout, sys.stderr):
        # Unbuffered (by Python's `-u`), so that a crash loses nothing; with `backslashreplace`, so
        # that print accepts any text of a model.
        assert isinstance(stream, TextIOWrapper)  # as Python has opened it
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", write_through=True)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:] = request["path"]
    importlib.invalidate_caches()
    os.chdir(request["home"])
    serve(fd, request["address"], request["scratch"])


def _die_with_the_driver(lifeline: int) -> None:
    """Kill this process and those it starts when the driver is gone, which alone holds the pipe's
    other end.
    """
    if sys.platform == "linux":
        # The kernel does it, even if this process is busy (a regular expression may hold the GIL).
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    else:
        threading.Thread(target=_kill_at_driver_end, args=(lifeline,), daemon=True).start()


def _kill_at_driver_end(lifeline: int) -> NoReturn:
    os.read(lifeline, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)
    raise SystemExit
