"""Direct preference optimisation of pairs that the policy has played.

Dimension suffixes: G members of a group, J trajectories of a batch, N its loss tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import pvariance
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from agentrl.algorithms.policy_loss import PolicyAlgorithm, PolicyLoss, scored
from agentrl.batch import TrainBatch
from agentrl.protocols.algorithm import AlgorithmOffers
from agentrl.tokens.arrays import FloatArray, above, constant, floats, ints
from agentrl.trajectory import Group

Pairing = Literal["best_worst", "all"]
"""The pairs of members that are compared: the best with the worst, or each with each."""
Labels = Literal["hard", "soft"]
"""The label of a pair: the better half is chosen for certain, or with the probability that the
rewards give it.
"""


@dataclass(frozen=True, slots=True)
class RankedPair:
    """Two trajectories by their numbers; `label` is the probability that the better one is
    preferred, above 0.5.
    """

    better: int
    worse: int
    label: float


def ranked_pairs(rewards_G: Sequence[float], which: Pairing, labels: Labels) -> list[RankedPair]:
    """The best member against the worst, or each against each; rewards that are equal but for
    rounding make no pair.

    Soft labels are those of Bradley and Terry: sigmoid(r_better - r_worse), for rewards that are
    its scores.
    """
    order_G = sorted(range(len(rewards_G)), key=lambda member: -rewards_G[member])
    couples = list(combinations(order_G, 2))
    if which == "best_worst":
        couples = [(order_G[0], rewards_G.index(min(rewards_G)))] if couples else []
    differing = [
        (better, worse) for better, worse in couples if above(rewards_G[better], rewards_G[worse])
    ]
    return [
        RankedPair(
            better,
            worse,
            1.0 if labels == "hard" else _sigmoid(rewards_G[better] - rewards_G[worse]),
        )
        for better, worse in differing
    ]


def batch_of_pairs(played: TrainBatch, pairs: Sequence[RankedPair]) -> TrainBatch:
    """A batch of pairs of a batch's trajectories, which are known by their numbers there.

    Each pair is a group of two trajectories, the better one first, whatever else these trajectories
    are paired with. Their advantages are the label, and minus the label.
    """
    halves_J = [number for pair in pairs for number in (pair.better, pair.worse)]
    signed_J = np.array([signed for pair in pairs for signed in (pair.label, -pair.label)])
    samples_J = [np.flatnonzero(played.trajectories_M == number) for number in halves_J]
    batch = played.ordered(np.concatenate(samples_J).tolist())
    trajectories_M = np.repeat(np.arange(len(halves_J)), [len(samples) for samples in samples_J])
    batch = replace(batch, trajectories_M=ints(trajectories_M), groups_M=ints(trajectories_M // 2))
    return replace(batch, advantages_N=floats(signed_J[batch.trajectories_N]))


class OnlineDpo(PolicyAlgorithm):
    """DPO (arXiv:2305.18290) on pairs that the policy itself has just played: OAIF
    (arXiv:2402.04792).

    The loss of a pair is -log sigmoid(m), with m = beta (log p(chosen) / q(chosen) - log
    p(rejected) / q(rejected)) over all sampled tokens of an episode, for the policy p and the
    reference q. Its gradient, equation 7, pushes the chosen episode up and the rejected one down,
    both with the weight beta sigmoid(-m), which is the advantage here: so a pair may lie in two
    micro-batches. Use it where only comparisons can be trusted, such as those of a reward model.

    With a soft label y, the loss is -y log sigmoid(m) - (1 - y) log sigmoid(-m), and the weight
    beta (y - sigmoid(m)).
    """

    class Config(PolicyLoss):
        """The strength of the reference, the labels, and the loss."""

        beta: Annotated[float, Field(gt=0)] = 0.1
        """Strength with which the policy is held to the reference: the smaller, the further it may
        move.
        """

        kl_reward: Literal[0] = 0
        """Always 0: `beta` holds the policy to its reference."""

        labels: Labels = "hard"
        """`hard`: the better episode of a pair is the chosen one. `soft`: it is with the
        probability sigmoid(difference of the rewards), as the model of Bradley and Terry says. Use
        it with a reward on that scale, as `reward_model` is: the loss then has its minimum where
        the policy is the reference times exp(reward / beta)."""

    config: Config

    @property
    def offers(self) -> AlgorithmOffers:
        """See `PolicyAlgorithm`: its advantages are the labels of pairs."""
        return replace(super().offers, uses_reference=True, compares_members=True, fixed_scale=True)

    def advantages(self, group: Group) -> Sequence[float]:
        """The label for the chosen member (1 if it is hard), minus the label for the rejected one,
        0 for the others; 0 for all if their rewards are equal.

        Raises:
            ValueError: a member has no score.
        """
        rewards_G = list(scored(group))
        advantages_G = [0.0] * len(rewards_G)
        for pair in ranked_pairs(rewards_G, "best_worst", self.config.labels):
            advantages_G[pair.better], advantages_G[pair.worse] = pair.label, -pair.label
        return advantages_G

    def spread(self, group: Group) -> float:
        """The variance of the rewards, which order the members (`AlgorithmOffers.spread`). 0 if
        there is no pair.
        """
        rewards_G = scored(group)
        return 0.0 if constant(rewards_G) else pvariance(rewards_G)

    def prepared(self, batch: TrainBatch) -> TrainBatch:
        """The batch with the weights of its pairs: 0 if one of the halves is too old to be trained
        on.
        """
        # Each token has its trajectory's label as its advantage, so the mean is the label.
        labels_J = _sum_by_trajectory(batch, batch.advantages_N) / np.maximum(
            1, batch.tokens_of_trajectories
        )
        moved_J = _sum_by_trajectory(batch, batch.rollout_logprobs_N - batch.reference_logprobs_N)
        groups_J, weights_J = batch.groups_of_trajectories, np.zeros(len(labels_J))
        for group in np.unique(groups_J):
            (chosen, rejected) = (
                np.flatnonzero((groups_J == group) & (np.sign(labels_J) == sign))
                for sign in (1, -1)
            )
            if len(chosen) and len(rejected):
                margin = self.config.beta * float(moved_J[chosen[0]] - moved_J[rejected[0]])
                weight = self.config.beta * (float(labels_J[chosen[0]]) - _sigmoid(margin))
                weights_J[chosen[0]], weights_J[rejected[0]] = weight, -weight
        return super().prepared(
            replace(batch, advantages_N=floats(weights_J[batch.trajectories_N]))
        )

    def normalizer(self, batch: TrainBatch) -> float:
        """The number of pairs, or the constant that is set."""
        if self.config.normalizer not in ("tokens", "trajectories"):
            return super().normalizer(batch)
        signs_J = _sum_by_trajectory(batch, batch.advantages_N)
        return float(max(1, int(np.count_nonzero(signs_J > 0))))


def _sum_by_trajectory(batch: TrainBatch, values_N: FloatArray) -> FloatArray:
    """The sum over each trajectory's loss tokens."""
    return floats(
        np.bincount(
            batch.trajectories_N, weights=values_N, minlength=len(batch.tokens_of_trajectories)
        )
    )


def _sigmoid(value: float) -> float:
    # 1 / (1 + exp(-value)) would overflow for large negative values.
    power = math.exp(-abs(value))
    return (1.0 if value > 0 else power) / (1 + power)
