"""Proximal policy optimisation: advantages from a critic that is trained along with the policy."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from agentrl.algorithms.advantages import generalized, whitened
from agentrl.algorithms.policy_loss import PolicyLoss, scored
from agentrl.arrays import FloatArray
from agentrl.batch import TrainBatch
from agentrl.protocols import Estimate, LossOutput, LossTokens
from agentrl.trajectory import Group

if TYPE_CHECKING:
    from torch import Tensor


class Ppo:
    """PPO (arXiv:1707.06347) with generalized advantage estimation over the tokens of each sample.

    A critic estimates the expected return before each token; a token's advantage is the rise in expected return that it
    causes. So a group may be a single episode. The section `critic` has the critic's settings.
    """

    class Config(PolicyLoss):
        """How advantages are estimated, and the losses."""

        lam: Annotated[float, Field(ge=0, le=1)] = 1.0
        """Lambda: 1 uses the reward itself, which the critic cannot bias; 0 the critic's value one token later."""

        whiten: bool = True
        """Give the advantages of a batch the mean 0 and the standard deviation 1. Biased by 0.26 of the gradient with 2
        loss tokens in a batch, by 0.005 with 128."""

        value_clip: Annotated[float, Field(gt=0)] | None = None
        """How far a value may move from the old one before the loss stops pushing it; none: no limit."""

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Ppo.Config()

    @property
    def uses_reference(self) -> bool:
        """See `Algorithm`."""
        return self.config.kl > 0

    def advantages(self, group: Group) -> Sequence[float]:
        """The rewards, which `estimate` turns into advantages.

        Raises:
            ValueError: a member has no score.
        """
        return scored(group)

    def estimate(self, batch: TrainBatch, values_N: FloatArray) -> Estimate:
        """See `ActorCritic`."""
        advantages_N = generalized(batch, values_N, self.config.lam)
        return Estimate(whitened(advantages_N) if self.config.whiten else advantages_N, advantages_N + values_N)

    def loss(self, logprobs_N: "Tensor", tokens: LossTokens) -> LossOutput:
        """See `PolicyLoss.losses`."""
        return self.config.losses(logprobs_N, tokens)

    def value_loss(self, values_N: "Tensor", tokens: LossTokens) -> LossOutput:
        """See `agentrl.algorithms.losses.value_loss`."""
        from agentrl.algorithms.losses import value_loss

        return value_loss(values_N, tokens, self.config.value_clip)

    def normalizer(self, batch: TrainBatch) -> float:
        """See `PolicyLoss.divisor`."""
        return self.config.divisor(batch)
