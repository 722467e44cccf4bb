"""The outcome of running a program."""

from dataclasses import dataclass
from typing import Literal

Limit = Literal["wall", "cpu", "memory", "disk", "output"]


@dataclass(frozen=True, slots=True)
class Ran:
    """The program ended by itself. `exit` is its status, or minus the signal that ended it;
    `seconds` is wall time.
    """

    stdout: str
    stderr: str
    exit: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LimitHit:
    """The program was ended because it hit a limit; `stdout` and `stderr` are what it had written
    by then.
    """

    which: Limit
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SandboxLost:
    """The sandbox failed, which says nothing about the program: retry it, and never score it.
    `final`: the program has been there at two such failures, and is not run again.
    """

    error: str
    final: bool = False


Outcome = Ran | LimitHit | SandboxLost
