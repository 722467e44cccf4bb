"""`MachineFacts`: plain values about the machine, each of which is collected once.
`machine_checks.py` judges them.
"""

import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import Distribution, PackageNotFoundError, distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import agentrl
from agentrl.errors import ConfigError
from agentrl.package.distribution import DISTRIBUTION
from agentrl.placement.devices import Gpu, usable_cores, usable_memory
from agentrl.placement.probe import AskGpus, ask_gpus, has_driver

_PCI = Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY = "0x10de", ("0x0300", "0x0302")
"""PCI's number of the vendor, and the beginnings of its classes for displays and accelerators."""
SHARED_MEMORY = Path("/dev/shm")
_NEVER = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True, slots=True)
class InstalledCopy:
    """A version of a package that is installed in a folder."""

    version: str
    folder: str


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes of a file system."""

    folder: Path
    total: int
    free: int


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """A machine, as a process on it sees it."""

    gpus: tuple[Gpu, ...] = ()
    """Those that torch sees."""
    driver: bool = False
    """The driver of GPUs is loaded."""
    no_answer: str = ""
    """Why torch cannot ask the GPUs, although there is a driver."""
    gpu_boards: int = 0
    """NVIDIA's boards on the PCI bus, with or without a driver."""
    cores: int = 1
    memory: int = 0
    """Bytes."""
    shared: Disk | None = None
    """Shared memory; None where there is none."""
    disk: Disk | None = None
    """The disk of the run's folder."""
    open_files: tuple[int, int] = (1024, 1024)
    """The limits of open files: that which holds, and that to which it may be raised; -1: none."""
    processes: int = -1
    """The limit of processes and threads of this user; -1: none."""
    now: datetime = _NEVER
    installed_at: datetime = _NEVER
    """When agentrl's own files were written: it cannot be earlier now."""
    file_clock: float = 0.0
    """Seconds by which the clock of the run's disk is ahead of this machine's."""
    copies: Mapping[str, tuple[InstalledCopy, ...]] | None = None
    """The installed packages, by normalised name, in the order in which Python looks for them."""
    requirements: tuple[str, ...] = ()
    """What agentrl's distribution requires; empty where it is only on the module path."""


def machine_facts(
    run_dir: Path, *, path: Sequence[str] | None = None, ask: AskGpus = ask_gpus
) -> MachineFacts:
    """Ask this machine. `path`: where packages are looked for, by default `sys.path`."""
    # The run's folder need not exist yet: the nearest one above it is on the same disk.
    wanted = run_dir.absolute()
    folder = next(one for one in (wanted, *wanted.parents) if one.is_dir())
    gpus: tuple[Gpu, ...] = ()
    no_answer = ""
    try:
        gpus = ask(os.environ)
    except ConfigError as error:
        no_answer = str(error)
    return MachineFacts(
        gpus=gpus,
        driver=has_driver(),
        no_answer=no_answer,
        gpu_boards=sum(1 for _ in _boards()),
        cores=usable_cores(),
        memory=usable_memory(),
        shared=_disk(SHARED_MEMORY),
        disk=_disk(folder),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        processes=resource.getrlimit(resource.RLIMIT_NPROC)[0],
        now=datetime.now(UTC),
        installed_at=_written(Path(agentrl.__file__)),
        file_clock=_clock_of(folder),
        copies=installed_copies(distributions(path=list(sys.path if path is None else path))),
        requirements=_requirements(),
    )


def installed_copies(found: Iterable[Distribution]) -> dict[str, tuple[InstalledCopy, ...]]:
    """The copies of each package, by its normalised name. Equal ones in the same folder are one."""
    copies: dict[str, list[InstalledCopy]] = {}
    for one in found:
        name = one.metadata["Name"]
        if not name:  # what a broken removal has left
            continue
        folder = str(Path(str(one.locate_file(""))).resolve())
        copy = InstalledCopy(one.version, folder)
        of_name = copies.setdefault(canonicalize_name(name), [])
        if copy not in of_name:
            of_name.append(copy)
    return {name: tuple(of_name) for name, of_name in copies.items()}


def _requirements() -> tuple[str, ...]:
    try:
        found = requires(DISTRIBUTION) or ()
    except PackageNotFoundError:
        return ()
    # Those for development are nothing that a user must have.
    return tuple(one for one in found if 'extra == "dev"' not in str(Requirement(one).marker))


def _disk(folder: Path) -> Disk | None:
    if not folder.is_dir():
        return None
    usage = shutil.disk_usage(folder)
    return Disk(folder, usage.total, usage.free)


def _written(file: Path) -> datetime:
    return datetime.fromtimestamp(file.stat().st_mtime, UTC)


def _clock_of(folder: Path) -> float:
    """Seconds by which the clock that stamps new files in a folder is ahead; 0 if none can be
    written.
    """
    with suppress(OSError), tempfile.NamedTemporaryFile(dir=folder, prefix=".agentrl-") as file:
        before = datetime.now(UTC)
        file.write(b".")
        file.flush()
        return (_written(Path(file.name)) - before).total_seconds()
    return 0.0


def _boards() -> Iterator[Path]:
    for device in _PCI.glob("*"):
        with suppress(OSError):
            vendor, kind = (device / name for name in ("vendor", "class"))
            if vendor.read_text().strip() == _NVIDIA and kind.read_text().startswith(_DISPLAY):
                yield device
