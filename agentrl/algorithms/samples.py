"""From groups to the samples that are trained on: with the algorithm's advantages and the turns' rewards."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from math import fsum
from types import MappingProxyType

from agentrl.algorithms.batch_processing import BatchProcessing, BatchProcessingConfig
from agentrl.batch import TrainBatch, TrainingSample, collate, to_samples
from agentrl.errors import TrainingError
from agentrl.protocols import Algorithm, MemberAdvantage, NormalizesAdvantages
from agentrl.trajectory import Group, Score, Trajectory


@dataclass(frozen=True, slots=True)
class SampleOrigin:
    """Where a training sample comes from: the turns `first` to `last` of an agent's view of an episode."""

    episode: str
    agent: str
    task: str
    first: int
    last: int


def batch_of(groups: list[Group], algorithm: Algorithm, processing: BatchProcessing, oldest_version: int) -> TrainBatch:
    """The batch of a step's groups."""
    return traced_batch_of(groups, algorithm, processing, oldest_version)[0]


def traced_batch_of(
    groups: list[Group],
    algorithm: Algorithm,
    processing: BatchProcessing,
    oldest_version: int,
    by_env: Mapping[str, Algorithm] = MappingProxyType({}),
) -> tuple[TrainBatch, Sequence[SampleOrigin]]:
    """The batch of a step's groups, and where each of its samples comes from.

    `by_env`: whose advantages the groups of some environments have instead.

    Raises:
        TrainingError: no token of the groups carries loss.
    """
    origins: list[SampleOrigin] = []

    def samples() -> Iterator[TrainingSample]:
        scored = processing.scores(groups)
        for trajectory, sample in _traced_samples(scored, algorithm, oldest_version, processing, by_env):
            first, last = int(sample.turn_ids[0]), int(sample.turn_ids[-1])
            origins.append(SampleOrigin(trajectory.id, trajectory.agent, trajectory.task.id, first, last))
            yield sample

    found = samples()
    first = next(found, None)
    if first is None:
        played = sum(len(group.trajectories) for group in groups)
        raise TrainingError(
            f"no token of the step's {played} episodes is trained on: all are masked, too old (rollout.max_staleness "
            f"leaves out what is older than version {oldest_version}), or of groups that are dropped "
            "(batch_processing.keep_variance). Raise rollout.groups_per_step or rollout.max_staleness, or leave some "
            "of these settings out"
        )
    return collate(chain([first], found)), origins


def samples_of(
    groups: list[Group], algorithm: Algorithm, oldest_version: int = 0, processing: BatchProcessing | None = None
) -> Iterator[TrainingSample]:
    """The training samples of a batch of groups. Each token that is fresh enough has the advantage of its turn.

    If several agents are trained, each agent's episodes are compared only with its own.
    """
    return (sample for _, sample in _traced_samples(groups, algorithm, oldest_version, processing))


def _traced_samples(
    groups: list[Group],
    algorithm: Algorithm,
    oldest_version: int,
    processing: BatchProcessing | None,
    by_env: Mapping[str, Algorithm] = MappingProxyType({}),
) -> Iterator[tuple[Trajectory, TrainingSample]]:
    """The training samples of `samples_of`, each with its trajectory."""
    processing = processing or BatchProcessing(BatchProcessingConfig())
    parts = [of_agent for group in groups for of_agent in group.by_agent()]
    algorithms = [by_env.get(part.task.env, algorithm) for part in parts]
    credits_ = GroupCredits(parts, algorithm, algorithms, processing)
    rewards = chain(*(part.turn_rewards_G for part in parts))
    trajectories = [trajectory for part in parts for trajectory in part.trajectories]
    informative = processing.informative(parts, algorithms)
    wanted = [told for part, told in zip(parts, informative, strict=True) for _ in part.trajectories]
    kept = [a and b for a, b in zip(processing.trained(trajectories), wanted, strict=True)]
    numbers = [number for number, part in enumerate(parts) for _ in part.trajectories]
    charged = credits_ if getattr(algorithm, "charges_rewards", False) else None
    for member, (number, trajectory, advantage, earned, trained) in enumerate(
        zip(numbers, trajectories, credits_.advantages({}), rewards, kept, strict=True)
    ):
        if trained:
            for sample in to_samples(trajectory, advantage, turn_rewards=earned, oldest_version=oldest_version):
                yield trajectory, replace(sample, group=number, credits=charged, member=member)


@dataclass(frozen=True, slots=True, eq=False)
class GroupCredits:
    """The `Credits` of a batch of groups: each of one agent, with the scores that are compared, and its algorithm.

    `algorithm` is the run's, which may normalise the advantages of all.
    """

    parts: Sequence[Group]
    algorithm: Algorithm
    algorithms: Sequence[Algorithm]
    processing: BatchProcessing

    def advantages(self, costs: Mapping[int, Sequence[float]]) -> list[MemberAdvantage]:
        """See `Credits`."""
        first, charged = 0, []
        for part in self.parts:
            of_part = [costs.get(first + place, ()) for place in range(len(part.trajectories))]
            charged.append(_charged(part, of_part) if costs else part)
            first += len(part.trajectories)
        by_group: Sequence[Sequence[MemberAdvantage]] = [
            own.advantages(part) for own, part in zip(self.algorithms, charged, strict=True)
        ]
        if isinstance(self.algorithm, NormalizesAdvantages):
            by_group = self.algorithm.normalized(by_group)
        return list(chain(*self.processing.advantages(charged, by_group)))


def _charged(group: Group, costs_G: Sequence[Sequence[float]]) -> Group:
    """The group with what each turn costs taken off its reward."""
    scores: list[Score] = []
    for score, rewards, costs in zip(group.scores, group.turn_rewards_G, costs_G, strict=True):
        left = tuple(reward - cost for reward, cost in zip_longest(rewards, costs[: len(rewards)], fillvalue=0.0))
        scores.append(replace(score, value=score.value - fsum(costs), turns=left))
    return replace(group, scores=tuple(scores))
