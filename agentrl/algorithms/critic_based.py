"""What algorithms with a critic have in common."""

from collections.abc import Sequence
from typing import Literal

from agentrl.algorithms.policy_loss import PolicyAlgorithm, PolicyLoss, scored
from agentrl.protocols import MemberAdvantage
from agentrl.trajectory import Group


class CriticBased(PolicyAlgorithm):
    """An algorithm whose advantages its `estimate` finds with a critic (`agentrl.protocols.ActorCritic`)."""

    class Config(PolicyLoss):
        """The policy's loss, and the end of a truncated episode."""

        truncated: Literal["bootstrap", "terminal"] = "bootstrap"
        """What is expected after the end of a truncated episode: what the critic says there, or nothing."""

    config: Config

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
