"""The walls that confine a program: namespaces, Landlock or, on request, nothing.

Walls confine a server, and around each program its supervisor. This module runs inside jails, so it
uses only the standard library.
"""

import os
import resource
import shutil
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress

from agentrl.sandbox import kernel
from agentrl.sandbox.cgroup import ControlGroup
from agentrl.sandbox.filter import asking_filter, seccomp_filter
from agentrl.sandbox.order import Order

_NOBODY_UID = 65534
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_SMALL_TMPFS_OPTIONS = "mode=0755,size=1m,nr_inodes=2k"
_TASK_FOLDERS = ("app", "logs", "solution", "tests")
"""Folders by which tasks name their files: a jail with files has them in its own folder."""
_SUPERVISOR_PROCESSES = 3
"""Processes that count as those of a program, though they are ours: the server, the supervisor and
its parent.
"""
_TCP_BYTES = 128 << 10
"""Bytes that a connection may hold either way: with the kernel's own, no more than the memory that
is counted for a socket."""
MAX_FILES = 10_000
"""The number of files and folders that a run may have."""


MAX_KEPT_FILES = 100_000
"""The number of those in a folder that several runs share."""


class Walls(ABC):
    """A server calls `enter`; for each run, a supervisor `enclose`, `begin`, `confine` in its
    child, and `end`.
    """

    counts_threads = False
    """True if each new thread needs a permission, because no limit of the kernel counts them."""

    def __init__(
        self,
        readable: Sequence[str],
        scratch: str,
        group: ControlGroup,
        disk: int = 0,
        port: int = 0,
    ) -> None:
        """`readable`: paths a program may read and execute. `scratch`: a folder, kept until the
        server is ready. `disk`: bytes of the one folder of all runs; 0 for a new one each. `port`:
        a port of the loopback that programs may connect to; 0 for none.
        """
        self.disk = disk
        self.port = port
        self.listener: socket.socket | None = None
        """What listens at the port, once `enter` has been called."""
        self.readable = readable
        self.scratch = scratch
        self.group = group

    @abstractmethod
    def enter(self) -> None:
        """Set up the walls around this process. May fork, and return only in the child.

        Raises:
            OSError: the machine does not support them.
        """

    def enclose(self) -> None:
        """In the supervisor: end with the server. May fork, and return only in the child."""
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)

    @abstractmethod
    def begin(self, order: Order) -> str:
        """A fresh empty folder for a run."""

    def listen(self) -> int | None:
        """In the child, before `confine`: the listener of calls that the supervisor answers, if it
        is asked for any.
        """
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        return kernel.listen(asking_filter(threads=self.counts_threads))

    @abstractmethod
    def confine(self, folder: str, order: Order) -> None:
        """In the child: permanently give up every right that a program must not have."""

    @abstractmethod
    def processes(self, child: int) -> Sequence[int]:
        """The live processes of the run."""

    @abstractmethod
    def kill(self, child: int) -> None:
        """Kill every process of the run."""

    @abstractmethod
    def end(self, folder: str) -> None:
        """Remove the folder; no process of the run is left."""

    def used(self, folder: str, child: int) -> int:
        """Bytes of the run's files, if nothing else limits them; more than any limit if there are
        too many.
        """
        return 0


class Namespaces(Walls):
    """Its own root, read-only except for a small file system in memory; its own processes, network,
    IPC and users.
    """

    _FOLDER = "/box"

    def enter(self) -> None:
        """Returns in the first process of the new namespaces: when that one ends, the kernel kills
        the rest.
        """
        os.umask(0o022)
        self._filter = seccomp_filter(metered=bool(self.group), connects=bool(self.port))
        root = os.geteuid() == 0
        uid, gid = os.geteuid(), os.getegid()
        spaces = (
            kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC
        )
        kernel.unshare(
            spaces
            | kernel.CLONE_NEWUTS
            | kernel.CLONE_NEWCGROUP
            | (0 if root else kernel.CLONE_NEWUSER)
        )
        if not root:
            kernel.map_to_self(uid, gid)
        if self.port:
            kernel.bound_tcp_buffers(_TCP_BYTES)
            self.listener = kernel.listen_on_loopback(self.port)
        # A process enters a new process namespace only by being forked into it.
        _continue_in_child(self.group)
        self._build_root()
        if root:
            # RLIMIT_NPROC does not apply to root, and files of root would belong to the program.
            uid = gid = _NOBODY_UID
            os.setgroups([])
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
        # In a nested user namespace, mounts cannot be removed, and processes are counted
        # separately.
        kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
        kernel.map_to_self(uid, gid)
        if self.disk:
            self._mount_folder(self.disk, MAX_KEPT_FILES)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)

    def _build_root(self) -> None:
        new = self.scratch
        quiet = kernel.MS_NOSUID | kernel.MS_NODEV
        kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
        kernel.mount("tmpfs", new, "tmpfs", quiet, _SMALL_TMPFS_OPTIONS)
        for path in self.readable:
            _bind_readable(path, new)
        for path in ("/dev", "/proc", self._FOLDER):
            os.makedirs(new + path)
        if not os.path.exists(f"{new}/tmp"):  # else a path below it must be readable
            os.symlink(self._FOLDER, f"{new}/tmp")
        for name in _TASK_FOLDERS if self.disk else ():
            if not os.path.exists(f"{new}/{name}"):
                os.symlink(f"{self._FOLDER}/{name}", f"{new}/{name}")
        os.symlink(self._FOLDER, f"{new}/dev/shm")
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            os.symlink(f"/proc/self/fd/{number}", f"{new}/dev/{name}")
        for device in _DEVICES:
            open(new + device, "x").close()
        kernel.restrict_mounts(
            new, kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NODEV
        )
        for device in _DEVICES:
            kernel.mount(device, new + device, flags=kernel.MS_BIND)
        _mount_proc(f"{new}/proc")
        kernel.pivot_root(new)

    def enclose(self) -> None:
        """Returns in the first process of a process namespace within that of the server: programs
        see only this one.
        """
        kernel.unshare(kernel.CLONE_NEWPID | kernel.CLONE_NEWNS)
        super().enclose()
        _continue_in_child()
        super().enclose()
        _mount_proc("/proc")

    def begin(self, order: Order) -> str:
        """Mount a file system in memory, with its own limits."""
        if not self.disk:
            self._mount_folder(order.disk, MAX_FILES)
        return self._FOLDER

    def _mount_folder(self, size: int, files: int) -> None:
        sizes = f"mode=0700,size={size},nr_inodes={files}"
        kernel.mount("tmpfs", self._FOLDER, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, sizes)

    def confine(self, folder: str, order: Order) -> None:
        """No capabilities, a system call filter, and first to be killed when memory is short."""
        resource.setrlimit(resource.RLIMIT_NPROC, (order.processes + _SUPERVISOR_PROCESSES,) * 2)
        kernel.drop_capabilities()
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # else it could not open its own files in /proc
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        kernel.install_filter(self._filter)

    def processes(self, child: int) -> Sequence[int]:
        """All processes in the namespace except the supervisor."""
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]

    def kill(self, child: int) -> None:
        """The kernel signals all at once, so no process can escape by forking."""
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)

    def end(self, folder: str) -> None:
        """Unmount the file system."""
        if not self.disk:
            kernel.unmount(folder)


class Landlock(Walls):
    """Landlock and a seccomp filter on one process, which can open files in few places."""

    counts_threads = True

    def enter(self) -> None:
        """Check that Landlock is available; the server itself is not confined."""
        if self.disk or self.port:
            raise OSError("a folder that several runs share, or a port, needs namespaces")
        if kernel.landlock_version() < 3:
            raise OSError(
                f"Landlock has version {kernel.landlock_version()}, but 3 is needed (Linux 6.2)"
            )
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)

    def begin(self, order: Order) -> str:
        """Make a folder on the machine's disk."""
        os.mkdir(self.scratch, 0o700)
        self._largest = order.disk
        self._sizes: dict[int, int] = {}  # bytes of each file as it was last seen, by inode
        return self.scratch

    def confine(self, folder: str, order: Order) -> None:
        """No capabilities, few files, no other process, a system call filter; it dies with the
        server.
        """
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        kernel.drop_capabilities()
        rights = dict.fromkeys(filter(os.path.exists, self.readable), kernel.READ)
        kernel.landlock(
            rights | dict.fromkeys(_DEVICES, kernel.READ | kernel.WRITE) | {folder: kernel.OWN}
        )
        kernel.install_filter(seccomp_filter(alone=os.getpid()))

    def processes(self, child: int) -> Sequence[int]:
        """The single process."""
        return [child]

    def kill(self, child: int) -> None:
        """Kill the single process."""
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)

    def end(self, folder: str) -> None:
        """Remove the folder."""
        shutil.rmtree(folder, ignore_errors=True)

    def used(self, folder: str, child: int) -> int:
        """Bytes of disk blocks of the folder's files, and of those that have no name any longer and
        are still held.

        The program cannot make folders in it, so there is only one level.
        """
        used: dict[int, int] = {}
        with os.scandir(folder) as files:
            for number, file in enumerate(files):
                with suppress(FileNotFoundError):
                    self._count_file(file.stat(follow_symlinks=False), used)
                if number == MAX_FILES:
                    return 1 << 62
        self._count_unlinked(folder, child, used)
        return sum(used.values())

    def _count_file(self, found: os.stat_result, used: dict[int, int]) -> None:
        used[found.st_ino] = found.st_blocks * 512
        self._sizes[found.st_ino] = max(found.st_size, found.st_blocks * 512)

    def _count_unlinked(self, folder: str, child: int, used: dict[int, int]) -> None:
        """Add the files without a name (unlinked, or made with O_TMPFILE) that are open, or only
        mapped.
        """
        ours = f"{folder}/"
        descriptors = f"/proc/{child}/fd"
        with suppress(OSError):  # it has ended
            for name in os.listdir(descriptors):
                with suppress(OSError):
                    if os.readlink(f"{descriptors}/{name}").startswith(ours):
                        self._count_file(os.stat(f"{descriptors}/{name}"), used)
            with open(f"/proc/{child}/maps", errors="replace") as file:
                mapped = [
                    line.split(maxsplit=5)
                    for line in file
                    if ours in line and line.endswith(" (deleted)\n")
                ]
            for addresses, *_, inode, path in mapped:
                if path.startswith(ours) and int(inode) not in used:
                    used[int(inode)] = self._mapped_bytes(child, addresses, int(inode))

    def _mapped_bytes(self, child: int, addresses: str, inode: int) -> int:
        """Bytes of a file of which only a mapping is left: each page of it holds the whole file."""
        try:
            return os.stat(f"/proc/{child}/map_files/{addresses}").st_blocks * 512
        except OSError:
            # only privileged users can look at it; else its size counts, or the most that it may
            # have
            return self._sizes.get(inode, self._largest)


class Nothing(Landlock):
    """No walls: a process with limits that can read and write everything that its user can."""

    def enter(self) -> None:
        """There is nothing to set up."""

    def listen(self) -> None:
        """Nothing is asked for."""

    def confine(self, folder: str, order: Order) -> None:
        """The child dies with the server; nothing else confines it."""
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)

    def kill(self, child: int) -> None:
        """Kill the process group; a process that left the group survives."""
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)


WALLS: dict[str, type[Walls]] = {"namespaces": Namespaces, "landlock": Landlock, "unsafe": Nothing}
"""The strongest first."""


def _continue_in_child(group: ControlGroup | None = None) -> None:
    """Fork, and continue as the first process of the new namespace.

    The parent waits for it, removes the control group, and ends as it has ended.
    """
    child = os.fork()
    if child == 0:
        return
    os.closerange(0, 2)  # the channel too, so that the driver notices when the child closes it
    status = os.waitpid(child, 0)[1]
    if group:
        group.remove()
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _mount_proc(path: str) -> None:
    """Mount a /proc in which processes see only those that they may trace, which are their own, and
    none of the kernel's other files.
    """
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    kernel.mount("proc", path, "proc", flags, "hidepid=invisible,subset=pid")


def _bind_readable(path: str, root: str) -> None:
    """Make a file, folder or symbolic link appear at the same path below `root`."""
    if not os.path.lexists(path) or os.path.lexists(root + path):
        return
    os.makedirs(os.path.dirname(root + path), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), root + path)
    elif os.path.isdir(path):
        os.mkdir(root + path)
        kernel.mount(path, root + path, flags=kernel.MS_BIND | kernel.MS_REC)
    else:
        open(root + path, "x").close()
        kernel.mount(path, root + path, flags=kernel.MS_BIND)
