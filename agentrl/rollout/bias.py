"""Whether trained episodes are as long as sampled ones.

A rule that drops late groups silently favours short episodes, and so do extra members. So these
metrics compare the mean length of the trained episodes with that of all sampled ones. A cancelled
episode would have been longer than it is, and counts as such (`agentrl/rollout/durations.py`).
"""

from dataclasses import dataclass, field

from agentrl.rollout.assignment import EpisodeLength
from agentrl.rollout.durations import Durations
from agentrl.trajectory import Group


@dataclass(slots=True)
class Bias:
    """Mean lengths of sampled and of trained episodes, in seconds and in sampled tokens."""

    _sampled_seconds: Durations = field(default_factory=Durations)
    _sampled_tokens: Durations = field(default_factory=Durations)
    _trained_seconds: Durations = field(default_factory=Durations)
    _trained_tokens: Durations = field(default_factory=Durations)

    def sampled(self, length: EpisodeLength) -> None:
        """Count an episode that has ended."""
        self._sampled_seconds.add(length.seconds)
        self._sampled_tokens.add(length.tokens)

    def cut(self, seconds: float, tokens: int) -> None:
        """Count an episode that was cancelled after `seconds`, when it had answers of so many
        `tokens`.
        """
        self._sampled_seconds.cut(seconds)
        self._sampled_tokens.cut(tokens)

    def trained(self, group: Group) -> None:
        """Count the episodes of a group that goes to the trainer."""
        for trajectory in group.trajectories:
            self._trained_seconds.add(trajectory.seconds)
            self._trained_tokens.add(trajectory.num_tokens)

    def metrics(self) -> dict[str, float]:
        """Mean length of trained over that of sampled episodes: 1 is unbiased; below 1, long
        episodes are missing.
        """
        return {
            "bias/seconds": _ratio(self._trained_seconds, self._sampled_seconds),
            "bias/tokens": _ratio(self._trained_tokens, self._sampled_tokens),
        }


def _ratio(trained: Durations, sampled: Durations) -> float:
    """The ratio of the means; 1 while either is zero."""
    one, other = trained.mean(), sampled.mean()
    return one / other if one and other else 1.0
