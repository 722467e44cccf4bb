"""A process without locks on files, as on Lustre without `-o flock` or on NFS without lockd: the
kernel answers so.
"""

import ctypes
import os
import struct

_FLOCK, _FCNTL, _ARCHITECTURE = {"x86_64": (73, 72, 0xC000003E), "aarch64": (32, 25, 0xC00000B7)}[
    os.uname().machine
]
_LOAD, _EQUAL, _RETURN, _ALLOW, _ERRNO = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000
_RECORD_LOCKS = (5, 6, 7, 36, 37, 38)  # F_GETLK to F_OFD_SETLKW


def take_locks_away(error: int) -> None:
    """From now on, `flock` and record locks fail with this errno in this thread and in all that it
    starts.
    """
    code = [
        (_LOAD, 0, 0, 0),
        (_EQUAL, 0, 1, _FLOCK),
        (_RETURN, 0, 0, _ERRNO | error),
        (_EQUAL, 1, 0, _FCNTL),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, 24),
        *(
            step
            for command in _RECORD_LOCKS
            for step in ((_EQUAL, 0, 1, command), (_RETURN, 0, 0, _ERRNO | error))
        ),
        (_RETURN, 0, 0, _ALLOW),
    ]
    program = b"".join(struct.pack("=HBBI", *step) for step in code)
    held = ctypes.create_string_buffer(program, len(program))
    filter_ = struct.pack("HxxxxxxP", len(code), ctypes.addressof(held))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    assert libc.prctl(22, 2, filter_, 0, 0) == 0, os.strerror(ctypes.get_errno())
