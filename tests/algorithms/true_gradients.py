"""The gradient that a step should follow on average, from single paths of a problem: the policy
gradient theorem.

Nothing here knows of groups, baselines, batches or losses. A term of the objective gives each turn
of each path a credit, and the gradient is the sum over paths of probability * credit * gradient of
the turn's logprob.

Dimension suffixes: as in `agentrl/oracles/estimators.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from agentrl.algorithms.dpo import OnlineDpo
from agentrl.algorithms.sft import RejectionSampling
from agentrl.oracles.exact_steps import ExactBatch, ExactShare, ExactStep
from agentrl.trajectory import Group, Trajectory


@dataclass(frozen=True, slots=True)
class Policies:
    """The logits of the policy that is trained, of the one that played, and of the reference."""

    trained_P: Tensor
    played_P: Tensor
    reference_P: Tensor


def wanted(step: ExactStep, policies: Policies, batches: Sequence[ExactBatch]) -> Tensor:
    """The gradient that the step should follow on average."""
    if isinstance(step.algorithm, RejectionSampling):
        return _of_imitation(step, policies, batches)
    terms = [
        share.groups
        * share.members
        / step.kept(share, policies.played_P)
        * true_gradient(step, policies, share)
        for share in step.shares
    ]
    if isinstance(step.algorithm, OnlineDpo):
        terms.append(_of_pairs(step, step.algorithm.config, policies, batches))
    return torch.stack(terms).sum(0)


def true_gradient(step: ExactStep, policies: Policies, share: ExactShare) -> Tensor:
    """What one trajectory of a share adds to the gradient on average, by the settings of its
    algorithm.
    """
    own: Any = step.by_env.get(share.env, step.algorithm).config  # type: ignore[attr-defined]
    field = _Field(step, policies, share)
    gamma = getattr(own, "gamma", 1.0)
    by_turn = hasattr(step.algorithm, "estimate") or getattr(own, "reward_to_go", False)
    weight = getattr(own, "reward_weight", 1.0) * field.baseline_factor(own)
    if isinstance(step.algorithm, OnlineDpo):
        weight = 0.0
    cost = getattr(own, "kl_reward", 0.0)
    earned = [
        [
            reward - cost * distance
            for reward, distance in zip_longest(rewards, moved, fillvalue=0.0)
        ]
        for rewards, moved in zip(field.rewards, field.moved(policies.played_P), strict=True)
    ]
    total_P = weight * field.of([_returns(rewards, gamma, by_turn) for rewards in earned])
    if hasattr(own, "teacher"):
        total_P -= field.of(field.moved(policies.played_P))
    if kl := getattr(own, "kl", 0.0):
        total_P -= kl * field.of(field.moved(policies.trained_P))
    if bonus := getattr(own, "entropy_bonus", 0.0):
        total_P += bonus * field.of_entropy()
    return total_P


def spans_of(step: ExactStep, policies: Policies) -> tuple[float, float]:
    """How far returns from a turn on can differ, and how far terms of the reference can."""
    returns, costs = [0.0], [0.0]
    for share in step.shares:
        field, algorithm = _Field(step, policies, share), step.by_env.get(share.env, step.algorithm)
        own: Any = algorithm.config  # type: ignore[attr-defined]
        weight = getattr(own, "kl_reward", 0.0) + hasattr(own, "teacher")
        for gamma in {1.0, getattr(own, "gamma", 1.0), getattr(own, "step_gamma", 1.0)}:
            returns += [credit for rewards in field.rewards for credit in _to_go(rewards, gamma)]
        for moved in field.moved(policies.played_P):
            if np.isfinite(moved).all():
                costs += [weight * cost for cost in _to_go(moved, 1.0)]
    return max(returns) - min(returns), max(costs) - min(costs)


def _to_go(rewards: Sequence[float], gamma: float) -> list[float]:
    return [
        sum(gamma**k * later for k, later in enumerate(rewards[t:])) for t in range(len(rewards))
    ]


def _returns(rewards: Sequence[float], gamma: float, by_turn: bool) -> list[float]:
    togo = _to_go(rewards, gamma)
    return togo[: len(rewards)] if by_turn else [togo[0]] * len(rewards)


def _of_pairs(
    step: ExactStep, own: OnlineDpo.Config, policies: Policies, batches: Sequence[ExactBatch]
) -> Tensor:
    """The gradient of the loss of pairs itself (arXiv:2305.18290, equation 7), negated."""
    own_P = policies.trained_P.clone().requires_grad_()
    moved_W = step.oracle.logprobs(own_P) - step.oracle.logprobs(policies.reference_P)
    total = own_P.sum() * 0
    for one in batches:
        for group in one.groups:
            rewards = list(group.rewards_G)
            best, worst = rewards.index(max(rewards)), rewards.index(min(rewards))
            if rewards[best] - rewards[worst] < 1e-9:
                continue
            better, worse = (
                sum(moved_W[_firsts(group.trajectories[number])]) for number in (best, worst)
            )
            margin = own.beta * (better - worse)
            sure = (
                torch.sigmoid(torch.tensor(rewards[best] - rewards[worst]))
                if own.labels == "soft"
                else 1.0
            )
            total = total + one.chance * (
                sure * logsigmoid(margin) + (1 - sure) * logsigmoid(-margin)
            )
    return torch.autograd.grad(total, own_P)[0]


def _of_imitation(step: ExactStep, policies: Policies, batches: Sequence[ExactBatch]) -> Tensor:
    """The gradient of the mean logprob of the tokens of those episodes that are the best by the
    setting `keep`.
    """
    own_P = policies.trained_P.clone().requires_grad_()
    logprobs_W = step.oracle.logprobs(own_P)
    total = own_P.sum() * 0
    for one in batches:
        kept = [t for group in one.groups for t in _imitated(step.algorithm.config.keep, group)]  # type: ignore[attr-defined]
        tokens = sum(trajectory.num_tokens for trajectory in kept)
        for trajectory in kept:
            total = total + one.chance / tokens * logprobs_W[_firsts(trajectory)].sum()
    return torch.autograd.grad(total, own_P)[0]


def _imitated(keep: str, group: Group) -> list[Trajectory]:
    rewards = group.rewards_G
    told = {
        "success": [trajectory.success for trajectory in group.trajectories],
        "best": [reward == max(rewards) for reward in rewards],
        "above_mean": [reward > sum(rewards) / len(rewards) + 1e-9 for reward in rewards],
    }[keep]
    return [trajectory for trajectory, is_so in zip(group.trajectories, told, strict=True) if is_so]


def _firsts(trajectory: Trajectory) -> list[int]:
    """The tokens that decide, one of each turn; the others are certain."""
    return [int(turn.completion.token_ids[0]) for turn in trajectory.turns]


class _Field:
    """Gradients over the paths of a share."""

    def __init__(self, step: ExactStep, policies: Policies, share: ExactShare) -> None:
        oracle = step.oracle
        self._policies, self._oracle, self._share = policies, oracle, share
        numbers = step.paths[share.env]
        self.paths = [oracle.paths[number] for number in numbers]
        played = oracle.group(numbers, policies.trained_P).trajectories
        self.tokens = [_firsts(trajectory) for trajectory in played]
        _, values = oracle.values(policies.trained_P)
        bootstraps = getattr(step.algorithm, "bootstraps", False)
        self.rewards = []
        for one, path in zip(played, self.paths, strict=True):
            after = [float(values[path.end])] if bootstraps and path.end is not None else []
            self.rewards.append([*(turn.reward for turn in one.turns), *after])
        self._first = numbers.start

    def baseline_factor(self, own: Any) -> float:
        """What a baseline that contains the member itself leaves of the gradient."""
        has_own = getattr(own, "advantage", None) == "group_mean" or getattr(
            own, "group_baseline", False
        )
        return (self._share.members - 1) / self._share.members if has_own else 1.0

    def moved(self, logits_P: Tensor) -> list[list[float]]:
        """log(policy / reference) of each turn of each path."""
        policy_W = self._oracle.logprobs(logits_P)
        moved_W = policy_W - self._oracle.logprobs(self._policies.reference_P)
        return [[float(moved_W[token]) for token in tokens] for tokens in self.tokens]

    def of(self, credited: Sequence[Sequence[float]]) -> Tensor:
        """The sum of probability * credit * gradient of the turn's logprob."""
        own_P = self._policies.trained_P.clone().requires_grad_()
        logprobs_W = self._oracle.logprobs(own_P)
        chances = self._chances(self._policies.trained_P)
        weighed = [
            chance * credit * logprobs_W[token]
            for chance, tokens, of_path in zip(chances, self.tokens, credited, strict=True)
            for token, credit in zip(tokens, of_path, strict=False)
            if chance > 0
        ]
        return torch.autograd.grad(torch.stack(weighed).sum(), own_P)[0]

    def of_entropy(self) -> Tensor:
        """The gradient of the entropy in the states that were visited."""
        own_P = self._policies.trained_P.clone().requires_grad_()
        entropies_W = self._oracle.entropies(own_P)
        chances = self._chances(self._policies.played_P)
        weighed = [
            chance * entropies_W[t]
            for chance, own in zip(chances, self.tokens, strict=True)
            for t in own
        ]
        return torch.autograd.grad(torch.stack(weighed).sum(), own_P)[0]

    def _chances(self, logits_P: Tensor) -> list[float]:
        return self._oracle.probabilities(logits_P)[
            self._first : self._first + len(self.paths)
        ].tolist()
