"""Which processes have ended."""

import ipaddress
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

PATIENCE_SECONDS = 900.0
"""How long a test waits for what has to happen in other processes. It is about whether, and not
about how soon.
"""


def is_alive(process: psutil.Process) -> bool:
    """Whether it has not ended. One that nobody has asked for its exit status yet has: where its
    parent is gone, that is for the machine's first process, which may take seconds.
    """
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def hit(pid: int, number: signal.Signals) -> None:
    """Send a signal that kills or stops, and wait until each thread has done so: until then, some
    may answer.
    """
    os.kill(pid, number)
    wait_for_signal(pid)


def wait_for_signal(pid: int) -> None:
    """Wait until a signal that kills or stops has done so."""
    until = time.monotonic() + PATIENCE_SECONDS
    with suppress(FileNotFoundError):
        while any(_state(thread) not in "TtZX" for thread in Path(f"/proc/{pid}/task").iterdir()):
            assert time.monotonic() < until, f"process {pid} neither stops nor ends"
            time.sleep(0.001)


def _state(thread: Path) -> str:
    with suppress(OSError):  # it has ended
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    return "X"


def still_alive(processes: Iterable[psutil.Process | int], seconds: float) -> list[str]:
    """The titles of those that have not ended within so many seconds."""
    waiting = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            waiting.append(psutil.Process(process) if isinstance(process, int) else process)
    limit = time.monotonic() + seconds
    while (
        waiting := [process for process in waiting if is_alive(process)]
    ) and time.monotonic() < limit:
        time.sleep(0.005)
    return [title(process) for process in waiting]


def open_to_others(processes: Iterable[psutil.Process]) -> list[str]:
    """The sockets of these processes on which other machines could reach them: not on the loopback
    interface.
    """
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            for socket in process.net_connections("inet"):
                address = ipaddress.ip_address(socket.laddr.ip)
                address = getattr(address, "ipv4_mapped", None) or address
                if socket.status == psutil.CONN_LISTEN and not address.is_loopback:
                    found.append(f"{socket.laddr.ip}:{socket.laddr.port} of {title(process)}")
    return found


def title(process: psutil.Process) -> str:
    """Its command line, or "" when it has gone."""
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return " ".join(process.cmdline()) or process.name()
    return ""


def can_mount() -> bool:
    """Whether this user may mount a file system in a namespace of its own, as tests of full disks
    do.
    """
    if shutil.which("unshare") is None:
        return False
    return (
        subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode == 0
    )


def processes_with(text: str) -> list[str]:
    """The numbers of processes whose environment has this text."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if text.encode() in entry.read_bytes():
                found.append(entry.parent.name)
        except OSError:
            continue
    return found
