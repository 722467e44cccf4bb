"""Batch processing: penalties, constraints and normalisation of scores and advantages, between rollouts and loss.

All of it is pure functions of groups, except that each constraint has a multiplier, which `BatchProcessing` carries
from step to step. It is among a step's metrics, and a resumed run reads it there.

Dimension suffixes: G members of a group, M trajectories of a batch.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Literal

from pydantic import Field

from agentrl.algorithms.advantages import STD_EPSILON
from agentrl.errors import ConfigError, TrainingError
from agentrl.protocols import Settings
from agentrl.trajectory import Group, Score, Trajectory, Truncated


class Constraint(Settings):
    """A bound on the mean of a part of the score, kept by a Lagrange multiplier that follows its violation."""

    part: str
    """The part that is a cost, by its metric without `reward/`: `monitor/violated`."""
    at_most: float = Field(ge=0, allow_inf_nan=False)
    """What its mean over a batch may be."""
    rate: float = Field(0.1, gt=0, allow_inf_nan=False)
    """How far the multiplier moves in a step, for each unit that the mean is off."""
    initial: float = Field(0.0, ge=0, allow_inf_nan=False)
    """The multiplier of the first step."""
    largest: float = Field(10.0, gt=0, allow_inf_nan=False)
    """What the multiplier never exceeds, should the bound be impossible."""


class BatchProcessingConfig(Settings):
    """What is done to scores and advantages."""

    normalize: Literal["group", "batch", "environment"] = "group"
    """What advantages are normalised over once more: nothing beyond the algorithm's own group, all of the batch, or
    all of one environment in the batch."""
    length_penalty: float = Field(0.0, ge=0, allow_inf_nan=False)
    """How much the longest member of a group loses to the shortest."""
    overlong: Literal["train", "mask"] = "train"
    """Whether tokens of truncated episodes carry loss."""
    constraints: tuple[Constraint, ...] = ()
    """Bounds on parts of the score."""


class BatchProcessing:
    """What a run does to its batches. `rows`: metrics of earlier steps, with a resumed run's multipliers."""

    def __init__(self, config: BatchProcessingConfig, rows: Iterable[Mapping[str, float]] = ()) -> None:
        self._config = config
        self.multipliers = {constraint.part: constraint.initial for constraint in config.constraints}
        """By the part of each constraint."""
        for row in rows:
            for part in self.multipliers:
                self.multipliers[part] = row.get(_multiplier(part), self.multipliers[part])

    def scores(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with length penalties and the constraints' terms in their scores; parts stay as they were.

        Raises:
            ConfigError: no score has a part that a constraint names.
        """
        if self._config.length_penalty:
            groups = [_penalised(group, self._config.length_penalty) for group in groups]
        for part, multiplier in self.multipliers.items():
            _costs(groups, part)
            groups = [
                _with_values(group, [s.value - multiplier * s.parts.get(part, 0.0) for s in group.scores])
                for group in groups
            ]
        return list(groups)

    def advantages(self, groups: Sequence[Group], advantages: Sequence[Sequence[float]]) -> list[list[float]]:
        """The algorithm's advantages of each group, normalised over what the config says."""
        if self._config.normalize == "group":
            return [list(of_group) for of_group in advantages]
        whole = self._config.normalize == "batch"
        return normalised(advantages, ["" if whole else group.task.env for group in groups])

    def trained(self, trajectories: Sequence[Trajectory]) -> list[bool]:
        """Which of a batch's trajectories carry loss: overlong filtering, DAPO (arXiv:2503.14476), section 3.4.

        Raises:
            TrainingError: none does.
        """
        if self._config.overlong == "train":
            return [True] * len(trajectories)
        kept = [not isinstance(trajectory.status, Truncated) for trajectory in trajectories]
        if not any(kept):
            raise TrainingError(
                f"all {len(kept)} episodes of the step were truncated, and batch_processing.overlong=mask trains on "
                "none of these: raise rollout.max_turns or engine.max_context, or write batch_processing.overlong=train"
            )
        return kept

    def update(self, groups: Sequence[Group]) -> dict[str, float]:
        """Move the multipliers by a batch's scores, and say where they are: dual ascent, projected.

        m <- min(largest, max(0, m + rate * (mean cost - at_most))): Tessler et al., "Reward Constrained Policy
        Optimization" (arXiv:1805.11074).
        """
        metrics = {}
        for constraint in self._config.constraints:
            rate = fmean(_costs(groups, constraint.part))
            moved = self.multipliers[constraint.part] + constraint.rate * (rate - constraint.at_most)
            self.multipliers[constraint.part] = min(constraint.largest, max(0.0, moved))
            metrics[f"constraints/rate/{constraint.part}"] = rate
            metrics[_multiplier(constraint.part)] = self.multipliers[constraint.part]
        return metrics


def length_penalties(lengths_G: Sequence[int], right_G: Sequence[bool]) -> list[float]:
    """From 0.5 for the shortest member to -0.5 for the longest; one that is wrong is never paid for being short.

    Kimi k1.5 (arXiv:2501.12599), section 2.3.3. Zeros where all are equally long.
    """
    shortest, longest = min(lengths_G), max(lengths_G)
    if shortest == longest:
        return [0.0] * len(lengths_G)
    terms_G = [0.5 - (length - shortest) / (longest - shortest) for length in lengths_G]
    return [term if right else min(0.0, term) for term, right in zip(terms_G, right_G, strict=True)]


def normalised(advantages: Sequence[Sequence[float]], scopes: Sequence[str]) -> list[list[float]]:
    """(A - mean A) / std A over all advantages of groups of one scope, with the population's standard deviation.

    Over the batch, after the group's mean was taken off: REINFORCE++ (arXiv:2501.03262). A scope in which
    all are equal gets exact zeros.
    """
    spread: dict[str, tuple[float, float]] = {}
    for scope in dict.fromkeys(scopes):
        values = [a for of_group, s in zip(advantages, scopes, strict=True) if s == scope for a in of_group]
        mean = math.fsum(values) / len(values)
        constant = len(set(values)) == 1
        std = 0.0 if constant else math.sqrt(math.fsum((a - mean) ** 2 for a in values) / len(values))
        spread[scope] = (values[0] if constant else mean, std)
    return [
        [(a - spread[scope][0]) / (spread[scope][1] + STD_EPSILON) for a in of_group]
        for of_group, scope in zip(advantages, scopes, strict=True)
    ]


def _penalised(group: Group, weight: float) -> Group:
    penalties: list[float] = length_penalties(
        [trajectory.num_tokens for trajectory in group.trajectories],
        [trajectory.success for trajectory in group.trajectories],
    )
    return _with_values(group, [s.value + weight * p for s, p in zip(group.scores, penalties, strict=True)])


def _with_values(group: Group, values_G: Sequence[float]) -> Group:
    scores: tuple[Score, ...] = tuple(replace(s, value=v) for s, v in zip(group.scores, values_G, strict=True))
    return replace(group, scores=scores)


def _costs(groups: Sequence[Group], part: str) -> list[float]:
    found = [score.parts[part] for group in groups for score in group.scores if part in score.parts]
    if not found:
        there = sorted({name for group in groups for score in group.scores for name in score.parts})
        raise ConfigError(
            f"batch_processing.constraints: no score has a part {part!r}; "
            f"there are {', '.join(map(repr, there)) or 'none'}"
        )
    return found


def _multiplier(part: str) -> str:
    return f"constraints/multiplier/{part}"
