"""Trackers: receivers of a run's metrics, some of its episodes, and its end."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from agentrl.protocols.offers import Offers

HowEnded = Literal["completed", "stopped", "failed"]
"""The end of a run: its work is done; a signal stopped it; an error ended it."""


@dataclass(frozen=True, slots=True)
class EpisodeSample:
    """An episode as a row of a tracker's table."""

    episode: str
    task: str
    status: str
    score: float | None
    """None if the reward only compares the members of a group."""
    success: bool | None
    """None if nothing tells."""
    conversation: str
    """Its messages, of which a long one lacks its middle."""


class Tracker(Protocol):
    """Receives the metrics of a run, in a thread of its own. What it raises ends no run.

    It may also have the methods of `TrackerOffers`.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step. Evaluations may come late: after those of later steps."""
        ...

    def close(self) -> None:
        """Flush."""
        ...


@dataclass(frozen=True, slots=True)
class TrackerOffers(Offers):
    """The optional methods of a tracker, which are found by their names."""

    log_samples: Callable[[str, int, Sequence[EpisodeSample]], None] | None = None
    """Records some episodes (`observe.tracked_episodes`): their name, which is "train" for those
    trained on or that of an evaluation, the step, and the episodes."""
    end: Callable[[HowEnded, str], None] | None = None
    """Records how and why the run has ended, and flushes: called instead of `close`, for a tracker
    that tells runs that have failed from those that have not."""
