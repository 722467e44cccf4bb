"""A control group for the programs of a jail, on machines that let this user make one: cgroups(7).

The kernel then counts what looking at processes misses: its own memory (buffers of sockets and
pipes, locks, watches), and the CPU time of processes that end unnoticed. This module also runs
inside jails, so it uses only the standard library.
"""

import errno
import os
import select
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from agentrl.sandbox.order import Order

_SLACK_BYTES = 16 << 20
"""Bytes beyond memory and disk before the kernel refuses more; before that, the supervisor ends the
run.
"""
_REMOVE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class _Files:
    """The files of one version of the interface, and the lines of those that have several."""

    limit: str
    memory: str
    file_pages: tuple[str, str]
    killed: tuple[str, str]
    cpu: tuple[str, str]
    cpu_unit: float


_VERSION_1 = _Files(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("memory.stat", "total_cache"),
    ("memory.oom_control", "oom_kill"),
    ("cpuacct.usage", ""),
    1e-9,
)
_VERSION_2 = _Files(
    "memory.max",
    "memory.current",
    ("memory.stat", "file"),
    ("memory.events", "oom_kill"),
    ("cpu.stat", "usage_usec"),
    1e-6,
)


def make(name: str) -> tuple[str, ...]:
    """The folders of a new control group; none if that is impossible.

    One folder with version 2 of the interface; with version 1, that of memory and that of CPU time.
    """
    for bases in _base_folders():
        made: list[str] = []
        try:
            for base in bases:
                os.mkdir(os.path.join(base, name))
                made.append(os.path.join(base, name))
            with ControlGroup(made):  # tries to open all of its files
                return tuple(made)
        except OSError:
            remove(made)
    return ()


def remove(folders: Sequence[str]) -> None:
    """Remove a control group, as soon as its processes have ended."""
    for folder in folders:
        _remove(folder)


class ControlGroup:
    """A control group whose files are open, so that it can be used where walls hide them. A context
    manager.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        """`folders`: what `make` has returned; with none, nothing is counted.

        Raises:
            OSError: a file of the interface is missing or may not be written.
        """
        self._names = [os.path.split(folder) for folder in folders]
        self._parents: list[int] = []
        self._open: dict[str, int] = {}
        self._joins: list[int] = []
        if not folders:
            return
        self._files = _VERSION_2 if len(folders) == 1 else _VERSION_1
        memory, cpu = folders[0], folders[-1]
        try:
            for folder in folders:
                self._parents.append(os.open(os.path.dirname(folder), os.O_RDONLY | os.O_DIRECTORY))
                self._joins.append(os.open(os.path.join(folder, "cgroup.procs"), os.O_WRONLY))
            self._open[self._files.limit] = os.open(
                os.path.join(memory, self._files.limit), os.O_WRONLY
            )
            for name in (self._files.memory, self._files.file_pages[0], self._files.killed[0]):
                self._open[name] = os.open(os.path.join(memory, name), os.O_RDONLY)
            self._open[self._files.cpu[0]] = os.open(
                os.path.join(cpu, self._files.cpu[0]), os.O_RDONLY
            )
        except OSError:
            self.__exit__()
            raise

    def __enter__(self) -> "ControlGroup":
        return self

    def __exit__(self, *exc: object) -> None:
        for fd in (*self._parents, *self._joins, *self._open.values()):
            os.close(fd)

    def __bool__(self) -> bool:
        """True if there is a group."""
        return bool(self._names)

    def begin(self, order: Order) -> None:
        """Before a program: set what the kernel refuses to exceed, and note what earlier programs
        have used.
        """
        if not self:
            return
        self._order = order
        most = order.memory + order.disk + _SLACK_BYTES  # the files of a program are in memory too
        # "Busy" if earlier programs have left more than that, which the kernel frees when it likes.
        with suppress(OSError):
            os.pwrite(self._open[self._files.limit], str(most).encode(), 0)
        self._cpu_before = self._read_number(*self._files.cpu)
        self._killed_before = self._read_number(*self._files.killed)

    def join(self) -> None:
        """Move this process, and all that it will start, into the group.

        Raises:
            OSError: the kernel refuses it.
        """
        for fd in self._joins:
            os.write(fd, b"0")

    def limit_hit(self) -> str:
        """The limit of the order that its processes have hit together, the dead ones included, or
        an empty string.
        """
        if not self:
            return ""
        cpu = self._read_number(*self._files.cpu) - self._cpu_before
        if cpu * self._files.cpu_unit >= self._order.cpu:
            return "cpu"
        if self._read_number(*self._files.killed) > self._killed_before:
            return "memory"
        # Pages of files do not count: those of the folder, which is in memory, are limited as disk.
        used = self._read_number(self._files.memory, "")
        if used > self._order.memory:
            used -= self._read_number(*self._files.file_pages)
        if used > self._order.memory:
            return "memory"
        return ""

    def remove(self) -> None:
        """Remove the group, from inside of the walls too; nothing happens if it exists no longer or
        is not ours.
        """
        for parent, (_, name) in zip(self._parents, self._names, strict=True):
            _remove(name, parent)

    def _read_number(self, name: str, line: str) -> int:
        text = os.pread(self._open[name], 1 << 14, 0).decode()
        if not line:
            return int(text)
        values = (words[1] for words in map(str.split, text.splitlines()) if words[0] == line)
        return int(next(values, "0"))


def _remove(path: str, parent: int | None = None) -> None:
    until = time.monotonic() + _REMOVE_SECONDS
    while True:
        try:
            os.rmdir(path, dir_fd=parent)
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > until:
                return
        select.poll().poll(1)  # waits 1 ms; its processes were killed, and are about to end


def _base_folders() -> Iterator[tuple[str, ...]]:
    """Folders in which a group may be made, best first."""
    try:
        mounts, mine = list(_mounts()), dict(_own_groups())
    except OSError:
        return
    unified = [
        _folder_in_mount(mount, root, mine.get("", "/"))
        for mount, root, kind, _ in mounts
        if kind == "cgroup2"
    ]
    for own in filter(None, unified):
        for base in (own, os.path.dirname(own)):
            if _can_limit_memory(base):
                yield (base,)
    # Version 1 of control groups has a hierarchy for each controller.
    folders = {}
    for mount, root, kind, options in mounts:
        if kind == "cgroup":
            for controller in {"memory", "cpuacct"} & options & mine.keys():
                folders[controller] = _folder_in_mount(mount, root, mine[controller])
    if (memory := folders.get("memory")) and (cpu := folders.get("cpuacct")):
        yield memory, cpu


def _mounts() -> Iterator[tuple[str, str, str, set[str]]]:
    """Mount point, root within the file system, kind and options of each mount:
    proc_pid_mountinfo(5).
    """
    with open("/proc/self/mountinfo") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            kind, _, options = after.split(maxsplit=2)
            root, mount = before.split()[3:5]
            yield mount, root, kind, set(options.strip().split(","))


def _own_groups() -> Iterator[tuple[str, str]]:
    """The group of this process by controller; by an empty string, that of version 2."""
    with open("/proc/self/cgroup") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            for controller in controllers.split(","):
                yield controller, path


def _folder_in_mount(mount: str, root: str, path: str) -> str | None:
    """The folder of a group, if this mount shows it."""
    inside = os.path.relpath(path, root)
    folder = mount if inside == "." else os.path.join(mount, inside)
    return None if inside.startswith("..") or not os.path.isdir(folder) else folder


def _can_limit_memory(folder: str) -> bool:
    """True if groups in this folder can limit memory, after switching that on where needed."""
    control = os.path.join(folder, "cgroup.subtree_control")
    with suppress(OSError):
        with open(control) as file:
            if "memory" in file.read().split():
                return True
        with open(control, "w") as file:
            file.write("+memory")
        return True
    return False
