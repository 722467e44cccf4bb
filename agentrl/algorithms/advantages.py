"""Advantages: how much better a trajectory was than its group, or a token than the critic expected. Pure functions.

The functions of a group's rewards raise `ValueError` on a reward that is not a finite number (a failed score is NaN,
and must be filtered before). They return exact zeros if all rewards are equal, as in a group of one.

Dimension suffixes: G members of a group; of a batch M samples and N loss tokens.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from agentrl.arrays import FloatArray, floats
from agentrl.batch import TrainBatch

STD_EPSILON = 1e-6
"""Added to the standard deviation, so that rewards that differ only by rounding give advantages near zero."""

Advantage = Callable[[Sequence[float]], list[float]]
"""Maps the rewards of a group's members to their advantages."""


def group_std(rewards_G: Sequence[float]) -> list[float]:
    """(r_i - mean r) / std r, with the population standard deviation.

    GRPO with outcome supervision: DeepSeekMath (arXiv:2402.03300), section 4.1.2.
    """
    centred_G = group_mean(rewards_G)
    std = math.sqrt(math.fsum(a * a for a in centred_G) / len(centred_G)) if centred_G else 0.0
    return [a / (std + STD_EPSILON) for a in centred_G]


def group_mean(rewards_G: Sequence[float]) -> list[float]:
    """r_i - mean r. Dividing by the spread too would favour tasks that are nearly always or nearly never solved.

    Dr. GRPO: "Understanding R1-Zero-Like Training" (arXiv:2503.20783), section 3.2.
    """
    _check(rewards_G)
    if _constant(rewards_G):
        return [0.0] * len(rewards_G)
    mean = math.fsum(rewards_G) / len(rewards_G)
    return [r - mean for r in rewards_G]


def leave_one_out(rewards_G: Sequence[float]) -> list[float]:
    """r_i - mean of the other members' rewards: an unbiased baseline.

    RLOO: "Back to Basics" (arXiv:2402.14740), section 3.3.
    """
    _check(rewards_G)
    if _constant(rewards_G):
        return [0.0] * len(rewards_G)
    total, others = math.fsum(rewards_G), len(rewards_G) - 1
    return [r - (total - r) / others for r in rewards_G]


def generalized(batch: TrainBatch, values_N: FloatArray, lam: float) -> FloatArray:
    """A_t = sum_k lam^k d_(t+k), with d_t = r_t + V_(t+1) - V_t, over the loss tokens t of each sample on its own.

    Generalized advantage estimation (arXiv:1506.02438), equation 16, without a discount: a reward counts as much for
    the first token of an episode as for the last. The batch's `advantages_N` are the rewards. A sample gets its whole
    reward at its last loss token, after which the expected return is 0.
    """
    # All samples at once, from their last loss tokens backwards; the longest first, so that the rest are a slice.
    loss_tokens_M = batch.loss_tokens_M
    order_M = np.argsort(-loss_tokens_M, kind="stable")[: int((loss_tokens_M > 0).sum())]
    lengths_M, last_M = loss_tokens_M[order_M], np.cumsum(loss_tokens_M)[order_M] - 1
    rewards_N, expected_N = np.zeros(len(values_N)), np.append(values_N[1:], 0.0)
    rewards_N[last_M], expected_N[last_M] = batch.advantages_N[last_M], 0.0
    advantages_N = rewards_N + expected_N - values_N
    for back in range(1, int(lengths_M.max(initial=0))):
        here_M = last_M[: int(np.searchsorted(-lengths_M, -back))] - back
        advantages_N[here_M] += lam * advantages_N[here_M + 1]
    return floats(advantages_N)


def whitened(advantages_N: FloatArray) -> FloatArray:
    """(A - mean A) / std A over the loss tokens of a batch, with the population standard deviation."""
    found_N = advantages_N.astype(np.float64)
    return floats((advantages_N - found_N.mean()) / (found_N.std() + STD_EPSILON))


def _constant(rewards_G: Sequence[float]) -> bool:
    return len(set(rewards_G)) <= 1


def _check(rewards_G: Sequence[float]) -> None:
    for member, reward in enumerate(rewards_G):
        if not math.isfinite(reward):
            raise ValueError(
                f"member {member} of the group has reward {reward}: a score that failed has no value and no "
                f"advantage; drop the member or its group before this (rewards: {list(rewards_G)})"
            )
