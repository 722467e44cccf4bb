"""Group-relative policy optimisation and its relatives: GRPO, Dr. GRPO, RLOO, DAPO are settings of
one class.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from math import fsum
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from agentrl.algorithms.advantages import (
    Deviation,
    compared,
    compared_by_turn,
    numbers_in,
    returns_to_go,
)
from agentrl.algorithms.branches import branch_advantages, tree_advantages
from agentrl.algorithms.policy_loss import PolicyAlgorithm, PolicyLoss, scored
from agentrl.protocols.algorithm import AlgorithmOffers, MemberAdvantage
from agentrl.trajectory import Group

Comparing = Literal["group_std", "group_mean", "leave_one_out", "branch", "tree"]
"""What the reward of an episode is compared with."""


class Grpo(PolicyAlgorithm):
    """An advantage over the group, and the clipped policy gradient with truncated importance
    weights.

    GRPO (arXiv:2402.03300) with DAPO's clip and token mean (arXiv:2503.14476) is the default. Dr.
    GRPO (arXiv:2503.20783) is `advantage: group_mean` and a number for `normalizer`. RLOO
    (arXiv:2402.14740) is `advantage: leave_one_out`. With `reward_to_go`, each turn has its own
    advantage.
    """

    class Config(PolicyLoss):
        """The baseline of the advantages, and the loss."""

        advantage: Comparing = "group_std"
        """The comparison of a reward; see `agentrl.algorithms.advantages`. `group_std` is biased,
        whatever the batch size: tasks count by 1 / spread of their rewards (0.07 to 0.17 of the
        gradient). The next two are not biased. With `reward_to_go` the spread is that of the
        group's turns. The last two give each turn an advantage of its own, from episodes that have
        left others (`rollout.branches`): `branch` by what the state is worth, not biased, and
        `tree` as Tree-GRPO, which is."""

        std: Deviation = "population"
        """The standard deviation of `group_std`, of the numbers of a group: with `population` of n
        numbers the sum of squares is divided by n, with `sample` by n - 1, as TRL and verl do.
        Groups of 8 then have advantages that are smaller by 6 %. DeepSeekMath does not say which.
        """

        gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
        """Discount of a turn's reward for each turn before it. Below 1, the gradient follows what
        the discounted return says at every turn, which is not the gradient of the reward."""

        reward_to_go: bool = False
        """Credit each turn only with what is earned from it on, and not with what was earned
        before.
        """

        baseline: Literal["episode", "turn"] = "episode"
        """With `reward_to_go`, what a turn's return is compared with: whole returns of the group,
        or the group's returns from turns with the same number (0 where an episode was over by
        then)."""

        @model_validator(mode="after")
        def _something_is_divided_by_it(self) -> Self:
            if self.std == "sample" and self.advantage not in ("group_std", "tree"):
                raise ValueError(
                    "std=sample is the standard deviation that advantage=group_std divides by, and"
                    f" {self.advantage} divides by none: leave it out"
                )
            return self

        @model_validator(mode="after")
        def _trees_have_credit_of_their_own(self) -> Self:
            set_too = [
                name
                for name, set_ in (
                    ("gamma", self.gamma != 1),
                    ("reward_to_go", self.reward_to_go),
                    ("kl_reward", self.kl_reward > 0),
                )
                if set_
            ]
            if set_too and self.credits_trees:
                raise ValueError(
                    f"advantage={self.advantage} compares whole returns of episodes that share"
                    f" turns, and knows no {' and no '.join(set_too)}: leave it out (`kl` is in the"
                    " loss)"
                )
            return self

        @property
        def credits_trees(self) -> bool:
            """True if the advantages are those of episodes that have left others."""
            return self.advantage in ("branch", "tree")

    config: Config

    @property
    def offers(self) -> AlgorithmOffers:
        """See `PolicyAlgorithm`."""
        own = self.config
        return replace(
            super().offers,
            compares_members=True,
            credits_turns=own.reward_to_go or own.credits_trees,
            credits_trees=own.credits_trees,
        )

    def advantages(self, group: Group) -> Sequence[MemberAdvantage]:
        """One advantage per member; with `reward_to_go`, or in trees, one per turn.

        Raises:
            ValueError: a member has no score, or one that is not a finite number; or it has left
                an episode that is not in the group.
        """
        own, rewards_G = self.config, scored(group)
        if own.advantage == "branch":
            return branch_advantages(group)
        if own.advantage == "tree":
            return tree_advantages(group, deviation=own.std)
        if own.reward_to_go:
            return compared_by_turn(
                group.turn_rewards_G, own.advantage, own.gamma, own.baseline, own.std
            )
        returns_G = rewards_G if own.gamma == 1 else discounted(group, own.gamma)
        return compared(returns_G, own.advantage, deviation=own.std)

    def spread(self, group: Group) -> float:
        """The mean square of the advantages before they are divided (`AlgorithmOffers.spread`)."""
        if self.config.credits_trees:
            own = self.config.advantage == "branch"
            of_turns = branch_advantages(group) if own else tree_advantages(group, by_std=False)
            found = numbers_in(of_turns)
            return fsum(a * a for a in found) / max(1, len(found))
        undivided = copy(self)
        undivided.config = self.config.model_copy(update={"advantage": "group_mean"})
        found = numbers_in(undivided.advantages(group))
        return fsum(a * a for a in found) / max(1, len(found))


class Rloo(Grpo):
    """REINFORCE with a leave-one-out baseline: "Back to Basics" (arXiv:2402.14740), section 3.3.

    An unbiased estimate of the gradient of the mean reward with a constant `normalizer`, for any
    number of members.
    """

    class Config(Grpo.Config):
        """As `grpo`, with the baseline of the other members."""

        advantage: Comparing = "leave_one_out"
        """The comparison of a reward."""


def discounted(group: Group, gamma: float) -> list[float]:
    """The discounted return of each member at its first turn."""
    return [
        returns_to_go(rewards, gamma)[0] if rewards else 0.0 for rewards in group.turn_rewards_G
    ]
