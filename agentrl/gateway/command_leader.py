"""Runs a command, and ends everything that it has started: `python command_leader.py COMMAND
OUTPUT`.

Processes whose parent has ended are handed to this one, also those that left their group or cleared
their variables. So all are found among its descendants, and killed when the command has ended, or
when standard input ends: its writer is the run, and may have been killed. The exit status of the
command goes to standard output.

This module runs in a process of its own, so it uses only the standard library.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
_MAX_KILL_ROUNDS = 2000
_KILL_ROUND_SECONDS = 0.005


def main(command: str, output: str) -> None:
    """Run the command in a session of its own, so that what it sends to its group does not come
    here.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with open(output, "wb") as file:
        started = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            close_fds=False,  # a contained command inherits a socket (`pass_fds`)
        )
    threading.Thread(target=_end_when_run_ends, daemon=True).start()
    code = _exit_status(started.pid)
    _end_all()
    with suppress(BrokenPipeError):  # the run is gone
        os.write(1, f"{code}\n".encode())


def _end_when_run_ends() -> None:
    while os.read(0, 1):  # returns nothing at the end of the pipe: the run has closed it, or died
        pass
    _end_all()
    os._exit(0)


def _exit_status(command: int) -> int:
    """Reap processes until the command has ended. Returns its exit status; after a signal, 128 and
    the signal's number, as in a shell.
    """
    while True:
        ended, status = os.wait()
        if ended == command:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _end_all() -> None:
    """Kill all descendants, in rounds, because a process may fork before the signal reaches it."""
    for _ in range(_MAX_KILL_ROUNDS):
        living = _descendants()
        if not living:
            return
        for process in living:
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        threading.Event().wait(_KILL_ROUND_SECONDS)


def _descendants() -> list[int]:
    """All processes that run below this one."""
    children: dict[int, list[tuple[int, bool]]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            state, parent = entry.read_bytes().rpartition(b")")[2].split()[:2]
            children.setdefault(int(parent), []).append(
                (int(entry.parent.name), state not in (b"Z", b"X"))
            )
    found: list[int] = []
    above = [os.getpid()]
    while above:
        for process, runs in children.get(above.pop(), ()):
            above.append(process)
            found += [process] if runs else []
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
