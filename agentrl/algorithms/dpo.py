"""Online direct preference optimisation: the best and the worst episode of each group are a pair."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
from pydantic import Field

from agentrl.algorithms.policy_loss import PolicyAlgorithm, PolicyLoss, scored
from agentrl.arrays import FloatArray, floats
from agentrl.batch import TrainBatch
from agentrl.trajectory import Group


class OnlineDpo(PolicyAlgorithm):
    """DPO (arXiv:2305.18290) on pairs that the policy itself has just played: OAIF (arXiv:2402.04792).

    The loss of a pair is -log sigmoid(m), with m = beta (log p(chosen) / q(chosen) - log p(rejected) / q(rejected))
    over all sampled tokens of an episode, for the policy p and the reference q. Its gradient, equation 7, pushes the
    chosen episode up and the rejected one down, both with the weight beta sigmoid(-m), which is the advantage here: so
    a pair may lie in two micro-batches. Use it where only comparisons can be trusted, such as those of a reward model.
    """

    class Config(PolicyLoss):
        """The strength of the reference, and the loss."""

        beta: Annotated[float, Field(gt=0)] = 0.1
        """How strongly the policy is held to the reference: the smaller, the further it may move."""

    config: Config
    compares_members = True
    """See `Algorithm`."""

    @property
    def uses_reference(self) -> bool:
        """See `Algorithm`."""
        return True

    def advantages(self, group: Group) -> Sequence[float]:
        """1 for the chosen member, -1 for the rejected one, 0 for the others, and for all if their rewards are equal.

        Raises:
            ValueError: a member has no score.
        """
        rewards_G = list(scored(group))
        advantages_G = [0.0] * len(rewards_G)
        if len(set(rewards_G)) > 1:
            advantages_G[rewards_G.index(max(rewards_G))] = 1.0
            advantages_G[rewards_G.index(min(rewards_G))] = -1.0
        return advantages_G

    def prepared(self, batch: TrainBatch) -> TrainBatch:
        """See `PreparesBatch`: each pair gets its weight, if none of its halves is too old to be trained on."""
        signs_J = np.sign(_of_trajectories(batch, batch.advantages_N))
        moved_J = _of_trajectories(batch, batch.rollout_logprobs_N - batch.reference_logprobs_N)
        groups_J, weights_J = batch.groups_of_trajectories, np.zeros(len(signs_J))
        for group in np.unique(groups_J):
            (chosen, rejected) = (np.flatnonzero((groups_J == group) & (signs_J == sign)) for sign in (1, -1))
            if len(chosen) and len(rejected):
                margin = self.config.beta * float(moved_J[chosen[0]] - moved_J[rejected[0]])
                weight = self.config.beta / (1 + math.exp(min(margin, 500.0)))
                weights_J[chosen[0]], weights_J[rejected[0]] = weight, -weight
        return super().prepared(replace(batch, advantages_N=floats(weights_J[batch.trajectories_N])))

    def normalizer(self, batch: TrainBatch) -> float:
        """The number of pairs, or the constant that is set."""
        if self.config.normalizer not in ("tokens", "trajectories"):
            return super().normalizer(batch)
        signs_J = _of_trajectories(batch, batch.advantages_N)
        return float(max(1, int(np.count_nonzero(signs_J > 0))))


def _of_trajectories(batch: TrainBatch, values_N: FloatArray) -> FloatArray:
    """The sum over each trajectory's loss tokens."""
    return floats(np.bincount(batch.trajectories_N, weights=values_N, minlength=len(batch.tokens_of_trajectories)))
