"""Messages between driver and jail: an `Order` to the jail, a dict of results back, each as its
length and JSON.

`DONE` follows the results, once nothing of the run is left.

This module also runs inside jails, so it uses only the standard library.
"""

import json
import struct
from dataclasses import asdict, dataclass
from typing import Any

HEADER = struct.Struct("!I")
DONE = b"."
LARGEST_MESSAGE = 256 << 20
"""Bytes; a header that states a longer message is invalid."""


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
    encoding: str = "utf-8"
    """How `stdin` becomes bytes, and output becomes text: with latin-1, each byte one character."""
    cut: bool = False
    """True if output beyond the limit is left out, and the run goes on; the limit is then one for
    each of stdout and stderr."""

    def pack(self) -> bytes:
        """The order as bytes."""
        return pack(asdict(self))


def pack(message: dict[str, Any]) -> bytes:
    """A message as bytes."""
    body = json.dumps(message).encode()
    return HEADER.pack(len(body)) + body
