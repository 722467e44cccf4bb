"""Losses of single tokens: pure functions of the trainer's logprobs and the `LossTokens`.

Dimension suffix: N loss tokens of a micro-batch, flattened.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from agentrl.protocols.algorithm import LossOutput, LossTokens

Level = Literal["token", "sequence"]


def clipped(
    ratio_N: Tensor, gain_N: Tensor, low: float, high: float, dual: float | None = None
) -> Tensor:
    """min(ratio * A, clip(ratio, 1 - low, 1 + high) * A): what a policy is to increase.

    PPO (arXiv:1707.06347), equation 7; unequal clips are DAPO's clip-higher (arXiv:2503.14476),
    equation 10. With `dual` = c, the value is not below c * A where A < 0: dual-clip PPO
    (arXiv:1912.09729), equation 5.
    """
    surrogate_N = torch.minimum(ratio_N * gain_N, ratio_N.clamp(1 - low, 1 + high) * gain_N)
    if dual is None:
        return surrogate_N
    return torch.where(gain_N < 0, torch.maximum(surrogate_N, dual * gain_N), surrogate_N)


def clipped_weight(
    ratio_N: Tensor, logprobs_N: Tensor, gain_N: Tensor, low: float, high: float
) -> Tensor:
    """clip(ratio, 1 - low, 1 + high) * A * logprob, the factors without gradient: no token's
    gradient is cut off.

    CISPO, MiniMax-M1 (arXiv:2506.13585), equations 4 and 5.
    """
    return ratio_N.detach().clamp(1 - low, 1 + high) * gain_N * logprobs_N


def softly_gated(ratio_N: Tensor, gain_N: Tensor, positive: float, negative: float) -> Tensor:
    """4 / tau * sigmoid(tau * (ratio - 1)) * A: the gradient fades away from a ratio of 1, faster
    with a larger tau.

    `positive` and `negative` are tau for advantages above and below 0. SAPO (arXiv:2511.20347),
    equations 5 and 6.
    """
    tau_N = torch.where(gain_N > 0, positive, negative)
    return 4 / tau_N * torch.sigmoid(tau_N * (ratio_N - 1)) * gain_N


def by_sample(values_N: Tensor, segments_N: Tensor, how: Literal["mean", "sum"]) -> Tensor:
    """The mean or the sum over the tokens of each training sample, for each of its tokens;
    differentiable.
    """
    _, rows_N, counts = torch.unique(segments_N, return_inverse=True, return_counts=True)
    sums = values_N.new_zeros(len(counts)).index_add(0, rows_N, values_N)
    return (sums / counts if how == "mean" else sums)[rows_N]


def importance(
    tokens: LossTokens,
    cap: float | None,
    how: Literal["truncate", "mask"],
    level: Level,
    floor: float | None = None,
) -> Tensor:
    """Weights, without gradient, from the engine's distribution to the trainer's: w = exp(old -
    rollout logprobs).

    They correct for tokens that the engine sampled with other numerics or older weights: the
    decoupled objective of AReaL (arXiv:2505.24298), equation 5. Weights above `cap` are cut to it
    (`truncate`), or their tokens are left out (`mask`); those below `floor` are raised to it, or
    left out too (IcePop, arXiv:2510.18855). On the level of `sequence`, a sample's tokens share the
    product of their weights. Without a cap, w = 1.
    """
    weight_N = uncapped_importance(tokens, level)
    if cap is None:
        return torch.ones_like(weight_N)
    if how == "truncate":
        return weight_N.clamp(min=floor, max=cap)
    kept_N = weight_N <= cap if floor is None else (weight_N <= cap) & (weight_N >= floor)
    return torch.where(kept_N, weight_N, 0.0)


def uncapped_importance(tokens: LossTokens, level: Level) -> Tensor:
    """The weights of `importance` before they are capped."""
    log_weight_N = (tokens.old_logprobs_N - tokens.rollout_logprobs_N).detach()
    if level == "sequence":
        log_weight_N = by_sample(log_weight_N, tokens.segments_N, "sum")
    return log_weight_N.exp()


def policy_metrics(
    logprobs_N: Tensor,
    tokens: LossTokens,
    cap: float | None,
    level: Level = "token",
    floor: float | None = None,
) -> dict[str, Tensor]:
    """Per-token metrics of a policy's loss, besides what its surrogate cuts.

    `ratio`, `importance_weight` (of its `level`, before the cap), `importance_truncated`, `entropy`
    (-logprob of the sampled token, an unbiased estimate under the policy that sampled) and `kl` (of
    old to new, the k3 estimate: ratio - 1 - log ratio).
    """
    weight_N = uncapped_importance(tokens, level)
    return {
        "ratio": (logprobs_N.detach() - tokens.old_logprobs_N).exp(),
        "importance_weight": weight_N,
        "importance_truncated": (
            (weight_N > (math.inf if cap is None else cap)) | (weight_N < (floor or 0.0))
        ).float(),
        "entropy": -logprobs_N.detach(),
        "kl": k3(tokens.old_logprobs_N, logprobs_N.detach()),
    }


def cut_by_gradient(
    surrogate: Callable[[Tensor, LossTokens], Tensor], logprobs_N: Tensor, tokens: LossTokens
) -> dict[str, Tensor]:
    """True for the gradients that a surrogate of single tokens cuts: they are 0, though the
    advantage is not.

    `clipped_low` (the ratio is below 1), `clipped_high` (above 1, with a positive advantage) and
    `clipped_dual` (above 1, with a negative one).
    """
    with torch.enable_grad():
        own_N = logprobs_N.detach().requires_grad_()
        (gradient_N,) = torch.autograd.grad(
            surrogate(own_N, tokens).sum(), own_N, materialize_grads=True
        )
    return _cut(
        gradient_N == 0, (logprobs_N.detach() - tokens.old_logprobs_N).exp(), tokens.advantages_N
    )


def cut_by_clips(
    ratio_N: Tensor, gain_N: Tensor, low: float, high: float, dual: float | None = None
) -> dict[str, Tensor]:
    """True for the ratios that the clips of `clipped` cut, by the names of `cut_by_gradient`."""
    below_N, above_N = (ratio_N < 1 - low) & (gain_N < 0), (ratio_N > 1 + high) & (gain_N > 0)
    far_N = (ratio_N > (math.inf if dual is None else dual)) & (gain_N < 0)
    return _cut(below_N | above_N | far_N, ratio_N, gain_N)


def _cut(cut_N: Tensor, ratio_N: Tensor, gain_N: Tensor) -> dict[str, Tensor]:
    below_N, above_N = cut_N & (ratio_N < 1), cut_N & (ratio_N > 1)
    return {
        "clipped_low": (below_N & (gain_N < 0)).float(),
        "clipped_high": (above_N & (gain_N > 0)).float(),
        "clipped_dual": (above_N & (gain_N < 0)).float(),
    }


def negative_entropy(logprobs_N: Tensor) -> Tensor:
    """A term per sampled token whose expected gradient is that of the policy's negative entropy,
    -H.

    H = -E[log p], so grad H = -E[log p * grad log p] (the score has mean zero): log p (without
    gradient) times log p, for tokens that the policy sampled itself; others are weighted with p
    over the policy that sampled. Its value means nothing; the entropy is in the metrics. As a bonus
    in policy gradients: A3C (arXiv:1602.01783), section 4. This is for trainers that give no exact
    entropy (`LossTokens.entropies_N`).
    """
    return logprobs_N.detach() * logprobs_N


def reference_penalty(logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """(log p - log q)^2 / 2 of each sampled token: a term whose expected gradient is that of KL(p
    || q).

    The gradient of KL is E[(log p - log q) * grad log p] (the score has mean zero), for tokens that
    the policy sampled itself; others are weighted with p over the policy that sampled. The k3
    estimate as a loss would have another gradient: arXiv:2510.01555, section 4.
    """
    return 0.5 * (logprobs_N - reference_logprobs_N).square()


def k3(logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """q / p - 1 - log(q / p) of each token sampled from p: an unbiased estimate of KL(p || q),
    never negative.

    J. Schulman, "Approximating KL divergence" (2020); GRPO (arXiv:2402.03300), equation 4.
    """
    log_ratio_N = reference_logprobs_N - logprobs_N
    return log_ratio_N.exp() - 1 - log_ratio_N


def value_loss(values_N: Tensor, tokens: LossTokens, clip: float | None) -> LossOutput:
    """Half the squared error of a critic; `advantages_N` are its targets and `rollout_logprobs_N`
    its old values.

    With a `clip`, the larger of two errors counts: that of the value, and that of the value clipped
    to within `clip` of the old one. So the loss does not push a value beyond the clip. As in
    OpenAI's baselines; "Implementation Matters" (arXiv:2005.12729), section 3.

    Metrics: `value`, `return`, and `value_clipped` (share of tokens whose gradient the clip cut).
    """
    returns_N, old_N = tokens.advantages_N, tokens.rollout_logprobs_N
    error_N = (values_N - returns_N).square()
    near_N = old_N + (values_N - old_N).clamp(-clip, clip) if clip is not None else values_N
    worse_N = torch.maximum(error_N, (near_N - returns_N).square())
    return LossOutput(
        loss_N=0.5 * worse_N,
        metrics={
            "value": values_N.detach(),
            "return": returns_N,
            "value_clipped": (worse_N > error_N).float().detach(),
        },
    )


def cross_entropy(logprobs_N: Tensor, tokens: LossTokens) -> LossOutput:
    """-logprob of each token, times its advantage as a weight: maximum likelihood if every
    advantage is 1.
    """
    nll_N = -logprobs_N
    return LossOutput(loss_N=nll_N * tokens.advantages_N, metrics={"nll": nll_N.detach()})
