"""Trackers: receivers of a run's metrics, some of its episodes, and its end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

HowEnded = Literal["completed", "stopped", "failed"]
"""How a run ended: its work is done; a signal stopped it; an error ended it."""


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

    It may also have the methods of `SupportsSamples` and `SupportsEnding`.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step. Evaluations may come late: after those of later steps."""
        ...

    def close(self) -> None:
        """Flush."""
        ...


@runtime_checkable
class SupportsSamples(Protocol):
    """A tracker that also receives some episodes (`observe.tracked_episodes`)."""

    def log_samples(self, name: str, step: int, samples: Sequence[EpisodeSample]) -> None:
        """Record episodes of `name`: those trained on ("train"), or of an evaluation."""
        ...


@runtime_checkable
class SupportsEnding(Protocol):
    """A tracker that tells runs that have failed from those that have not: this is called instead
    of `close`.
    """

    def end(self, how: HowEnded, why: str) -> None:
        """Record how and why the run has ended, and flush."""
        ...
