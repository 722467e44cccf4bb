"""Losses of single tokens: pure functions of the trainer's logprobs and the `LossTokens`.

Dimension suffix: N loss tokens of a micro-batch, flattened.
"""

import math

import torch
from torch import Tensor

from agentrl.protocols import LossOutput, LossTokens


def policy_gradient(
    logprobs_N: Tensor,
    tokens: LossTokens,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    importance_cap: float | None = None,
) -> LossOutput:
    """The clipped policy gradient, negated: -w * min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A).

    - ratio = exp(logprobs - old_logprobs): PPO (arXiv:1707.06347), equation 7; unequal clips are DAPO's clip-higher
      (arXiv:2503.14476), equation 10.
    - With `dual_clip` = c, the value is not below c * A where A < 0: dual-clip PPO (arXiv:1912.09729), equation 5.
    - w = min(exp(old_logprobs - rollout_logprobs), importance_cap), without gradient, corrects for tokens that the
      engine sampled with other numerics or older weights: the decoupled objective of AReaL (arXiv:2505.24298),
      equation 5, with a truncated weight. `None` leaves w = 1.

    Metrics: `clipped_low`, `clipped_high`, `clipped_dual` (shares of tokens whose gradient a clip cut), `ratio`,
    `importance_weight` (before the cap), `importance_truncated`, `entropy` (-logprob of the sampled token, an
    unbiased estimate under the policy that sampled) and `kl` (of old to new, the k3 estimate: ratio - 1 - log ratio).
    """
    log_ratio_N = logprobs_N - tokens.old_logprobs_N
    ratio_N = log_ratio_N.exp()
    gain_N = tokens.advantages_N
    surrogate_N = torch.minimum(ratio_N * gain_N, ratio_N.clamp(1 - clip_low, 1 + clip_high) * gain_N)
    if dual_clip is not None:
        surrogate_N = torch.where(gain_N < 0, torch.maximum(surrogate_N, dual_clip * gain_N), surrogate_N)
    weight_N = (tokens.old_logprobs_N - tokens.rollout_logprobs_N).exp().detach()
    cap = math.inf if importance_cap is None else importance_cap
    used_N = torch.ones_like(weight_N) if importance_cap is None else weight_N.clamp(max=cap)
    ratio_N = ratio_N.detach()
    return LossOutput(
        loss_N=-used_N * surrogate_N,
        metrics={
            "clipped_low": ((ratio_N < 1 - clip_low) & (gain_N < 0)).float(),
            "clipped_high": ((ratio_N > 1 + clip_high) & (gain_N > 0)).float(),
            "clipped_dual": ((ratio_N > (math.inf if dual_clip is None else dual_clip)) & (gain_N < 0)).float(),
            "ratio": ratio_N,
            "importance_weight": weight_N,
            "importance_truncated": (weight_N > cap).float(),
            "entropy": -logprobs_N.detach(),
            "kl": k3(tokens.old_logprobs_N, logprobs_N.detach()),
        },
    )


def policy_weight(logprobs_N: Tensor, tokens: LossTokens, importance_cap: float | None) -> Tensor:
    """p / q of each token, without gradient: the policy p that is trained over the policy q that sampled the token.

    The terms below are expectations over tokens of p. Their tokens come from q: an older policy, where the tokens are
    stale or a minibatch of the step was trained on already, or the same policy with the engine's numerics. The factor
    from the engine to the beginning of the step is truncated as in `policy_gradient`; with no `importance_cap` it is 1.
    """
    ratio_N = (logprobs_N.detach() - tokens.old_logprobs_N).exp()
    if importance_cap is None:
        return ratio_N
    return ratio_N * (tokens.old_logprobs_N - tokens.rollout_logprobs_N).exp().clamp(max=importance_cap)


def negative_entropy(logprobs_N: Tensor) -> Tensor:
    """A term per sampled token whose expected gradient is that of the policy's negative entropy, -H.

    H = -E[log p], so grad H = -E[log p * grad log p] (the score has mean zero): log p (without gradient) times log p,
    for tokens that the policy sampled itself; others are weighted (`policy_weight`). Its value means nothing; the
    entropy is in the metrics. As a bonus in policy gradients: A3C (arXiv:1602.01783), section 4.
    """
    return logprobs_N.detach() * logprobs_N


def reference_penalty(logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """(log p - log q)^2 / 2 of each sampled token: a term whose expected gradient is that of KL(p || q).

    The gradient of KL is E[(log p - log q) * grad log p] (the score has mean zero), for tokens that the policy sampled
    itself; others are weighted (`policy_weight`). The k3 estimate as a loss would have another gradient:
    arXiv:2510.01555, section 4.
    """
    return 0.5 * (logprobs_N - reference_logprobs_N).square()


def k3(logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """q / p - 1 - log(q / p) of each token sampled from p: an unbiased estimate of KL(p || q), never negative.

    J. Schulman, "Approximating KL divergence" (2020); GRPO (arXiv:2402.03300), equation 4.
    """
    log_ratio_N = reference_logprobs_N - logprobs_N
    return log_ratio_N.exp() - 1 - log_ratio_N


def value_loss(values_N: Tensor, tokens: LossTokens, clip: float | None) -> LossOutput:
    """Half the squared error of a critic; `advantages_N` are its targets and `rollout_logprobs_N` its old values.

    With a `clip`, the larger of two errors counts: that of the value, and that of the value clipped to within `clip` of
    the old one. So the loss does not push a value beyond the clip. As in OpenAI's baselines; "Implementation Matters"
    (arXiv:2005.12729), section 3.

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
    """-logprob of each token, times its advantage as a weight: maximum likelihood if every advantage is 1."""
    nll_N = -logprobs_N
    return LossOutput(loss_N=nll_N * tokens.advantages_N, metrics={"nll": nll_N.detach()})
