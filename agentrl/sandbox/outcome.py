"""The outcome of running a program."""

from dataclasses import dataclass

from agentrl.sandbox.order import Limit


@dataclass(frozen=True, slots=True)
class Ran:
    """The program ended by itself."""

    stdout: str
    """Its output."""
    stderr: str
    """Its messages."""
    exit: int
    """Its exit status, or minus the signal that ended it."""
    seconds: float
    """Wall time."""


@dataclass(frozen=True, slots=True)
class LimitHit:
    """The program was ended because it hit a limit."""

    which: Limit
    """The limit."""
    stdout: str = ""
    """The output until then."""
    stderr: str = ""
    """The messages until then."""
    seconds: float = 0.0
    """Wall time."""


@dataclass(frozen=True, slots=True)
class SandboxLost:
    """The sandbox failed, which says nothing about the program: retry it, and never score it.
    `final`: the program has been there at two such failures, and is not run again.
    """

    error: str
    final: bool = False


Outcome = Ran | LimitHit | SandboxLost
