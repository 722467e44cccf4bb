"""Messages between driver and jail: an `Order` to the jail, a `JailReport` back.

Each is the length of its JSON and of the bytes that follow, the JSON, and the bytes: a program's
input, or what it wrote, as they are. `DONE` follows the report, once nothing of the run is left.

This module also runs inside jails, so it uses only the standard library.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, get_args

from agentrl.sandbox.cut_output import KeptOutput

Limit = Literal["wall", "cpu", "memory", "disk", "output"]
"""What may end a run."""
LIMITS: tuple[Limit, ...] = get_args(Limit)
HEADER = struct.Struct("!IQ")
DONE = b"."
LARGEST_JSON = 64 << 20
"""Bytes of an order without its input; a header that states more is invalid."""
LARGEST_REPORT = 1 << 12
"""The same of a report without what was written."""
PIECE = 1 << 18
"""Bytes of a long message that are sent at a time."""


@dataclass(frozen=True, slots=True)
class Order:
    """One program to run, with the limits of this run: seconds, bytes, and a count of processes."""

    program: str
    stdin: bytes
    wall: float
    cpu: float
    memory: int
    processes: int
    disk: int
    output: int
    cut: bool = False
    """True if output beyond the limit is left out, and the run goes on; the limit is then one for
    each of stdout and stderr."""

    @property
    def head(self) -> bytes:
        """The message without its input, which follows."""
        told = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "stdin"}
        return pack(told, len(self.stdin))

    @property
    def most_written(self) -> int:
        """Bytes that a report of it may have."""
        return 2 * self.output if self.cut else self.output


@dataclass(frozen=True, slots=True)
class JailReport:
    """What has become of an order."""

    end: Limit | int
    """The limit that ended the run; else the exit status of the program, or minus the signal that
    ended it."""
    seconds: float
    """Wall time."""
    stdout: KeptOutput
    """What it wrote."""
    stderr: KeptOutput
    """Its messages."""

    @classmethod
    def read(cls, told: Mapping[str, Any], written: tuple[bytes, bytes], most: int) -> Self:
        """The report of which this is the JSON, and these the bytes, of at most `most` each.

        Raises:
            ValueError, TypeError, KeyError: it is none.
        """
        hit, status = told["hit"], told["exit"]
        limit = next((one for one in LIMITS if one == hit), None)
        if limit is None and (hit or not isinstance(status, int)):
            raise ValueError(f"a report without an end: {told}")
        end = status if limit is None else limit
        stdout, stderr = (
            KeptOutput(content, most - most // 2, int(cut))
            for content, cut in zip(written, told["cut"], strict=True)
        )
        return cls(end, float(told["seconds"]), stdout, stderr)


def pack(message: Mapping[str, Any], follows: int = 0) -> bytes:
    """A message as bytes, before so many others that belong to it."""
    body = json.dumps(message).encode()
    return HEADER.pack(len(body), follows) + body
