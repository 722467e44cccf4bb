"""From groups to the samples that are trained on: with the algorithm's advantages and the turns' rewards."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from agentrl.algorithms.batch_processing import BatchProcessing, BatchProcessingConfig
from agentrl.batch import TrainBatch, TrainingSample, collate, to_samples
from agentrl.protocols import Algorithm, MemberAdvantage, NormalizesAdvantages
from agentrl.trajectory import Group


def batch_of(groups: list[Group], algorithm: Algorithm, processing: BatchProcessing, oldest_version: int) -> TrainBatch:
    """The batch of a step's groups."""
    return collate(samples_of(processing.scores(groups), algorithm, oldest_version, processing))


def samples_of(
    groups: list[Group], algorithm: Algorithm, oldest_version: int = 0, processing: BatchProcessing | None = None
) -> Iterator[TrainingSample]:
    """The training samples of a batch of groups. Each token that is fresh enough has the advantage of its turn.

    If several agents are trained, each agent's episodes are compared only with its own.
    """
    processing = processing or BatchProcessing(BatchProcessingConfig())
    parts = [of_agent for group in groups for of_agent in group.by_agent()]
    by_group: Sequence[Sequence[MemberAdvantage]] = [algorithm.advantages(part) for part in parts]
    if isinstance(algorithm, NormalizesAdvantages):
        by_group = algorithm.normalized(by_group)
    advantages = chain(*processing.advantages(parts, by_group))
    rewards = chain(*(part.turn_rewards_G for part in parts))
    trajectories = [trajectory for part in parts for trajectory in part.trajectories]
    informative = processing.informative(parts)
    wanted = [told for part, told in zip(parts, informative, strict=True) for _ in part.trajectories]
    kept = [a and b for a, b in zip(processing.trained(trajectories), wanted, strict=True)]
    numbers = [number for number, part in enumerate(parts) for _ in part.trajectories]
    for number, trajectory, advantage, earned, trained in zip(
        numbers, trajectories, advantages, rewards, kept, strict=True
    ):
        if trained:
            for sample in to_samples(trajectory, advantage, turn_rewards=earned, oldest_version=oldest_version):
                yield replace(sample, group=number)
