"""Surrogates: what a policy is to increase for each token, given its advantage.

An algorithm is an advantage times a surrogate, so `algorithm: {name: rloo, surrogate: cispo}` takes
the advantages of RLOO and the weights of CISPO. `agentrl/algorithms/named.py` has the pairs that
have names of their own.

Dimension suffix: N loss tokens of a micro-batch, flattened.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from agentrl.protocols.algorithm import LossTokens
from agentrl.settings.base import Settings

if TYPE_CHECKING:
    from torch import Tensor

SurrogateName = Literal["ppo", "gspo", "cispo", "sapo"]


class SurrogateSettings(Settings):
    """The surrogate, and its clips or temperatures."""

    surrogate: SurrogateName = "ppo"
    """The objective of a token, from its ratio (policy / old policy) and its advantage. `ppo` clips
    the ratio. `gspo` clips the one ratio that the tokens of a sample share. `cispo` clips ratios as
    weights only, so that every token keeps its gradient. With `sapo`, gradients fade with the ratio
    instead of being clipped. Some settings have other defaults with `gspo` (`clip_low` 0.0003,
    `clip_high` 0.0004, `normalizer` trajectories) and `cispo` (`clip_low` 1, `clip_high` 1)."""

    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """A ratio below 1 - clip_low gains nothing more from falling; of `cispo`: weights are at least
    1 - clip_low. Without effect on `sapo`."""

    clip_high: Annotated[float, Field(ge=0)] = 0.28
    """A ratio above 1 + clip_high gains nothing more from rising; of `cispo`: weights are at most
    1 + clip_high. Without effect on `sapo`."""

    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound of the loss for a negative advantage, as a multiple of the advantage; none by default.
    Of `ppo` and `gspo`."""

    temperature_positive: Annotated[float, Field(ge=1e-3)] = 1.0
    """With `surrogate: sapo`: how fast gradients fade where the advantage is positive."""

    temperature_negative: Annotated[float, Field(ge=1e-3)] = 1.05
    """With `surrogate: sapo`: how fast they fade where it is not; larger, because pushing tokens
    down raises many others.
    """

    @model_validator(mode="before")
    @classmethod
    def _take_the_surrogates_defaults(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        chosen = raw.get("surrogate", cls.model_fields["surrogate"].default)
        surrogate = SURROGATES.get(chosen) if isinstance(chosen, str) else None
        return raw if surrogate is None else {**surrogate.defaults, **raw}

    @model_validator(mode="after")
    def _temperatures_have_an_effect(self) -> Self:
        for name in ("temperature_positive", "temperature_negative"):
            is_default = getattr(self, name) == type(self).model_fields[name].default
            if self.surrogate != "sapo" and not is_default:
                raise ValueError(
                    f"{name} is of surrogate=sapo, and this is {self.surrogate}: leave it out, or"
                    " write surrogate=sapo"
                )
        return self


Objective = Callable[[SurrogateSettings, "Tensor", LossTokens], "Tensor"]
"""The objective that the policy increases, from logprobs of shape N: one number per token, of shape
N."""
Cuts = Callable[[SurrogateSettings, "Tensor", LossTokens], Mapping[str, "Tensor"]]
"""Metrics of each token, of shape N: the gradient that the surrogate cuts."""


def clip_ratios(own: SurrogateSettings, logprobs_N: "Tensor", tokens: LossTokens) -> "Tensor":
    """PPO's clipped ratio (arXiv:1707.06347, equation 7), with a clip on each side."""
    from agentrl.algorithms.losses import clipped

    ratio_N = (logprobs_N - tokens.old_logprobs_N).exp()
    return clipped(ratio_N, tokens.advantages_N, own.clip_low, own.clip_high, own.dual_clip)


def clip_sample_ratios(
    own: SurrogateSettings, logprobs_N: "Tensor", tokens: LossTokens
) -> "Tensor":
    """GSPO (arXiv:2507.18071): a sample's tokens share one ratio, and one clip.

    The ratio is the geometric mean of the tokens' ratios, equation 7. For long answers and mixtures
    of experts, whose single ratios are noisy. Where turns of a sample differ in their advantages,
    each keeps its own, as in GSPO-token (section 4.3); where they do not, both have the same
    gradient.
    """
    from agentrl.algorithms.losses import by_sample, clipped

    moved_N = (logprobs_N - tokens.old_logprobs_N).detach()
    shared_N = by_sample(moved_N, tokens.segments_N, "mean").exp()
    # The second factor is 1: it gives each token the gradient of its own ratio.
    ratio_N = shared_N * (logprobs_N - logprobs_N.detach()).exp()
    return clipped(ratio_N, tokens.advantages_N, own.clip_low, own.clip_high, own.dual_clip)


def clip_weights(own: SurrogateSettings, logprobs_N: "Tensor", tokens: LossTokens) -> "Tensor":
    """CISPO, MiniMax-M1 (arXiv:2506.13585): ratios are clipped as weights only.

    For samples of older policies, where PPO's clip would silence rare tokens.
    """
    from agentrl.algorithms.losses import clipped_weight

    ratio_N = (logprobs_N - tokens.old_logprobs_N).exp()
    return clipped_weight(ratio_N, logprobs_N, tokens.advantages_N, own.clip_low, own.clip_high)


def fade_gradients(own: SurrogateSettings, logprobs_N: "Tensor", tokens: LossTokens) -> "Tensor":
    """SAPO (arXiv:2511.20347): gradients fade with the ratio instead of being clipped."""
    from agentrl.algorithms.losses import softly_gated

    ratio_N = (logprobs_N - tokens.old_logprobs_N).exp()
    return softly_gated(
        ratio_N, tokens.advantages_N, own.temperature_positive, own.temperature_negative
    )


def _cut_by_sample_ratios(
    own: SurrogateSettings, logprobs_N: "Tensor", tokens: LossTokens
) -> Mapping[str, "Tensor"]:
    from agentrl.algorithms.losses import by_sample, cut_by_clips

    moved_N = logprobs_N.detach() - tokens.old_logprobs_N
    ratio_N = by_sample(moved_N, tokens.segments_N, "mean").exp()
    return cut_by_clips(ratio_N, tokens.advantages_N, own.clip_low, own.clip_high, own.dual_clip)


def _bounded_weights(
    own: SurrogateSettings, logprobs_N: "Tensor", tokens: LossTokens
) -> Mapping[str, "Tensor"]:
    ratio_N = (logprobs_N.detach() - tokens.old_logprobs_N).exp()
    return {
        "weight_clipped_low": (ratio_N < 1 - own.clip_low).float(),
        "weight_clipped_high": (ratio_N > 1 + own.clip_high).float(),
    }


@dataclass(frozen=True, slots=True)
class Surrogate:
    """A surrogate objective."""

    objective: Objective
    """The objective that the policy increases."""
    shared_cuts: Cuts | None = None
    """The gradient that it cuts, if tokens share a ratio; else each token's is asked by autograd.
    """
    bounds: Cuts | None = None
    """Metrics of the weights that it bounds."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Settings with other defaults than those of `ppo`."""

    def cuts(
        self, own: SurrogateSettings, logprobs_N: "Tensor", tokens: LossTokens
    ) -> Mapping[str, "Tensor"]:
        """Metrics of each token: the gradient that it cuts, and the weights that it bounds."""
        from agentrl.algorithms.losses import cut_by_gradient

        def objective(logprobs_N: "Tensor", tokens: LossTokens) -> "Tensor":
            return self.objective(own, logprobs_N, tokens)

        if self.shared_cuts is not None:
            return self.shared_cuts(own, logprobs_N, tokens)
        cuts = cut_by_gradient(objective, logprobs_N, tokens)
        return cuts if self.bounds is None else {**cuts, **self.bounds(own, logprobs_N, tokens)}


SURROGATES: Mapping[str, Surrogate] = MappingProxyType(
    {
        "ppo": Surrogate(clip_ratios),
        "gspo": Surrogate(
            clip_sample_ratios,
            shared_cuts=_cut_by_sample_ratios,
            # The clips are for mean ratios, which are nearer to 1 than those of tokens.
            defaults={"clip_low": 3e-4, "clip_high": 4e-4, "normalizer": "trajectories"},
        ),
        "cispo": Surrogate(
            clip_weights, bounds=_bounded_weights, defaults={"clip_low": 1.0, "clip_high": 1.0}
        ),
        "sapo": Surrogate(fade_gradients),
    }
)
"""The surrogates, by the values of the setting `surrogate`."""
