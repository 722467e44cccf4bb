"""Batch processing: penalties, constraints and normalisation of scores and advantages, between
rollouts and loss.

All of it is pure functions of groups, except the multiplier of each constraint and what an
algorithm remembers, which `BatchProcessing` carries from step to step, and `state` gives for the
checkpoints.

Dimension suffixes: G members of a group, M trajectories of a batch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pvariance
from types import MappingProxyType
from typing import Any

from agentrl.algorithms.advantages import normalised, numbers_in
from agentrl.algorithms.config import BatchProcessingConfig
from agentrl.algorithms.returned import advantages_of
from agentrl.errors import ConfigError, TrainingError
from agentrl.protocols.algorithm import (
    Algorithm,
    AlgorithmOffers,
    MemberAdvantage,
)
from agentrl.protocols.metrics import Metrics, merge_metrics
from agentrl.protocols.state import Stateful
from agentrl.tokens.arrays import constant, scale_of, settled
from agentrl.trajectory import SEGMENT, Group, Score, Trajectory, Truncated, succeeded


class BatchProcessing:
    """Processes the batches of a run. `Stateful`: multipliers, and the state of what learns.

    `algorithm`: the one that is trained with, in case it learns from batches, or says how much a
    group varies; `by_env`: those of the groups of some environments, which learn from these alone.
    """

    def __init__(
        self,
        config: BatchProcessingConfig,
        algorithm: Algorithm | None = None,
        by_env: Mapping[str, Algorithm] = MappingProxyType({}),
    ) -> None:
        self._config = config
        self._algorithm, self._by_env = algorithm, by_env
        algorithms = {"": algorithm, **{f"envs/{env}/": own for env, own in by_env.items()}}
        self._learners: dict[str, _Learner] = {}
        """The algorithms that learn from batches, by the prefix of their metrics."""
        for prefix, learner in algorithms.items():
            learn = AlgorithmOffers.of(learner).learn
            if learn is not None:
                self._learners[prefix] = _Learner.of(learner, learn)
        self.multipliers = {
            constraint.part: constraint.initial for constraint in config.constraints
        }
        """The multiplier of each constraint, by its part."""

    def state(self) -> Mapping[str, Any]:
        """The multipliers, and the states of the algorithms that learn from batches."""
        learners = {prefix: learner.memory.state() for prefix, learner in self._learners.items()}
        return {"multipliers": self.multipliers, "learners": learners}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from an earlier launch. Constraints and algorithms that it did not have keep
        their initial state.
        """
        for part in self.multipliers:
            self.multipliers[part] = state["multipliers"].get(part, self.multipliers[part])
        for prefix, learner in self._learners.items():
            if prefix in state["learners"]:
                learner.memory.restore(state["learners"][prefix])

    def scores(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with length penalties and the constraints' terms added to their scores; parts
        are unchanged.

        Partial groups stay as they are: these terms belong to the end of an episode.

        Raises:
            ConfigError: no score has a part that a constraint names.
        """
        # Before anything is computed, so that a wrong name is reported in the first step.
        for part in self.multipliers:
            _costs(groups, part)
        return [group if group.partial else self._apply_terms(group) for group in groups]

    def advantages(
        self, groups: Sequence[Group], advantages: Sequence[Sequence[MemberAdvantage]]
    ) -> list[list[MemberAdvantage]]:
        """The algorithm's advantages of each group, normalised as configured."""
        if self._config.normalize == "group":
            return [list(of_group) for of_group in advantages]
        whole = self._config.normalize == "batch"
        return normalised(advantages, ["" if whole else group.task.env for group in groups])

    def trained(self, trajectories: Sequence[Trajectory]) -> list[bool]:
        """True for the trajectories of a batch that carry loss: overlong filtering, DAPO
        (arXiv:2503.14476), section 3.4.

        Raises:
            TrainingError: none does.
        """
        if self._config.overlong == "train":
            return [True] * len(trajectories)
        kept = [not isinstance(t.status, Truncated) or t.status == SEGMENT for t in trajectories]
        if not any(kept):
            raise TrainingError(
                f"all {len(kept)} episodes of the step were truncated, and"
                " batch_processing.overlong=mask trains on none of these: raise rollout.budget or"
                " engine.max_context, or write batch_processing.overlong=train"
            )
        return kept

    def informative(
        self, groups: Sequence[Group], algorithms: Sequence[Algorithm] = ()
    ) -> list[bool]:
        """True for the groups that vary enough to be trained on: `keep_variance`. All, if none
        varies.

        Each is a group of one agent. They are compared with those of the same environment and
        agent, since others' rewards may have another scale. `algorithms`: whose advantages each
        has, by default the run's own.
        """
        share = self._config.keep_variance
        if share == 1:
            return [True] * len(groups)
        spreads = list(map(_spread, groups, algorithms or map(self._algorithm_of, groups)))
        if not any(spreads):
            return [True] * len(groups)
        kept = [False] * len(groups)
        scopes = [(group.task.env, group.trajectories[0].agent) for group in groups]
        for scope in dict.fromkeys(scopes):
            own = [
                number
                for number, of_group in enumerate(scopes)
                if of_group == scope and spreads[number]
            ]
            for number, wanted in zip(
                own, most_varying([spreads[number] for number in own], share), strict=True
            ):
                kept[number] = wanted
        return kept

    def left_out(self, groups: Sequence[Group], algorithms: Sequence[Algorithm] = ()) -> list[str]:
        """The reason why each trajectory of these groups carries no loss (`trained`,
        `informative`); "" for those that do.
        """
        share, reasons = self._config.keep_variance, list[str]()
        trained = iter(
            self.trained([trajectory for group in groups for trajectory in group.trajectories])
        )
        for group, varies in zip(groups, self.informative(groups, algorithms), strict=True):
            why = (
                ""
                if varies
                else (
                    f"its group's scores vary too little (batch_processing.keep_variance={share:g})"
                )
            )
            for _ in group.trajectories:
                reasons.append(
                    why if next(trained) else "it was truncated (batch_processing.overlong=mask)"
                )
        return reasons

    def teaches(self, group: Group) -> bool:
        """True if some advantage of a whole group is not 0: `rollout.filter_zero_variance`."""
        algorithm = self._algorithm_of(group)
        if algorithm is None:
            return group.has_signal
        return any(
            any(numbers_in(advantages_of(algorithm, part)))
            for part in self._apply_terms(group).by_agent()
        )

    def _algorithm_of(self, group: Group) -> Algorithm | None:
        own = self._by_env.get(group.task.env)
        return self._algorithm if own is None else own

    def _prefix(self, env: str) -> str:
        """The prefix of the metrics of what learns from an environment's groups."""
        return f"envs/{env}/" if env in self._by_env else ""

    def _apply_terms(self, group: Group) -> Group:
        """The group with the terms of its own members, and of those alone, in its scores."""
        weight = self._config.length_penalty
        if weight:
            group = _add_terms(group, [weight * penalty for penalty in _length_terms(group)])
        for part, multiplier in self.multipliers.items():
            costs = [score.parts.get(part, 0.0) for score in group.scores]
            group = _add_terms(group, [-multiplier * cost for cost in costs])
        return group

    def update(self, groups: Sequence[Group]) -> dict[str, float]:
        """Update what is carried on from a batch, and return its metrics. Multipliers follow
        projected dual ascent:

        m <- min(largest, max(0, m + rate * (mean cost - at_most))): Tessler et al., "Reward
        Constrained Policy Optimization" (arXiv:1805.11074).
        """
        reported: dict[str, Metrics] = {}
        parts = [part for group in self.scores(groups) for part in group.by_agent()]
        for prefix, learner in self._learners.items():
            own = [part for part in parts if self._prefix(part.task.env) == prefix]
            learned = learner.learn(own)
            whose = f"the algorithm of {prefix}" if prefix else "the algorithm"
            reported[whose] = {f"{prefix}{name}": value for name, value in learned.items()}
        metrics: dict[str, float] = {}
        if self._config.keep_variance < 1:
            metrics["informative_groups"] = fmean(self.informative(parts))
        for constraint in self._config.constraints:
            rate = fmean(_costs(groups, constraint.part))
            moved = self.multipliers[constraint.part] + constraint.rate * (
                rate - constraint.at_most
            )
            self.multipliers[constraint.part] = min(constraint.largest, max(0.0, moved))
            metrics[f"constraints/rate/{constraint.part}"] = rate
            metrics[f"constraints/multiplier/{constraint.part}"] = self.multipliers[constraint.part]
        return merge_metrics({**reported, "batch_processing": metrics})


@dataclass(frozen=True, slots=True)
class _Learner:
    """An algorithm that learns from batches."""

    learn: Callable[[Sequence[Group]], Mapping[str, float]]
    """`AlgorithmOffers.learn`."""
    memory: Stateful
    """The algorithm itself."""

    @staticmethod
    def of(
        algorithm: object, learn: Callable[[Sequence[Group]], Mapping[str, float]]
    ) -> "_Learner":
        """The learner that an algorithm is.

        Raises:
            ConfigError: a resumed run could not continue from what it has learned.
        """
        if not isinstance(algorithm, Stateful):
            raise ConfigError(
                f"the algorithm {type(algorithm).__name__} has the method `learn`, and a resumed"
                " run would forget what it has learned: write its methods `state` and `restore`"
                " too (agentrl.Stateful)"
            )
        return _Learner(learn, algorithm)


def _spread(group: Group, algorithm: Algorithm | None) -> float:
    """The spread of a group in what the algorithm compares; by default, in whole rewards."""
    measure = AlgorithmOffers.of(algorithm).spread
    if measure is not None:
        return measure(group)
    return 0.0 if constant(group.rewards_G) else pvariance(group.rewards_G)


def most_varying(variances: Sequence[float], share: float) -> list[bool]:
    """The fewest largest variances that add up to `share` of all; among equals the first. All, if
    none is above 0.
    """
    total, sum_so_far = math.fsum(variances), 0.0
    if total == 0:
        return [True] * len(variances)
    kept = [False] * len(variances)
    for index in sorted(range(len(variances)), key=lambda index: -variances[index]):
        kept[index] = True
        sum_so_far += variances[index]
        if sum_so_far >= share * total:
            break
    return kept


def length_penalties(lengths_G: Sequence[int], right_G: Sequence[bool | None]) -> list[float]:
    """From 0.5 for the shortest member to -0.5 for the longest; only right members get a bonus for
    being short.

    Kimi k1.5 (arXiv:2501.12599), section 2.3.3. Zeros if all are equally long.

    Example: the lengths 100, 150 and 200, of which only the last is right, give 0, 0 and -0.5: the
    shortest would have had 0.5, and is wrong.
    """
    shortest, longest = min(lengths_G), max(lengths_G)
    if shortest == longest:
        return [0.0] * len(lengths_G)
    terms_G = [0.5 - (length - shortest) / (longest - shortest) for length in lengths_G]
    return [term if right else min(0.0, term) for term, right in zip(terms_G, right_G, strict=True)]


def _length_terms(group: Group) -> list[float]:
    """The length penalty of each member, among the members of the same agent: the parts in a game
    are not equally long.
    """
    agents_G = [trajectory.agent for trajectory in group.trajectories]
    terms = {
        part.trajectories[0].agent: iter(
            length_penalties(
                [trajectory.num_tokens for trajectory in part.trajectories],
                [succeeded(*pair) for pair in zip(part.trajectories, part.scores, strict=True)],
            )
        )
        for part in group.by_agent()
    }
    return [next(terms[agent]) for agent in agents_G]


def _add_terms(group: Group, terms_G: Sequence[float]) -> Group:
    """The group with a term added to each member's score. Terms change no verdict: an episode that
    had succeeded still has, also with a score below zero.
    """
    changed: list[Score] = []
    for played, score, term in zip(group.trajectories, group.scores, terms_G, strict=True):
        value = settled(score.value + term, scale_of((score.value, term)))
        changed.append(replace(score, value=value, success=succeeded(played, score)))
    return replace(group, scores=tuple(changed))


def _costs(groups: Sequence[Group], part: str) -> list[float]:
    found = [score.parts[part] for group in groups for score in group.scores if part in score.parts]
    if not found:
        there = sorted({name for group in groups for score in group.scores for name in score.parts})
        raise ConfigError(
            f"batch_processing.constraints: no score has a part {part!r}; "
            f"there are {', '.join(map(repr, there)) or 'none'}"
        )
    return found
