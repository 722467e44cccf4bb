"""Group-in-group policy optimisation: turns are compared with other turns from the same state."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Self

from pydantic import Field, model_validator

from agentrl.algorithms.advantages import compared_by_state
from agentrl.algorithms.grpo import Grpo
from agentrl.protocols.algorithm import AlgorithmOffers, MemberAdvantage
from agentrl.trajectory import Group


class Gigpo(Grpo):
    """GiGPO (arXiv:2505.10978): the episode's advantage plus that of each turn among turns from the
    same state.

    States are the same where environments say so (`info["state_key"]`), or else where observations
    are. It needs environments that come back to the same states, such as mazes, web shops and
    households.
    """

    class Config(Grpo.Config):
        """As `grpo`, and the weight and the discount of the comparison by state."""

        step_weight: Annotated[float, Field(ge=0)] = 1.0
        """Weight of the advantage among turns from the same state, equation 9."""

        step_gamma: Annotated[float, Field(ge=0, le=1)] = 0.95
        """Discount of these turns' returns. With 1, ways of different lengths to the same reward
        are equally good.
        """

        @model_validator(mode="after")
        def _turns_count_once(self) -> Self:
            if self.credits_trees:
                raise ValueError(
                    f"advantage={self.advantage} compares states by playing on from them, and gigpo"
                    " by meeting them again, where shared turns would count twice: choose"
                    " algorithm=grpo, or another advantage"
                )
            return self

    config: Config

    @property
    def offers(self) -> AlgorithmOffers:
        """See `PolicyAlgorithm`."""
        offers = super().offers
        return replace(offers, credits_turns=offers.credits_turns or self.config.step_weight > 0)

    def advantages(self, group: Group) -> Sequence[MemberAdvantage]:
        """One advantage per turn.

        Raises:
            ValueError: a member has no score, or one that is not a finite number.
        """
        states_G = [
            [turn.state or (trajectory.id, number) for number, turn in enumerate(trajectory.turns)]
            for trajectory in group.trajectories
        ]
        own = self.config
        by_std = own.advantage == "group_std"
        steps_G = compared_by_state(
            group.turn_rewards_G, states_G, own.step_gamma, by_std=by_std, deviation=own.std
        )
        advantages_G: list[Sequence[float]] = []
        for episode, steps in zip(super().advantages(group), steps_G, strict=True):
            # An advantage of the whole episode counts for each of its turns.
            wholes = [episode] * len(steps) if isinstance(episode, float | int) else episode
            pairs = zip(wholes, steps, strict=True)
            advantages_G.append([whole + own.step_weight * step for whole, step in pairs])
        return advantages_G
