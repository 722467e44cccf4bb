"""Supervised fine-tuning as an algorithm: trajectories are worth imitating, all or the best."""

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from agentrl.algorithms.policy_loss import scored
from agentrl.batch import TrainBatch
from agentrl.protocols.algorithm import AlgorithmOffers, LossOutput, LossTokens
from agentrl.settings.base import Settings
from agentrl.tokens.arrays import above, at_least, scale_of
from agentrl.trajectory import Group, succeeded

if TYPE_CHECKING:
    from torch import Tensor


class Sft:
    """Advantage 1, cross entropy, mean over tokens."""

    offers: ClassVar[AlgorithmOffers] = AlgorithmOffers(fixed_scale=True)
    """Its advantages are the weights of the cross entropy."""

    def advantages(self, group: Group) -> Sequence[float]:
        """1 for every member."""
        return [1.0] * len(group.trajectories)

    def loss(self, logprobs_N: "Tensor", tokens: LossTokens) -> LossOutput:
        """Cross entropy of each token."""
        from agentrl.algorithms.losses import cross_entropy

        return cross_entropy(logprobs_N, tokens)

    def normalizer(self, batch: TrainBatch) -> float:
        """The number of the batch's loss tokens."""
        return float(batch.num_loss_tokens)


class RejectionSampling(Sft):
    """Imitate the policy's own best episodes: RAFT (arXiv:2304.06767), STaR (arXiv:2203.14465).

    Bad episodes teach nothing, so it is slower than policy gradients and hard to break: a first
    step where a model is rarely right, or where rewards can be gamed. The episodes are the policy's
    own, so they are imitated as they were sampled, at `rollout.sampling.temperature`.
    """

    class Config(Settings):
        """The episodes that are imitated."""

        keep: Literal["success", "best", "above_mean"] = "success"
        """Those that succeeded, the best of each group (all that are equally good), or those above
        the group's mean.
        """

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or RejectionSampling.Config()

    def advantages(self, group: Group) -> Sequence[float]:
        """1 for the members that are imitated, 0 for the others.

        Raises:
            ValueError: a member has no score.
        """
        rewards_G = scored(group)
        if self.config.keep == "success":
            verdicts_G = map(succeeded, group.trajectories, group.scores)
            return [float(verdict is True) for verdict in verdicts_G]
        if self.config.keep == "best":
            best = max(rewards_G)
            return [float(at_least(reward, best)) for reward in rewards_G]
        mean, scale = fmean(rewards_G), scale_of(rewards_G)
        return [float(above(reward, mean, scale)) for reward in rewards_G]

    def normalizer(self, batch: TrainBatch) -> float:
        """The number of tokens that are imitated; 1 if there are none, and nothing changes."""
        return float(max(1, int(np.count_nonzero(batch.advantages_N))))
