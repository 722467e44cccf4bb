"""`RolloutAccounts`: what became of the episodes of a run, in numbers and in a few samples.

- `LengthBias`: are trained episodes as long as sampled ones?
- `DiscardedTokens`: what was sampled and is not trained on, by reason.
- `DiscardedSamples`: some of the episodes that are not trained on, to look at.
- `SchedulerStatus`: the present state of a scheduler, for displays.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from agentrl.errors import Layer
from agentrl.rollout.assignment import EpisodeLength
from agentrl.rollout.durations import Durations
from agentrl.trajectory import Failed, Group, Score, Trajectory

DiscardReason = Literal["failed", "surplus", "stale", "filtered", "preempted"]
"""The reason why sampled tokens are not trained on.

| reason | whose tokens |
|---|---|
| `failed` | episodes that failed, and the other members of groups that failed |
| `surplus` | members whose group was complete without them (`rollout.extra_members`) |
| `stale` | groups that a staleness rule gave up |
| `filtered` | groups whose advantages are all 0 (`rollout.filter_zero_variance`) |
| `preempted` | episodes that made room in the KV caches, and are played again |
"""


@dataclass(slots=True)
class LengthBias:
    """Mean lengths of sampled and of trained episodes, in seconds and in sampled tokens.

    A rule that drops late groups silently favours short episodes, and so do extra members. A
    cancelled episode would have been longer than it is, and counts as such
    (`agentrl/rollout/durations.py`).
    """

    _sampled_seconds: Durations = field(default_factory=Durations)
    _sampled_tokens: Durations = field(default_factory=Durations)
    _trained_seconds: Durations = field(default_factory=Durations)
    _trained_tokens: Durations = field(default_factory=Durations)

    def add_sampled(self, length: EpisodeLength) -> None:
        """Count an episode that has ended."""
        self._sampled_seconds.add(length.seconds)
        self._sampled_tokens.add(length.tokens)

    def add_cut(self, length: EpisodeLength) -> None:
        """Count an episode that was cancelled at this length."""
        self._sampled_seconds.cut(length.seconds)
        self._sampled_tokens.cut(length.tokens)

    def add_trained(self, group: Group) -> None:
        """Count the episodes of a group that goes to the trainer."""
        for trajectory in group.trajectories:
            self._trained_seconds.add(trajectory.seconds)
            self._trained_tokens.add(trajectory.num_tokens)

    def metrics(self) -> dict[str, float]:
        """Mean length of trained over that of sampled episodes: 1 is unbiased; below 1, long
        episodes are missing.
        """
        return {
            "bias/seconds": _ratio_of_means(self._trained_seconds, self._sampled_seconds),
            "bias/tokens": _ratio_of_means(self._trained_tokens, self._sampled_tokens),
        }


@dataclass(slots=True)
class DiscardedTokens:
    """Sampled tokens that are not trained on, counted until `metrics` is called, and then from
    zero.

    Tokens of an answer that was cut short are not known here: only the engine has seen them.
    """

    _discarded: Counter[DiscardReason] = field(default_factory=Counter)
    _trained: int = 0

    def add(self, reason: DiscardReason, tokens: int) -> None:
        """Count the tokens of an episode that was cut off or has failed."""
        self._discarded[reason] += tokens

    def add_episodes(self, reason: DiscardReason, trajectories: Iterable[Trajectory]) -> None:
        """Count the tokens of episodes that came to an end."""
        self._discarded[reason] += sum(trajectory.num_new_tokens for trajectory in trajectories)

    def add_trained(self, groups: Iterable[Group]) -> None:
        """Count the tokens of a batch."""
        for group in groups:
            self._trained += sum(trajectory.num_new_tokens for trajectory in group.trajectories)

    def metrics(self) -> dict[str, float]:
        """The tokens since the last call, and their share of those that were sampled."""
        wasted = self._discarded.total()
        sampled = wasted + self._trained
        metrics = {
            "wasted_tokens": float(wasted),
            "wasted_share": wasted / sampled if sampled else 0.0,
        }
        for reason, tokens in self._discarded.items():
            if tokens:
                metrics[f"wasted_tokens/{reason}"] = float(tokens)
        self._discarded.clear()
        self._trained = 0
        return metrics


@dataclass(slots=True)
class DiscardedSamples:
    """The first few trajectories that are not trained on, of each kind: a reason, or the layer that
    failed. They are taken step by step.
    """

    max_per_kind: int
    """Trajectories of each kind that are kept between two calls of `take`."""
    _kept: list[tuple[Trajectory, Score]] = field(default_factory=list)
    _counts: Counter[str] = field(default_factory=Counter)

    def keep(self, kind: DiscardReason | Layer, scored: Iterable[tuple[Trajectory, Score]]) -> None:
        """Keep trajectories as far as there is room; those without a turn are left out."""
        for trajectory, score in scored:
            if trajectory.turns and self._counts[kind] < self.max_per_kind:
                self._counts[kind] += 1
                self._kept.append((trajectory, score))

    def take(self) -> list[tuple[Trajectory, Score]]:
        """The trajectories kept since the last call."""
        taken, self._kept = self._kept, []
        self._counts.clear()
        return taken


@dataclass(slots=True)
class RolloutAccounts:
    """The accounts of a run: each event of a scheduler is recorded by one call."""

    samples: DiscardedSamples = field(default_factory=lambda: DiscardedSamples(0))
    failures: Counter[Layer] = field(default_factory=Counter)
    """Attempts that failed so far, by layer."""
    lengths: LengthBias = field(default_factory=LengthBias)
    tokens: DiscardedTokens = field(default_factory=DiscardedTokens)

    def add_cancelled(
        self,
        reason: DiscardReason,
        ended: Sequence[EpisodeLength],
        cut_at: EpisodeLength,
        untrained_tokens: int,
    ) -> None:
        """Record an episode that was cancelled: while it was scored, if it has the lengths `ended`,
        else while it was played, at the length `cut_at`.
        """
        for length in ended:
            self.lengths.add_sampled(length)
        if not ended:
            self.lengths.add_cut(cut_at)
        self.tokens.add(reason, untrained_tokens)

    def add_failed(
        self, failure: Failed, trajectories: Iterable[Trajectory], untrained_tokens: int
    ) -> None:
        """Record a failed attempt."""
        self.tokens.add("failed", untrained_tokens)
        self.failures[failure.layer] += 1
        score = Score.failed(failure.error, failure.layer)
        self.samples.keep(failure.layer, [(trajectory, score) for trajectory in trajectories])

    def add_discarded(self, reason: DiscardReason, group: Group) -> None:
        """Record a whole group that is not trained on."""
        self.tokens.add_episodes(reason, group.trajectories)
        self.samples.keep(reason, zip(group.trajectories, group.scores, strict=True))

    def metrics(self) -> dict[str, float]:
        """The metrics of lengths so far, and of discarded tokens since the last call."""
        return {**self.tokens.metrics(), **self.lengths.metrics()}


class OpenGroup(NamedTuple):
    """A group that is being played."""

    task: str
    """The task's id."""
    env: str
    """The task's environment."""
    seconds: float
    """Since it was admitted."""


@dataclass(frozen=True, slots=True)
class SchedulerStatus:
    """The present state of a scheduler."""

    slots: int
    """Episode slots that are taken."""
    slots_limit: int
    """Episode slots that there are."""
    ready: int
    """Groups that are ready for the next step."""
    wanted: int
    """Groups that the next step needs."""
    failures: Mapping[Layer, int] = field(default_factory=dict)
    """Episodes that failed so far, by layer."""
    longest: Sequence[OpenGroup] = ()
    """The groups that have been played for the longest, longest first."""
    queued: int = 0
    """Episodes that wait for a slot."""


def _ratio_of_means(trained: Durations, sampled: Durations) -> float:
    """The ratio of the means; 1 while either is zero."""
    trained_mean, sampled_mean = trained.mean(), sampled.mean()
    return trained_mean / sampled_mean if trained_mean and sampled_mean else 1.0
