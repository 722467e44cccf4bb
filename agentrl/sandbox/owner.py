"""Who has started a sandbox: a process of this machine, so that those of dead ones can be found."""

import os
from pathlib import Path


def this_process() -> str:
    """This process as a text that no other one has, before or after it."""
    return _identify(os.getpid())


def is_dead(owner: str) -> bool:
    """True if the process of such a text has ended: certainly, as only its own machine can tell."""
    machine, _, rest = owner.partition("/")
    pid, _, started = rest.partition("/")
    if machine != _machine() or not pid.isdigit():
        return False
    try:
        return _identify(int(pid)) != f"{machine}/{pid}/{started}"
    except FileNotFoundError:
        return True


def _identify(pid: int) -> str:
    # Process ids are reused, so the start time belongs to it: in ticks since the machine's start,
    # because the wall clock may be set meanwhile.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return f"{_machine()}/{pid}/{fields[19]}"


def _machine() -> str:
    """This start of this machine, and the namespace in which process ids count."""
    started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{started}-{os.stat('/proc/self/ns/pid').st_ino}"
