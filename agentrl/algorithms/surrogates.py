"""GSPO, CISPO and SAPO: the group's advantages with other surrogates than PPO's clip."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from agentrl.algorithms.grpo import Grpo
from agentrl.protocols import LossTokens

if TYPE_CHECKING:
    from torch import Tensor


class Gspo(Grpo):
    """Group sequence policy optimisation (arXiv:2507.18071): a sample's tokens share one ratio, and
    one clip.

    The ratio is the geometric mean of the tokens' ratios, equation 7. For long answers and mixtures
    of experts, whose single ratios are noisy. Where turns of a sample differ in their advantages,
    each keeps its own, as in GSPO-token (section 4.3); where they do not, both have the same
    gradient.
    """

    class Config(Grpo.Config):
        """As `grpo`, with clips for mean ratios, which are nearer to 1 than those of tokens."""

        clip_low: Annotated[float, Field(ge=0, le=1)] = 3e-4
        """A sample's ratio below 1 - clip_low gains nothing more from falling."""

        clip_high: Annotated[float, Field(ge=0)] = 4e-4
        """A sample's ratio above 1 + clip_high gains nothing more from rising."""

        normalizer: Literal["tokens", "trajectories"] | Annotated[float, Field(gt=0)] = (
            "trajectories"
        )
        """As in `grpo`. The paper's is `trajectories`."""

    def surrogate(self, logprobs_N: "Tensor", tokens: LossTokens) -> "Tensor":
        """See `PolicyAlgorithm`."""
        from agentrl.algorithms.losses import by_sample, clipped

        own = self.config
        moved_N = (logprobs_N - tokens.old_logprobs_N).detach()
        ratio_N = (
            by_sample(moved_N, tokens.segments_N, "mean").exp()
            * (logprobs_N - logprobs_N.detach()).exp()
        )
        return clipped(ratio_N, tokens.advantages_N, own.clip_low, own.clip_high, own.dual_clip)

    def cut(self, logprobs_N: "Tensor", tokens: LossTokens) -> Mapping[str, "Tensor"]:
        """See `PolicyAlgorithm`: by the ratio that a sample's tokens share."""
        from agentrl.algorithms.losses import by_sample, cut_by_clips

        own = self.config
        ratio_N = by_sample(
            logprobs_N.detach() - tokens.old_logprobs_N, tokens.segments_N, "mean"
        ).exp()
        return cut_by_clips(
            ratio_N, tokens.advantages_N, own.clip_low, own.clip_high, own.dual_clip
        )


class Cispo(Grpo):
    """Clipped importance-sampling policy optimisation, MiniMax-M1 (arXiv:2506.13585): every token
    keeps its gradient.

    Ratios are clipped as weights only. For samples of older policies, where PPO's clip would
    silence rare tokens.
    """

    class Config(Grpo.Config):
        """As `grpo`; the clips bound weights."""

        clip_low: Annotated[float, Field(ge=0, le=1)] = 1.0
        """Weights are at least 1 - clip_low."""

        clip_high: Annotated[float, Field(ge=0)] = 1.0
        """Weights are at most 1 + clip_high."""

    def surrogate(self, logprobs_N: "Tensor", tokens: LossTokens) -> "Tensor":
        """See `PolicyAlgorithm`."""
        from agentrl.algorithms.losses import clipped_weight

        ratio_N = (logprobs_N - tokens.old_logprobs_N).exp()
        return clipped_weight(
            ratio_N, logprobs_N, tokens.advantages_N, self.config.clip_low, self.config.clip_high
        )

    def cut(self, logprobs_N: "Tensor", tokens: LossTokens) -> Mapping[str, "Tensor"]:
        """See `PolicyAlgorithm`: no gradient; `weight_clipped_low` and `_high` tell whose weight
        the clips bound.
        """
        ratio_N = (logprobs_N.detach() - tokens.old_logprobs_N).exp()
        return {
            **super().cut(logprobs_N, tokens),
            "weight_clipped_low": (ratio_N < 1 - self.config.clip_low).float(),
            "weight_clipped_high": (ratio_N > 1 + self.config.clip_high).float(),
        }


class Sapo(Grpo):
    """Soft adaptive policy optimisation (arXiv:2511.20347): gradients fade with the ratio instead
    of being clipped.
    """

    class Config(Grpo.Config):
        """As `grpo`; the temperatures replace the clips, which have no effect."""

        normalizer: Literal["tokens", "trajectories"] | Annotated[float, Field(ge=1e-6)] = "tokens"
        """As in `grpo`. The paper, TRL and verl take the mean of each answer's tokens first: write
        `trajectories`.
        """

        temperature_positive: Annotated[float, Field(ge=1e-3)] = 1.0
        """How fast gradients fade where the advantage is positive."""

        temperature_negative: Annotated[float, Field(ge=1e-3)] = 1.05
        """How fast they fade where it is not; larger, because pushing tokens down raises many
        others.
        """

    config: Config

    def surrogate(self, logprobs_N: "Tensor", tokens: LossTokens) -> "Tensor":
        """See `PolicyAlgorithm`."""
        from agentrl.algorithms.losses import softly_gated

        ratio_N, own = (logprobs_N - tokens.old_logprobs_N).exp(), self.config
        return softly_gated(
            ratio_N, tokens.advantages_N, own.temperature_positive, own.temperature_negative
        )
