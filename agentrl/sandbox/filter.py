"""A seccomp filter: which system calls a program in a jail may make.

The filter refuses calls that need privileges, that reach other processes or the network, or that
are so new or rare that only an attack would miss them. A refused call fails with an errno, so
Python raises `PermissionError`. This module also runs inside jails, so it uses only the standard
library.
"""

import errno
import os
import struct

# Numbers on (x86_64, aarch64); None where an architecture has no such call. From unistd_64.h and
# asm-generic/unistd.h.
_Numbers = dict[str, tuple[int | None, int | None]]

_REFUSED: _Numbers = {
    # the machine
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "acct": (163, 89),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "personality": (135, 92),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    # namespaces and mounts
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    # the kernel's larger interfaces
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "seccomp": (317, 277),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    # the network; a pair of connected sockets is like a pipe, and is allowed
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    # what makes sockets hold more than a pipe: larger buffers, and other sockets that are under way
    # in them
    "setsockopt": (54, 208),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    # what the machine, or its user, has only so many of
    "io_setup": (206, 0),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    # objects that would outlive the run, or hold memory that no limit counts
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
}

_REFUSED_ALONE: _Numbers = {
    # starting processes, and reaching existing ones
    "fork": (57, None),
    "vfork": (58, None),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    # Landlock does not control owners, modes and times of files
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "utime": (132, None),
    "utimes": (235, None),
    "utimensat": (280, 88),
    "futimesat": (261, None),
}

_NUMBERS: _Numbers = {
    **_REFUSED,
    **_REFUSED_ALONE,
    "clone": (56, 220),
    "clone3": (435, 435),
    "socketpair": (53, 199),
    "kill": (62, 129),
    "tgkill": (234, 131),
    "prlimit64": (302, 261),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "prctl": (157, 167),
    "rt_sigaction": (13, 134),
    "flock": (73, 32),
    "close_range": (436, 436),
}

_NEWEST_CALL = 450
"""The newest call that this list covers; newer ones fail as if they did not exist."""
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_CLONE_NEW, _CLONE_THREAD, _CLONE_FILES, _PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = (
    0x7E020080,
    0x10000,
    0x400,
    1,
    4,
)
_SIGCHLD = 17
_NETWORKS = (2, 10, 16)  # AF_INET, AF_INET6, AF_NETLINK
# Also in packets.
_STREAMS = tuple(kind | flags for kind in (1, 5) for flags in (0, 0x800, 0x80000, 0x80800))
_INTERNET, _TCP, _SOL_SOCKET = (2, 10), 6, 1
_SINGLE_STREAMS = tuple(1 | flags for flags in (0, 0x800, 0x80000, 0x80800))
_BUFFER_SIZES = (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF, and the same with force
_FIOSETOWN, _SIOCSPGRP, _CLOSE_RANGE_UNSHARE = 0x8901, 0x8902, 2

# Commands of fcntl(2). All others are refused: a lease (1024) or a notice (1026) on a file that is
# shared read-only stalls other processes, and a hint (1036, 1038) passes data between runs. Locks
# do both, so they are asked for.
# F_DUPFD to F_SETFL, F_GETOWN, ..., F_GET_SEALS.
_DESCRIPTOR_COMMANDS = (
    0,
    1,
    2,
    3,
    4,
    9,
    11,
    16,
    1030,
    1031,
    1032,
    1034,
)
_SIGNAL_COMMANDS = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX
_LOCK_COMMANDS = (5, 6, 7, 36, 37, 38)  # F_GETLK, F_SETLK, F_SETLKW, and the same of F_OFD_...

# Classic BPF, of linux/filter.h and linux/seccomp.h: load a word, test it and jump (one offset if
# true, another if false), return.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL, _NOTIFY = 0x7FFF0000, 0x00050000, 0x80000000, 0x7FC00000
_Code = list[tuple[int, int, int, int]]


def _refuse(error: int) -> _Code:
    return [(_RETURN, 0, 0, _ERRNO | error)]


def _argument(index: int, *, upper_half: bool = False) -> _Code:
    """Load half of an argument: the lower one, unless it is a pointer that is tested whole."""
    return [(_LOAD, 0, 0, 16 + 8 * index + (4 if upper_half else 0))]


def _unless(test: int, values: tuple[int, ...], verdict: _Code) -> _Code:
    """Continue if the loaded word passes the test with one of `values`, else apply `verdict`, a
    single instruction.

    A passed test jumps over the rest. With two values:

        test a: if true, skip 2
        test b: if true, skip 1
        verdict
    """
    many = len(values)
    return [*((test, many - at, 0, value) for at, value in enumerate(values)), *verdict]


def _where(test: int, values: tuple[int, ...], verdict: _Code) -> _Code:
    """Apply `verdict`, a single instruction, if the loaded word passes the test with one of
    `values`. Each test is followed by the verdict, and jumps over it if it fails.
    """
    return [step for value in values for step in ((test, 0, 1, value), *verdict)]


def seccomp_filter(alone: int = 0, metered: bool = False, connects: bool = False) -> bytes:
    """The filter in the form that the kernel takes.

    `alone` is the process id, for a process that no namespace confines. Such a process can start
    threads but no other processes, and can signal only itself. `metered`: a control group counts
    the CPU time of all processes. `connects`: it may connect to ports of its own network.

    Raises:
        OSError: the system calls of this machine's architecture are not listed here.
    """
    no = _refuse(errno.EPERM)
    # A pair of stream sockets only: a datagram socket can send to a name.
    about: dict[str, _Code] = {
        # its flags are behind a pointer; the C library then uses clone
        "clone3": _refuse(errno.ENOSYS),
        # A thread with files of its own would hide them from those who count the sockets of its
        # process.
        "clone": [
            *_argument(0),
            *_where(_ANY_BIT, (_CLONE_NEW,), no),
            (_ANY_BIT, 0, 2, _CLONE_THREAD),
            (_ANY_BIT, 1, 0, _CLONE_FILES),
            *no,
        ],
        # we see and kill it
        "prctl": [*_argument(0), *_where(_EQUAL, (_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE), no)],
        "socketpair": [
            *_argument(0),
            *_unless(_EQUAL, (1,), no),
            *_argument(1),
            *_unless(_EQUAL, (1, 0x80001, 0x801, 0x80801), no),
        ],
        # the server runs as the same user
        "prlimit64": [*_argument(0), *_unless(_EQUAL, (0, alone), no)],
        # A thread that unshares its files hides them as one that starts with files of its own does.
        "close_range": [*_argument(2), *_where(_ANY_BIT, (_CLOSE_RANGE_UNSHARE,), no)],
        "fcntl": [
            *_argument(1),
            *_unless(_EQUAL, (*_DESCRIPTOR_COMMANDS, *_SIGNAL_COMMANDS, *_LOCK_COMMANDS), no),
        ],
    }
    if not alone and not metered:
        # With SIGCHLD ignored, children end unnoticed, and their CPU time is lost: it keeps its
        # default action. Asking for the action (a null pointer, of two words) is answered, and so
        # are all other signals.
        about["rt_sigaction"] = [
            *_argument(0),
            (_EQUAL, 0, 5, _SIGCHLD),
            *_argument(1),
            (_EQUAL, 0, 2, 0),
            *_argument(1, upper_half=True),
            (_EQUAL, 1, 0, 0),
            *_refuse(0),
        ]
    if alone:
        about["clone"] += [*_argument(0), *_unless(_ANY_BIT, (_CLONE_THREAD,), no)]
        about |= {
            name: [*_argument(0), *_unless(_EQUAL, (alone,), no)] for name in ("kill", "tgkill")
        }
        allowed = (*_DESCRIPTOR_COMMANDS, *_LOCK_COMMANDS)
        about["fcntl"] = [*_argument(1), *_unless(_EQUAL, allowed, no)]
        about["ioctl"] = [*_argument(1), *_where(_EQUAL, (_FIOSETOWN, _SIOCSPGRP), no)]
    refused = _REFUSED | (_REFUSED_ALONE if alone else {})
    refusals = {
        name: _refuse(errno.EACCES if name == "socket" else errno.EPERM) for name in refused
    }
    return _compile_filter(about | refusals | (_rules_for_connections() if connects else {}))


def _rules_for_connections() -> dict[str, _Code]:
    """Streams of TCP only, whose buffers are bounded, and which nothing but a server outside
    accepts.
    """
    no_socket = _refuse(errno.EACCES)
    return {
        "socket": [
            *_argument(0),
            *_unless(_EQUAL, _INTERNET, no_socket),
            *_argument(1),
            *_unless(_EQUAL, _SINGLE_STREAMS, no_socket),
            *_argument(2),
            *_unless(_EQUAL, (0, _TCP), no_socket),
        ],
        "connect": [],
        "setsockopt": [
            *_argument(1),
            (_EQUAL, 0, 1 + 2 * len(_BUFFER_SIZES), _SOL_SOCKET),
            *_argument(2),
            *_where(_EQUAL, _BUFFER_SIZES, _refuse(errno.EPERM)),
        ],
    }


def asking_filter(*, threads: bool) -> bytes:
    """The filter whose listener (`kernel.listen`) decides about locks of files and, if `threads`,
    about new threads.

    Raises:
        OSError: the system calls of this machine's architecture are not listed here.
    """
    ask: _Code = [(_RETURN, 0, 0, _NOTIFY)]
    about = {"flock": ask, "fcntl": [*_argument(1), *_where(_EQUAL, _LOCK_COMMANDS, ask)]}
    return _compile_filter(about | ({"clone": ask} if threads else {}))


def is_clone(number: int) -> bool:
    """True if a call number of this machine is that of clone(2), by which threads start."""
    return number == _NUMBERS["clone"][_ARCHITECTURES[os.uname().machine][0]]


def network_filter() -> bytes:
    """The filter for a program in a network of its own: no sockets of kinds that no network
    namespace confines.

    Those are sockets with a name in the file system, behind which any service of the machine may
    be, and those of virtual machines and devices. A datagram socket of a pair can send to a name
    too, so pairs are of streams.

    Raises:
        OSError: the system calls of this machine's architecture are not listed here.
    """
    return _compile_filter(
        {
            "socket": [*_argument(0), *_unless(_EQUAL, _NETWORKS, _refuse(errno.EACCES))],
            "socketpair": [*_argument(1), *_unless(_EQUAL, _STREAMS, _refuse(errno.EACCES))],
            "io_uring_setup": _refuse(errno.ENOSYS),  # it makes sockets without the call `socket`
        }
    )


def _compile_filter(about: dict[str, _Code]) -> bytes:
    """The filter with these rules by call. Other calls are allowed if they are not newer than the
    list.
    """
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"there is no list of system calls for {machine}")
    column, architecture = _ARCHITECTURES[machine]
    allow = [(_RETURN, 0, 0, _ALLOW)]
    # The offsets of struct seccomp_data: the call's number at 0, the architecture at 4. A call of
    # another architecture has other numbers, so nothing below would fit it.
    code: _Code = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        (_AT_LEAST, 0, 1, _NEWEST_CALL + 1),
        *_refuse(errno.ENOSYS),
    ]
    for name, body in about.items():
        number = _NUMBERS[name][column]
        if number is not None:
            # If it is another call, skip the rules of this one and its `allow`.
            code += [(_EQUAL, 0, len(body) + 1, number), *body, *allow]
    code += allow
    return b"".join(struct.pack("=HBBI", *step) for step in code)
