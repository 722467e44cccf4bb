"""Linux system calls that Python does not wrap.

This module also runs inside jails, so it uses only the standard library.
"""

import ctypes
import fcntl
import os
import socket
import struct
from typing import NamedTuple

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

# clone(2), mount(2), mount_setattr(2), prctl(2), landlock(7)
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000

# The same numbers on x86_64 and aarch64.
(
    _NR_MOUNT_SETATTR,
    _NR_LANDLOCK_CREATE_RULESET,
    _NR_LANDLOCK_ADD_RULE,
    _NR_LANDLOCK_RESTRICT_SELF,
) = 442, 444, 445, 446
_NR = {
    "x86_64": {"pivot_root": 155, "capset": 126, "seccomp": 317},
    "aarch64": {"pivot_root": 41, "capset": 91, "seccomp": 277},
}
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1  # netdevice(7)
# ioctls of a listener, of linux/seccomp.h
_NOTIF_RECV, _NOTIF_SEND, _NOTIF_BYTES, _CONTINUE = 0xC0502100, 0xC0182101, 80, 1


def _check_result(what: str, result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result


def _syscall(what: str, number: int, *arguments: object) -> int:
    return _check_result(what, _libc.syscall(ctypes.c_long(number), *arguments))


def unshare(spaces: int) -> None:
    """Move to new namespaces of these kinds."""
    _check_result("unshare", _libc.unshare(ctypes.c_int(spaces)))


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    arguments = (
        source.encode(),
        target.encode(),
        kind.encode(),
        ctypes.c_ulong(flags),
        data.encode(),
    )
    _check_result(f"mount {source} on {target}", _libc.mount(*arguments))


def unmount(target: str) -> None:
    """Detach the mount at `target`."""
    _check_result(f"umount {target}", _libc.umount2(target.encode(), ctypes.c_int(MNT_DETACH)))


def restrict_mounts(target: str, attributes: int) -> None:
    """Set attributes of the mount at `target` and of all below it."""
    attr = struct.pack("QQQQ", attributes, 0, 0, 0)
    where = (ctypes.c_int(_AT_FDCWD), target.encode(), ctypes.c_uint(_AT_RECURSIVE))
    _syscall(f"mount_setattr {target}", _NR_MOUNT_SETATTR, *where, attr, ctypes.c_size_t(len(attr)))


def pivot_root(new: str) -> None:
    """Make the mount at `new` the root, and detach the old root."""
    os.chdir(new)
    _syscall("pivot_root", _NR[os.uname().machine]["pivot_root"], b".", b".")
    unmount(".")
    os.chdir("/")


def map_to_self(uid: int, gid: int) -> None:
    """In a new user namespace, map its only user and its only group to the same ids outside."""
    prctl(PR_SET_DUMPABLE, 1)  # a process that changed its user does not own its files in /proc
    with open("/proc/self/setgroups", "w") as file:
        file.write("deny")
    with open("/proc/self/uid_map", "w") as file:
        file.write(f"{uid} {uid} 1")
    with open("/proc/self/gid_map", "w") as file:
        file.write(f"{gid} {gid} 1")


def listen_on_loopback(port: int) -> socket.socket:
    """In a new network namespace, start its loopback, and listen on a port of it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, struct.pack("16sH14x", b"lo", 0))
        (flags,) = struct.unpack_from("H", asked, 16)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))
    return socket.create_server(("127.0.0.1", port), backlog=128)


def bound_tcp_buffers(size: int) -> None:
    """In a new network namespace, let each connection buffer at most so many bytes either way."""
    for name in ("tcp_rmem", "tcp_wmem"):
        with open(f"/proc/sys/net/ipv4/{name}", "w") as file:
            file.write(f"4096 {size} {size}")


def prctl(option: int, value: int) -> None:
    """prctl(2) with one argument."""
    _check_result(
        f"prctl {option}",
        _libc.prctl(ctypes.c_int(option), *(ctypes.c_ulong(v) for v in (value, 0, 0, 0))),
    )


def drop_capabilities() -> None:
    """Give up all capabilities permanently: `PR_SET_NO_NEW_PRIVS` keeps programs started later from
    regaining any.
    """
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    header, none = struct.pack("Ii", 0x20080522, 0), struct.pack("IIIIII", *(0 for _ in range(6)))
    _syscall("capset", _NR[os.uname().machine]["capset"], header, none)


class _Program(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def install_filter(program: bytes) -> None:
    """Filter the system calls of this thread and everything it starts, by a program of
    `agentrl.sandbox.filter`.
    """
    at = _Program(len(program) // 8, program)
    mode = (ctypes.c_int(22), ctypes.c_ulong(2))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
    _check_result(
        "seccomp", _libc.prctl(*mode, ctypes.byref(at), ctypes.c_ulong(0), ctypes.c_ulong(0))
    )


def listen(program: bytes) -> int:
    """Install a filter, and return the file descriptor of its listener, which decides about the
    calls that it names.

    They wait until another process `answer`s them.
    """
    at = _Program(len(program) // 8, program)
    operation, new_listener = ctypes.c_uint(1), ctypes.c_uint(8)
    return _syscall(
        "seccomp", _NR[os.uname().machine]["seccomp"], operation, new_listener, ctypes.byref(at)
    )


class AskedCall(NamedTuple):
    """A call that waits for an answer: its id, the thread that makes it, its number and its first
    argument.
    """

    id: int
    thread: int
    number: int
    argument: int


def question(listener: int) -> AskedCall:
    """The next call that waits."""
    notice = bytearray(_NOTIF_BYTES)
    fcntl.ioctl(listener, _NOTIF_RECV, notice)
    return AskedCall(*struct.unpack_from("=QI4xi12xi", notice))


def answer(listener: int, asked: AskedCall, error: int) -> None:
    """Let a call go on, or fail with an error if that is not 0."""
    fcntl.ioctl(
        listener, _NOTIF_SEND, struct.pack("=QqiI", asked.id, 0, -error, 0 if error else _CONTINUE)
    )


def landlock_version() -> int:
    """The version of Landlock's interface; 0 if the kernel has no Landlock."""
    version = _libc.syscall(
        ctypes.c_long(_NR_LANDLOCK_CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_uint(1)
    )
    return max(0, int(version))


READ, WRITE = 0b1101, 0b10
"""Rights of landlock(7): `READ` to execute and read files and list folders, `WRITE` to write to
existing files.
"""
_ALL_RIGHTS = (1 << 15) - 1
_MAKE_CHAR, _MAKE_DIR, _MAKE_SOCK, _MAKE_BLOCK = 1 << 6, 1 << 7, 1 << 9, 1 << 11
OWN = _ALL_RIGHTS & ~(_MAKE_CHAR | _MAKE_DIR | _MAKE_SOCK | _MAKE_BLOCK)
"""Rights of landlock(7): everything with files, but no making of folders, devices or sockets."""


def landlock(rights: dict[str, int]) -> None:
    """Deny this thread, and everything it starts, access to the file system, except for `rights` by
    path.

    Needs Landlock version 3. Version 4 and later also deny TCP; version 6 and later also deny
    signals to outside processes and connections to their abstract sockets.
    """
    version = landlock_version()
    files = _ALL_RIGHTS | (1 << 15 if version >= 5 else 0)  # ioctl on devices
    attr = struct.pack("QQQ", files, 3 if version >= 4 else 0, 3 if version >= 6 else 0)[
        : 24 if version >= 6 else 16
    ]
    size = ctypes.c_size_t(len(attr) if version >= 4 else 8)
    rules = _syscall(
        "landlock_create_ruleset", _NR_LANDLOCK_CREATE_RULESET, attr, size, ctypes.c_uint(0)
    )
    for path, allowed in rights.items():
        at = os.open(path, os.O_PATH | os.O_CLOEXEC)
        beneath = struct.pack("=Qi", allowed if os.path.isdir(path) else allowed & 0b111, at)
        _syscall(
            f"landlock {path}",
            _NR_LANDLOCK_ADD_RULE,
            ctypes.c_int(rules),
            ctypes.c_int(1),
            beneath,
            ctypes.c_uint(0),
        )
        os.close(at)
    _syscall(
        "landlock_restrict_self", _NR_LANDLOCK_RESTRICT_SELF, ctypes.c_int(rules), ctypes.c_uint(0)
    )
    os.close(rules)
