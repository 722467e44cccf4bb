"""Supervised fine-tuning as an algorithm: every trajectory is worth imitating."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentrl.batch import TrainBatch
from agentrl.protocols import LossOutput, LossTokens
from agentrl.trajectory import Group

if TYPE_CHECKING:
    from torch import Tensor


class Sft:
    """Advantage 1, cross entropy, mean over tokens."""

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
