"""What a scheduler is doing at a moment, for displays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from agentrl.errors import Layer


class OpenGroup(NamedTuple):
    """A group that is played: its task, its environment, and for how many seconds it has been
    played.
    """

    task: str
    env: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Underway:
    """The episode slots that are taken, of so many; groups that are ready for the next step, of so
    many; how many episodes have failed so far, by layer; the groups that have been played for the
    longest, longest first; and how many episodes wait for a slot.
    """

    slots: int
    slots_limit: int
    ready: int
    wanted: int
    failures: Mapping[Layer, int] = field(default_factory=dict)
    longest: Sequence[OpenGroup] = ()
    queued: int = 0
