"""Whether what is trained on is like what is sampled.

A rule that drops what is late trains on short episodes without a word. So the mean length of the trained episodes is
held against the mean of all that were sampled, those that were cut off counting with what they had.
"""

from dataclasses import dataclass, field

from agentrl.trajectory import Group, Trajectory


@dataclass(slots=True)
class _Mean:
    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1

    def over(self, other: "_Mean") -> float:
        """This mean over the other; 1 while either has nothing to tell."""
        if not self.total or not other.total:
            return 1.0
        return (self.total / self.count) / (other.total / other.count)


@dataclass(slots=True)
class Bias:
    """Mean lengths of sampled and of trained episodes, in seconds of loop time and in sampled tokens."""

    _sampled_seconds: _Mean = field(default_factory=_Mean)
    _sampled_tokens: _Mean = field(default_factory=_Mean)
    _trained_seconds: _Mean = field(default_factory=_Mean)
    _trained_tokens: _Mean = field(default_factory=_Mean)

    def sampled(self, trajectory: Trajectory) -> None:
        """An episode came to its end."""
        self._sampled_seconds.add(trajectory.seconds)
        self._sampled_tokens.add(trajectory.num_tokens)

    def cut(self, seconds: float) -> None:
        """An episode was cancelled after so many seconds: it would have been at least as long."""
        self._sampled_seconds.add(seconds)

    def trained(self, group: Group) -> None:
        """A group goes to the trainer."""
        for trajectory in group.trajectories:
            self._trained_seconds.add(trajectory.seconds)
            self._trained_tokens.add(trajectory.num_tokens)

    def metrics(self) -> dict[str, float]:
        """Trained over sampled mean length; 1 is unbiased, below 1 long episodes are missing."""
        return {
            "bias/seconds": self._trained_seconds.over(self._sampled_seconds),
            "bias/tokens": self._trained_tokens.over(self._sampled_tokens),
        }
