"""From groups to the samples that are trained on: with the algorithm's advantages and the turns'
rewards.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from math import fsum
from types import MappingProxyType

from agentrl.algorithms.batch_processing import BatchProcessing
from agentrl.algorithms.config import BatchProcessingConfig
from agentrl.algorithms.returned import advantages_of, normalized_by
from agentrl.batch import TrainBatch, TrainingSample, collate, to_samples
from agentrl.errors import TrainingError
from agentrl.protocols.algorithm import (
    Algorithm,
    AlgorithmOffers,
    MemberAdvantage,
)
from agentrl.trajectory import Group, Score, Trajectory, columns_of


@dataclass(frozen=True, slots=True)
class SampleOrigin:
    """The origin of a training sample: the turns `first` to `last` of an agent's view of an
    episode.
    """

    episode: str
    agent: str
    task: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class TracedBatch:
    """The batch of a step, with the origin of each sample, and the episodes that carry no loss.

    `masked`: the reason by episode id, for episodes of which no agent's tokens carry loss.
    `masked_segments`: id and agent of segments of unfinished episodes that carry none.
    """

    batch: TrainBatch
    origins: Sequence[SampleOrigin]
    masked: Mapping[str, str] = field(default_factory=dict)
    masked_segments: Sequence[tuple[str, str]] = ()


def batch_of(
    groups: list[Group], algorithm: Algorithm, processing: BatchProcessing, oldest_version: int
) -> TrainBatch:
    """The batch of a step's groups."""
    return traced_batch_of(groups, algorithm, processing, oldest_version).batch


def traced_batch_of(
    groups: list[Group],
    algorithm: Algorithm,
    processing: BatchProcessing,
    oldest_version: int,
    by_env: Mapping[str, Algorithm] = MappingProxyType({}),
) -> TracedBatch:
    """The batch of a step's groups, with what became of each episode in it.

    `by_env`: whose advantages the groups of some environments have instead.

    Raises:
        TrainingError: no token of the groups carries loss.
    """
    origins: list[SampleOrigin] = []
    lossless: list[tuple[Trajectory, str]] = []

    def samples() -> Iterator[TrainingSample]:
        scored = processing.scores(groups)
        for trajectory, sample in _traced_samples(
            scored, algorithm, oldest_version, processing, by_env=by_env, lossless=lossless
        ):
            first, last = int(sample.turn_ids[0]), int(sample.turn_ids[-1])
            origins.append(
                SampleOrigin(trajectory.id, trajectory.agent, trajectory.task.id, first, last)
            )
            yield sample

    # The batch is collated while samples are made: all samples of a step would need more memory
    # than the batch. So an empty batch is noticed by its first sample.
    found = samples()
    first = next(found, None)
    if first is None:
        played = sum(len(group.trajectories) for group in groups)
        raise TrainingError(
            f"no token of the step's {played} episodes is trained on: all are masked, too old"
            f" (rollout.max_staleness leaves out what is older than version {oldest_version}), or"
            " of groups that are dropped (batch_processing.keep_variance). Raise"
            " rollout.groups_per_step or rollout.max_staleness, or leave some of these"
            " settings out"
        )
    batch = collate(chain([first], found))
    of_parts = {(t.id, t.agent) for group in groups if group.partial for t in group.trajectories}
    segments = [(t.id, t.agent) for t, _ in lossless if (t.id, t.agent) in of_parts]
    whole = [(t, why) for t, why in lossless if (t.id, t.agent) not in of_parts]
    return TracedBatch(batch, origins, _masked_reasons(groups, whole), segments)


def _masked_reasons(
    groups: Sequence[Group], lossless: Sequence[tuple[Trajectory, str]]
) -> dict[str, str]:
    """The reasons of the episodes of which no agent's view carries loss, by episode id."""
    left = Counter(trajectory.id for group in groups for trajectory in group.trajectories)
    whys: dict[str, dict[str, None]] = {}
    for trajectory, why in lossless:
        left[trajectory.id] -= 1
        whys.setdefault(trajectory.id, {})[why] = None
    return {episode: "; ".join(own) for episode, own in whys.items() if not left[episode]}


def samples_of(
    groups: list[Group],
    algorithm: Algorithm,
    oldest_version: int = 0,
    processing: BatchProcessing | None = None,
) -> Iterator[TrainingSample]:
    """The training samples of a batch of groups. Each token that is fresh enough has the advantage
    of its turn.

    If several agents are trained, each agent's episodes are compared only with its own.
    """
    return (
        sample
        for _, sample in _traced_samples(
            groups, algorithm, oldest_version, processing, by_env={}, lossless=[]
        )
    )


def _traced_samples(
    groups: list[Group],
    algorithm: Algorithm,
    oldest_version: int,
    processing: BatchProcessing | None,
    *,
    by_env: Mapping[str, Algorithm],
    lossless: list[tuple[Trajectory, str]],
) -> Iterator[tuple[Trajectory, TrainingSample]]:
    """The training samples of `samples_of`, each with its trajectory. Trajectories that carry no
    loss are added to `lossless`, with the reason.
    """
    processing = processing or BatchProcessing(BatchProcessingConfig())
    parts = [of_agent for group in groups for of_agent in group.by_agent()]
    algorithms = [by_env.get(part.task.env, algorithm) for part in parts]
    credits_ = GroupCredits(parts, algorithm, algorithms, processing)
    rewards = chain(*(part.turn_rewards_G for part in parts))
    trajectories = [trajectory for part in parts for trajectory in part.trajectories]
    left_out = processing.left_out(parts, algorithms)
    numbers = [number for number, part in enumerate(parts) for _ in part.trajectories]
    # Costs of tokens are known only when the reference has seen the batch, so it needs the source.
    charged = credits_ if AlgorithmOffers.of(algorithm).charges_rewards else None
    for member, (number, trajectory, advantage, earned, why) in enumerate(
        zip(numbers, trajectories, credits_({}), rewards, left_out, strict=True)
    ):
        if why:
            lossless.append((trajectory, why))
            continue
        samples = to_samples(
            trajectory, advantage, turn_rewards=earned, oldest_version=oldest_version
        )
        if not any(sample.loss_mask.any() for sample in samples):
            lossless.append((trajectory, _why_lossless(trajectory, oldest_version)))
        for sample in samples:
            yield trajectory, replace(sample, group=number, credits=charged, member=member)


def _why_lossless(trajectory: Trajectory, oldest_version: int) -> str:
    if not trajectory.num_tokens:
        return "the model has sampled no token"
    if not trajectory.num_new_tokens:
        return "all its turns were trained on before"
    if not columns_of(trajectory.turns).trained_K[trajectory.trained_turns :].any():
        return "all its new turns are masked summaries"
    return f"all its tokens are older than version {oldest_version} (rollout.max_staleness)"


@dataclass(frozen=True, slots=True, eq=False)
class GroupCredits:
    """The `Credits` of a batch of groups: each of one agent, with the scores that are compared, and
    its algorithm.

    `algorithm` is the run's, which may normalise the advantages of all.
    """

    parts: Sequence[Group]
    algorithm: Algorithm
    algorithms: Sequence[Algorithm]
    processing: BatchProcessing

    def __call__(self, costs: Mapping[int, Sequence[float]]) -> list[MemberAdvantage]:
        """The advantages of all members, for these costs of their turns."""
        first, charged = 0, []
        for part in self.parts:
            of_part = [costs.get(first + place, ()) for place in range(len(part.trajectories))]
            charged.append(_charge_costs(part, of_part) if costs else part)
            first += len(part.trajectories)
        by_group = normalized_by(
            self.algorithm,
            [advantages_of(*pair) for pair in zip(self.algorithms, charged, strict=True)],
            charged,
        )
        return list(chain(*self.processing.advantages(charged, by_group)))


def _charge_costs(group: Group, costs_G: Sequence[Sequence[float]]) -> Group:
    """The group with what each turn costs taken off its reward."""
    scores: list[Score] = []
    for score, rewards, costs in zip(group.scores, group.turn_rewards_G, costs_G, strict=True):
        left = tuple(
            reward - cost
            for reward, cost in zip_longest(rewards, costs[: len(rewards)], fillvalue=0.0)
        )
        scores.append(replace(score, value=score.value - fsum(costs), turns=left))
    return replace(group, scores=tuple(scores))
