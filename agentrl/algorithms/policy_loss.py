"""Shared by all policy gradients: the check for missing scores, and the clipped token loss with its extra terms."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from agentrl.batch import TrainBatch
from agentrl.protocols import LossOutput, LossTokens, Settings
from agentrl.trajectory import Failed, Group

if TYPE_CHECKING:
    from torch import Tensor


class PolicyLoss(Settings):
    """Clipping, extra terms and divisor of the loss."""

    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """A token's ratio below 1 - clip_low gains nothing more from falling."""

    clip_high: Annotated[float, Field(ge=0)] = 0.28
    """A token's ratio above 1 + clip_high gains nothing more from rising."""

    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound of the loss for a negative advantage, as a multiple of the advantage; none by default."""

    importance_cap: Annotated[float, Field(gt=0)] | None = 2.0
    """Largest weight of the correction from the engine's distribution to the trainer's; none: no correction."""

    entropy_bonus: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the policy's entropy, which is subtracted from the loss: keeps the policy from settling too early."""

    kl: Annotated[float, Field(ge=0)] = 0.0
    """Weight of KL(policy || reference) in the loss, which keeps the policy near the model that the run began with.
    Above 0 the run has a reference, which the section `reference` configures."""

    normalizer: Literal["tokens"] | Annotated[float, Field(gt=0)] = "tokens"
    """Divisor of the summed token losses of a batch: its loss tokens, or a constant (Dr. GRPO: the trajectories of a
    batch times the most tokens a trajectory may have), which favours no length. `tokens` is biased by 0.04 of the
    gradient with one group of 8 in a batch, by 0.0004 with 16; a constant is not."""

    def losses(self, logprobs_N: "Tensor", tokens: LossTokens) -> LossOutput:
        """The loss of each token: clipped policy gradient, entropy bonus and KL penalty."""
        from agentrl.algorithms.losses import k3, negative_entropy, policy_gradient, policy_weight, reference_penalty

        output = policy_gradient(
            logprobs_N,
            tokens,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
            importance_cap=self.importance_cap,
        )
        loss_N, metrics = output.loss_N, dict(output.metrics)
        if self.entropy_bonus:
            weight_N = policy_weight(logprobs_N, tokens, self.importance_cap)
            loss_N = loss_N + self.entropy_bonus * weight_N * negative_entropy(logprobs_N)
        if self.kl:
            weight_N = policy_weight(logprobs_N, tokens, self.importance_cap)
            loss_N = loss_N + self.kl * weight_N * reference_penalty(logprobs_N, tokens.reference_logprobs_N)
            metrics["reference_kl"] = k3(logprobs_N.detach(), tokens.reference_logprobs_N)
        return replace(output, loss_N=loss_N, metrics=metrics)

    def divisor(self, batch: TrainBatch) -> float:
        """The divisor of the summed token losses of a whole batch."""
        return float(batch.num_loss_tokens) if self.normalizer == "tokens" else self.normalizer


def scored(group: Group) -> Sequence[float]:
    """The rewards of a group's members.

    Raises:
        ValueError: a member has no score.
    """
    for trajectory, score in zip(group.trajectories, group.scores, strict=True):
        if isinstance(score.status, Failed):
            raise ValueError(
                f"trajectory {trajectory.id!r} has no score ({score.status.layer}: {score.status.error}) and so "
                "no advantage; filter failed members before asking for advantages"
            )
    return group.rewards_G
