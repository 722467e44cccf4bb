"""REINFORCE, and its relatives that normalise advantages over the batch: REINFORCE++ and ReBN."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from agentrl.algorithms.advantages import compared, compared_by_turn, normalised, whitened
from agentrl.algorithms.grpo import discounted
from agentrl.algorithms.policy_loss import PolicyAlgorithm, PolicyLoss, scored
from agentrl.batch import TrainBatch
from agentrl.protocols.algorithm import AlgorithmOffers, MemberAdvantage
from agentrl.trajectory import Group


class Reinforce(PolicyAlgorithm):
    """The return itself as the advantage: Williams, "Simple statistical gradient-following
    algorithms" (1992).

    Needs neither a group nor a critic. Its variance is large: use it to compare with, or with
    `group_size` 1.
    """

    class Config(PolicyLoss):
        """The credit of turns, and the loss."""

        gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
        """Discount of a turn's reward for each turn before it."""

        reward_to_go: bool = True
        """Credit each turn only with what is earned from it on."""

    config: Config

    @property
    def offers(self) -> AlgorithmOffers:
        """See `PolicyAlgorithm`."""
        return replace(super().offers, credits_turns=self.config.reward_to_go)

    def advantages(self, group: Group) -> Sequence[MemberAdvantage]:
        """The return to go of each turn, or each member's return.

        Raises:
            ValueError: a member has no score, or one that is not a finite number.
        """
        return _credit_turns(group, "none", self.config)


class ReinforcePlusPlus(Reinforce):
    """REINFORCE++ (arXiv:2501.03262): returns normalised over the whole batch, with the KL in the
    reward.

    With `group_baseline`, the group's mean is subtracted first (its section 3.3). Normalisation is
    biased: a batch's spread depends on its own samples. Where the paper counts tokens, `statistics`
    says what is counted here.
    """

    class Config(Reinforce.Config):
        """The baseline, and the loss."""

        reward_to_go: bool = False
        """Credit each turn only with what is earned from it on."""

        group_baseline: bool = False
        """Subtract the mean of the group before normalising."""

        statistics: Literal["trajectories", "tokens"] = "trajectories"
        """The unit of the mean and the standard deviation of a batch: its trajectories (with
        `reward_to_go` their turns), each counted once; or its loss tokens, as in the paper and in
        verl, where long episodes count more."""

    config: Config

    @property
    def offers(self) -> AlgorithmOffers:
        """See `PolicyAlgorithm`."""
        return replace(super().offers, compares_members=self.config.group_baseline)

    def advantages(self, group: Group) -> Sequence[MemberAdvantage]:
        """See `Reinforce`."""
        return _credit_turns(
            group, "group_mean" if self.config.group_baseline else "none", self.config
        )

    def normalized(
        self, advantages: Sequence[Sequence[MemberAdvantage]]
    ) -> Sequence[Sequence[MemberAdvantage]]:
        """The advantages of a batch, normalised together (`AlgorithmOffers.normalized`)."""
        if self.config.statistics == "tokens":
            return advantages  # `prepared` knows how many tokens each has
        return normalised(advantages, [""] * len(advantages))

    def prepared(self, batch: TrainBatch) -> TrainBatch:
        """The batch to train on (`AlgorithmOffers.prepared`)."""
        batch = super().prepared(batch)
        if self.config.statistics == "trajectories":
            return batch
        return replace(batch, advantages_N=whitened(batch.advantages_N))


class ReturnBatchNorm(ReinforcePlusPlus):
    """REINFORCE with return batch normalisation (ReBN): GEM (arXiv:2510.01051), section 3.

    The discounted return to go of every turn, normalised over all turns of the batch. Works with
    any `group_size`.
    """

    class Config(ReinforcePlusPlus.Config):
        """The discount, and the loss."""

        gamma: Annotated[float, Field(ge=0, le=1)] = 0.9
        """Discount of a turn's reward for each turn before it."""

        reward_to_go: bool = True
        """Credit each turn only with what is earned from it on."""


def _credit_turns(
    group: Group, with_what: Literal["none", "group_mean"], config: Reinforce.Config
) -> Sequence[MemberAdvantage]:
    rewards_G = scored(group)
    if config.reward_to_go:
        return compared_by_turn(group.turn_rewards_G, with_what, config.gamma, "episode")
    return compared(rewards_G if config.gamma == 1 else discounted(group, config.gamma), with_what)
