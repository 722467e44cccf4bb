"""The common parts of algorithms with a critic."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from agentrl.algorithms.policy_loss import PolicyAlgorithm, PolicyLoss, scored
from agentrl.batch import TrainBatch
from agentrl.protocols.algorithm import AlgorithmOffers, MemberAdvantage
from agentrl.tokens.arrays import FloatArray
from agentrl.trajectory import Group


class CriticBased(PolicyAlgorithm):
    """An algorithm whose advantages its `estimate` finds with a critic
    (`agentrl.protocols.ActorCritic`).
    """

    class Config(PolicyLoss):
        """The policy's loss, and the end of a truncated episode."""

        truncated: Literal["bootstrap", "terminal"] = "bootstrap"
        """The expected return after the end of a truncated episode: the critic's value there, or
        nothing.
        """

    config: Config

    @property
    def offers(self) -> AlgorithmOffers:
        """See `PolicyAlgorithm`: `estimate` starts from the rewards of tokens."""
        return replace(super().offers, charges_rewards=False)

    def charged(self, batch: TrainBatch, cost_N: FloatArray) -> TrainBatch:
        """See `PolicyAlgorithm`: what advantages the critic finds."""
        return batch

    @property
    def bootstraps(self) -> bool:
        """See `ActorCritic`."""
        return self.config.truncated == "bootstrap"

    def advantages(self, group: Group) -> Sequence[MemberAdvantage]:
        """Zeros: `estimate` asks the critic.

        Raises:
            ValueError: a member has no score.
        """
        return [0.0] * len(scored(group))
