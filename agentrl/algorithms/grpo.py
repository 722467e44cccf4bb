"""Group-relative policy optimisation and its relatives: GRPO, Dr. GRPO, RLOO, DAPO are settings of one class."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from agentrl.algorithms.advantages import Advantage, group_mean, group_std, leave_one_out
from agentrl.batch import TrainBatch
from agentrl.protocols import LossOutput, LossTokens, Settings
from agentrl.trajectory import Failed, Group

if TYPE_CHECKING:
    from torch import Tensor

_ADVANTAGES: Mapping[str, Advantage] = {
    "group_std": group_std,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
}


class Grpo:
    """An advantage over the group, and the clipped policy gradient with truncated importance weights.

    GRPO (arXiv:2402.03300) with DAPO's clip and token mean (arXiv:2503.14476) is the default. Dr. GRPO
    (arXiv:2503.20783) is `advantage: group_mean` and a number for `normalizer`. RLOO (arXiv:2402.14740) is
    `advantage: leave_one_out`.
    """

    class Config(Settings):
        """What to compare with, where to clip, what to divide by."""

        advantage: Literal["group_std", "group_mean", "leave_one_out"] = "group_std"
        """What a reward is compared with; see `agentrl.algorithms.advantages`."""

        clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
        """A token's ratio below 1 - clip_low gains nothing more from falling."""

        clip_high: Annotated[float, Field(ge=0)] = 0.28
        """A token's ratio above 1 + clip_high gains nothing more from rising."""

        dual_clip: Annotated[float, Field(gt=1)] | None = None
        """Bound of the loss where the advantage is negative, as a multiple of it; none by default."""

        importance_cap: Annotated[float, Field(gt=0)] | None = 2.0
        """Largest weight of the correction from the engine's distribution to the trainer's; none: no correction."""

        entropy_bonus: Annotated[float, Field(ge=0)] = 0.0
        """How much of the policy's entropy is subtracted from the loss: keeps it from settling too early."""

        normalizer: Literal["tokens"] | Annotated[float, Field(gt=0)] = "tokens"
        """What the summed token losses of a batch are divided by: its loss tokens, or a constant (Dr. GRPO: the
        trajectories of a batch times the most tokens a trajectory may have), which gives no length an advantage."""

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Grpo.Config()

    def advantages(self, group: Group) -> Sequence[float]:
        """One advantage per member.

        Raises:
            ValueError: a member has no score, or one that is not a finite number.
        """
        for trajectory, score in zip(group.trajectories, group.scores, strict=True):
            if isinstance(score.status, Failed):
                raise ValueError(
                    f"trajectory {trajectory.id!r} has no score ({score.status.layer}: {score.status.error}) and so "
                    "no advantage; filter failed members before asking for advantages"
                )
        return _ADVANTAGES[self.config.advantage](group.rewards_G)

    def loss(self, logprobs_N: "Tensor", tokens: LossTokens) -> LossOutput:
        """The clipped policy gradient of each token, and the entropy bonus."""
        from agentrl.algorithms.losses import negative_entropy, policy_gradient

        output = policy_gradient(
            logprobs_N,
            tokens,
            clip_low=self.config.clip_low,
            clip_high=self.config.clip_high,
            dual_clip=self.config.dual_clip,
            importance_cap=self.config.importance_cap,
        )
        if self.config.entropy_bonus == 0:
            return output
        return replace(output, loss_N=output.loss_N + self.config.entropy_bonus * negative_entropy(logprobs_N))

    def normalizer(self, batch: TrainBatch) -> float:
        """The batch's loss tokens, or the constant."""
        return float(batch.num_loss_tokens) if self.config.normalizer == "tokens" else self.config.normalizer
