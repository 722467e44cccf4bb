"""Shared by all policy gradients: their settings, the check for missing scores, and the loss around
a surrogate.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from agentrl.algorithms.surrogates import SURROGATES, SurrogateSettings
from agentrl.batch import TrainBatch
from agentrl.protocols.algorithm import AlgorithmOffers, LossOutput, LossTokens, MemberAdvantage
from agentrl.tokens.arrays import FloatArray, floats
from agentrl.trajectory import Failed, Group

if TYPE_CHECKING:
    from torch import Tensor


class PolicyLoss(SurrogateSettings):
    """Surrogate, importance weights, extra terms and divisor of the loss."""

    importance_cap: Annotated[float, Field(gt=0)] | None = 2.0
    """Largest weight of the correction from the engine's distribution to the trainer's; none: no
    correction. TRL's default is 3 with `importance: mask` and `importance_level: sequence`."""

    importance_floor: Annotated[float, Field(gt=0, le=1)] | None = None
    """Smallest weight of that correction; none: as small as it is. IcePop (arXiv:2510.18855) leaves
    out the tokens of both sides: 0.5, with a cap of 5 and `importance: mask`. It is TRL's
    `vllm_importance_sampling_clip_min`."""

    importance: Literal["truncate", "mask"] = "truncate"
    """The treatment of weights beyond these: they are cut to the cap and raised to the floor, or
    their tokens are left out."""

    importance_level: Literal["token", "sequence"] = "token"
    """The scope of a weight: each token has its own, or all tokens of a sample have the product of
    theirs.
    """

    entropy_bonus: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the policy's entropy, which is subtracted from the loss: keeps the policy from
    settling too early. The entropy is exact, over all tokens that could have been sampled. It is a
    term of each token's loss, and so divided by `normalizer` as the rest is, as in verl: with a
    constant that is larger than the number of loss tokens it weighs less, by that ratio, and with
    `trajectories` the tokens of long trajectories weigh less. TRL takes its mean over the loss
    tokens whatever the divisor: for the same weight, write that times the constant over their
    number."""

    kl: Annotated[float, Field(ge=0)] = 0.0
    """Weight of KL(policy || reference) in the loss, which keeps the policy near the model that the
    run began with. Above 0 the run has a reference, which the section `reference` configures. The
    term has the gradient of the KL itself (its k2 estimate), not that of k3."""

    kl_reward: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the same KL as a cost in the reward: a turn's tokens pay log(policy / reference)
    each (the k1 estimate) out of the turn's reward, before rewards are compared and normalised, as
    in TRL's RLOO and in verl. Then it is credited as the reward is: to the whole episode, or by
    turn (critics: by token). Tokens that carry no loss pay nothing. With `group_std`, a group whose
    rewards are equal is compared by its KL alone. It needs a reference too."""

    normalizer: Literal["tokens", "trajectories"] | Annotated[float, Field(ge=1e-6)] = "tokens"
    """Divisor of the summed token losses of a batch: its loss tokens; its trajectories, each of
    which counts by the mean of its tokens; or a constant (Dr. GRPO: the trajectories of a batch
    times the most tokens a trajectory may have), which favours no length. `tokens` is biased by
    0.04 of the gradient with one group of 8 in a batch, by 0.0004 with 16. `trajectories` is biased
    whatever the batch size: a token of a long trajectory counts less. A constant is not biased."""

    @model_validator(mode="after")
    def _a_mask_leaves_something(self) -> Self:
        if self.importance_floor is not None and not self.importance_floor <= (
            self.importance_cap or 0.0
        ):
            raise ValueError(
                f"importance_floor={self.importance_floor:g} needs an importance_cap that is not"
                f" below it, and that is {self.importance_cap}: without one nothing is corrected"
            )
        if (
            self.importance == "mask"
            and self.importance_cap is not None
            and self.importance_cap < 1
        ):
            raise ValueError(
                f"importance=mask with importance_cap={self.importance_cap:g} leaves out every"
                " token whose weight is 1, which is nearly all of them: write an importance_cap of"
                " 1 or more (2 is usual)"
            )
        return self


class PolicyAlgorithm:
    """A policy gradient: the loss around a surrogate. A subclass adds its advantages."""

    Config: type[PolicyLoss] = PolicyLoss
    config: PolicyLoss

    def __init__(self, config: PolicyLoss | None = None) -> None:
        self.config = config or type(self).Config()

    @property
    def offers(self) -> AlgorithmOffers:
        """The facts that follow from the settings of the loss; a subclass replaces some."""
        own = self.config
        return AlgorithmOffers(
            uses_reference=own.kl > 0 or own.kl_reward > 0,
            uses_entropy=own.entropy_bonus > 0,
            beyond_rewards="kl_reward" if own.kl_reward else "",
            charges_rewards=own.kl_reward > 0,
        )

    def advantages(self, group: Group) -> Sequence[MemberAdvantage]:
        """See `Algorithm`."""
        raise NotImplementedError

    def surrogate(self, logprobs_N: "Tensor", tokens: LossTokens) -> "Tensor":
        """The objective of each token, of shape N, without importance weights: what the policy is
        to increase.
        """
        return SURROGATES[self.config.surrogate].objective(self.config, logprobs_N, tokens)

    def loss(self, logprobs_N: "Tensor", tokens: LossTokens) -> LossOutput:
        """The loss of each token: the weighted surrogate, negated, the entropy bonus and the KL
        penalty.
        """
        from agentrl.algorithms.losses import (
            importance,
            k3,
            negative_entropy,
            policy_metrics,
            reference_penalty,
        )

        own = self.config
        weight_N = importance(
            tokens, own.importance_cap, own.importance, own.importance_level, own.importance_floor
        )
        loss_N = -weight_N * self.surrogate(logprobs_N, tokens)
        metrics = policy_metrics(
            logprobs_N, tokens, own.importance_cap, own.importance_level, own.importance_floor
        )
        metrics |= SURROGATES[own.surrogate].cuts(own, logprobs_N, tokens)
        # These terms are expectations over tokens of the policy that is trained; their tokens come
        # from an older one.
        current_N = weight_N * (logprobs_N.detach() - tokens.old_logprobs_N).exp()
        if own.entropy_bonus and tokens.entropies_N is None:
            loss_N = loss_N + own.entropy_bonus * current_N * negative_entropy(logprobs_N)
        elif own.entropy_bonus and tokens.entropies_N is not None:
            loss_N = loss_N - own.entropy_bonus * tokens.entropies_N
            metrics["policy_entropy"] = tokens.entropies_N.detach()
        if own.kl:
            loss_N = loss_N + own.kl * current_N * reference_penalty(
                logprobs_N, tokens.reference_logprobs_N
            )
        if AlgorithmOffers.of(self).uses_reference:
            metrics["reference_kl"] = k3(logprobs_N.detach(), tokens.reference_logprobs_N)
        return LossOutput(loss_N, metrics)

    def normalizer(self, batch: TrainBatch) -> float:
        """The divisor of the summed token losses of a whole batch."""
        if self.config.normalizer == "tokens":
            return float(batch.num_loss_tokens)
        if self.config.normalizer == "trajectories":
            return float(len(batch.tokens_of_trajectories))
        return self.config.normalizer

    def prepared(self, batch: TrainBatch) -> TrainBatch:
        """The batch with the weights of its tokens, and the cost of leaving the reference."""
        if self.config.normalizer == "trajectories":
            weights_N = 1 / batch.tokens_of_trajectories[batch.trajectories_N]
            batch = replace(batch, weights_N=floats(weights_N))
        if self.config.kl_reward:
            cost_N = floats(
                self.config.kl_reward * (batch.rollout_logprobs_N - batch.reference_logprobs_N)
            )
            batch = self.charged(replace(batch, rewards_N=floats(batch.rewards_N - cost_N)), cost_N)
        return batch

    def charged(self, batch: TrainBatch, cost_N: FloatArray) -> TrainBatch:
        """The batch, whose rewards are less what each token costs, with the advantages of these
        rewards.
        """
        return batch.charged(cost_N)


def scored(group: Group) -> Sequence[float]:
    """The rewards of a group's members.

    Raises:
        ValueError: a member has no score.
    """
    for trajectory, score in zip(group.trajectories, group.scores, strict=True):
        if isinstance(score.status, Failed):
            raise ValueError(
                f"trajectory {trajectory.id!r} has no score ({score.status.layer}:"
                f" {score.status.error}) and so no advantage; filter failed members before asking"
                " for advantages"
            )
    return group.rewards_G
