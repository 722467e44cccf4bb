"""What came of a program."""

from dataclasses import dataclass
from typing import Literal

Limit = Literal["wall", "cpu", "memory", "disk", "output"]


@dataclass(frozen=True, slots=True)
class Ran:
    """It ended by itself. `exit` is its status, or minus the signal that ended it. `seconds` of wall time."""

    stdout: str
    stderr: str
    exit: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LimitHit:
    """It was ended because it hit a limit; what it had written by then."""

    which: Limit
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SandboxLost:
    """The sandbox broke, and says nothing about the program: to be tried again, and never a score."""

    error: str


Outcome = Ran | LimitHit | SandboxLost
