"""On-policy distillation: the policy learns to sample what a teacher would have sampled."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from agentrl.algorithms.advantages import leave_one_out
from agentrl.algorithms.policy_loss import PolicyAlgorithm, PolicyLoss, scored
from agentrl.batch import TrainBatch
from agentrl.protocols.algorithm import AlgorithmOffers
from agentrl.tokens.arrays import floats
from agentrl.trajectory import Group


class DistillLoss(PolicyLoss):
    """The weight of the reward, and the loss."""

    reward_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the episode's reward, against the other members of the group, beside the teacher.
    """

    kl_reward: Literal[0] = 0
    """Always 0: the KL to the teacher is what is learned, by token."""


class Distill(PolicyAlgorithm):
    """The reverse KL to a teacher, token by token, on the policy's own episodes: GKD
    (arXiv:2306.13649), MiniLLM (arXiv:2306.08543).

    The advantage of a token is log q - log p, for the teacher q and the policy p. So each token is
    told by itself whether the teacher would have written it there: much denser than a reward, and
    without the teacher ever playing. Later tokens' KL is not credited to earlier ones. The section
    `reference` configures how the teacher is computed; in `recipe: distill`, an engine computes it.
    """

    class Config(DistillLoss):
        """The teacher, the weight of the reward, and the loss."""

        teacher: Path | None = None
        """Folder of the teacher, with the same tokenizer; by default the model that the run began
        with.
        """

    config: Config

    @property
    def offers(self) -> AlgorithmOffers:
        """See `PolicyAlgorithm`. Divided by their own spread, the advantages would lose
        `reward_weight`; what the teacher says compares nothing.
        """
        return replace(
            super().offers,
            uses_reference=True,
            reference_model=self.config.teacher,
            compares_members=self.config.reward_weight > 0,
            fixed_scale=True,
            beyond_rewards="teacher",
        )

    def advantages(self, group: Group) -> Sequence[float]:
        """The weighted advantage of each member's reward, without the teacher.

        Raises:
            ValueError: a member has no score.
        """
        return [self.config.reward_weight * advantage for advantage in leave_one_out(scored(group))]

    def prepared(self, batch: TrainBatch) -> TrainBatch:
        """The batch with the teacher's verdict on each token added to its advantages."""
        verdict_N = batch.reference_logprobs_N - batch.rollout_logprobs_N
        return super().prepared(replace(batch, advantages_N=floats(batch.advantages_N + verdict_N)))
