"""What the driver and a jail say to each other: an `Order` there, a dict of facts back, as JSON behind its length.

It runs inside of jails too, so it needs nothing but the standard library.
"""

import json
import struct
from dataclasses import asdict, dataclass
from typing import Any

HEADER = struct.Struct("!I")
LARGEST_MESSAGE = 256 << 20
"""Bytes; what says that it is longer is no message."""


@dataclass(frozen=True, slots=True)
class Order:
    """One program to run, with the limits of this run: seconds, bytes, and a count of processes."""

    program: str
    stdin: str
    wall: float
    cpu: float
    memory: int
    processes: int
    disk: int
    output: int

    def pack(self) -> bytes:
        """The order as bytes."""
        return pack(asdict(self))


def pack(message: dict[str, Any]) -> bytes:
    """A message as bytes."""
    body = json.dumps(message).encode()
    return HEADER.pack(len(body)) + body
