"""Supervised fine-tuning as an algorithm: every trajectory is worth imitating."""

from collections.abc import Sequence

from torch import Tensor

from agentrl.algorithms.losses import cross_entropy
from agentrl.batch import TrainBatch
from agentrl.protocols import LossOutput, LossTokens
from agentrl.trajectory import Group


class Sft:
    """Advantage 1, cross entropy, mean over tokens."""

    def advantages(self, group: Group) -> Sequence[float]:
        """1 for every member."""
        return [1.0] * len(group.trajectories)

    def loss(self, logprobs_N: Tensor, tokens: LossTokens) -> LossOutput:
        """Cross entropy of each token."""
        return cross_entropy(logprobs_N, tokens)

    def normalizer(self, batch: TrainBatch) -> float:
        """The batch's loss tokens."""
        return float(batch.num_loss_tokens)
