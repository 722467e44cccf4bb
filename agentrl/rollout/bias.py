"""Whether trained episodes are as long as sampled ones.

A rule that drops late groups silently favours short episodes. So these metrics compare the mean length of the trained
episodes with that of all sampled ones. A cancelled episode counts with its seconds so far, but not with its tokens.
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
        """The ratio of this mean to the other; 1 while either total is zero."""
        if not self.total or not other.total:
            return 1.0
        return (self.total / self.count) / (other.total / other.count)


@dataclass(slots=True)
class Bias:
    """Mean lengths of sampled and of trained episodes, in seconds and in sampled tokens."""

    _sampled_seconds: _Mean = field(default_factory=_Mean)
    _sampled_tokens: _Mean = field(default_factory=_Mean)
    _trained_seconds: _Mean = field(default_factory=_Mean)
    _trained_tokens: _Mean = field(default_factory=_Mean)

    def sampled(self, trajectory: Trajectory) -> None:
        """Count an episode that has ended."""
        self._sampled_seconds.add(trajectory.seconds)
        self._sampled_tokens.add(trajectory.num_tokens)

    def cut(self, seconds: float) -> None:
        """Count an episode that was cancelled after `seconds`; it would have lasted at least as long."""
        self._sampled_seconds.add(seconds)

    def trained(self, group: Group) -> None:
        """Count the episodes of a group that goes to the trainer."""
        for trajectory in group.trajectories:
            self._trained_seconds.add(trajectory.seconds)
            self._trained_tokens.add(trajectory.num_tokens)

    def metrics(self) -> dict[str, float]:
        """Mean length of trained over that of sampled episodes: 1 is unbiased; below 1, long episodes are missing."""
        return {
            "bias/seconds": self._trained_seconds.over(self._sampled_seconds),
            "bias/tokens": self._trained_tokens.over(self._sampled_tokens),
        }
