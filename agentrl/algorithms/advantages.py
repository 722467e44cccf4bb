"""Advantages: how much better than its group a trajectory was. Pure functions of a group's rewards.

All raise `ValueError` on a reward that is not a finite number (a failed score is NaN: it must have been filtered
before), and all give exact zeros when every reward is the same, a group of one included: there is nothing to compare.

Dimension suffixes: G members of a group; B rows and T columns of a batch.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from agentrl.arrays import FloatArray, MaskArray
from agentrl.batch import TrainBatch

STD_EPSILON = 1e-6
"""Added to the standard deviation, so that rewards that differ by rounding alone give advantages near zero."""

Advantage = Callable[[Sequence[float]], list[float]]
"""Rewards of a group's members to their advantages."""


def group_std(rewards_G: Sequence[float]) -> list[float]:
    """(r_i - mean r) / std r, with the population's standard deviation.

    GRPO with outcome supervision: DeepSeekMath (arXiv:2402.03300), section 4.1.2.
    """
    centred_G = group_mean(rewards_G)
    std = math.sqrt(math.fsum(a * a for a in centred_G) / len(centred_G)) if centred_G else 0.0
    return [a / (std + STD_EPSILON) for a in centred_G]


def group_mean(rewards_G: Sequence[float]) -> list[float]:
    """r_i - mean r: no division by the spread, which favours tasks that are nearly always or nearly never solved.

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


def generalized(batch: TrainBatch, values_BT: FloatArray, lam: float) -> FloatArray:
    """A_t = sum_k lam^k d_(t+k), with d_t = r_t + V_(t+1) - V_t, over the loss tokens t of each sample, one by one.

    Generalized advantage estimation (arXiv:1506.02438), equation 16, without a discount: a reward counts as much for
    the first token of an episode as for the last. `advantages_BT` of the batch are the rewards; a sample has all of it
    at its last loss token, where nothing is to be expected any more. Shape BT, 0 where there is no loss.
    """
    rows, columns = batch.tokens_BT.shape
    advantages_BT = np.zeros((rows, columns), np.float32)
    segment_B = np.zeros(rows, np.int64)  # of the token after, with its value and its advantage
    value_B, advantage_B = np.zeros(rows), np.zeros(rows)
    for t in reversed(range(columns)):
        carries_B = batch.loss_mask_BT[:, t] == 1
        last_B = batch.segment_ids_BT[:, t] != segment_B
        reward_B = np.where(last_B, batch.advantages_BT[:, t], 0.0)
        delta_B = reward_B + np.where(last_B, 0.0, value_B) - values_BT[:, t]
        advantage_B = np.where(carries_B, delta_B + lam * np.where(last_B, 0.0, advantage_B), advantage_B)
        value_B = np.where(carries_B, values_BT[:, t], value_B)
        segment_B = np.where(carries_B, batch.segment_ids_BT[:, t], segment_B)
        advantages_BT[:, t] = np.where(carries_B, advantage_B, 0.0)
    return advantages_BT


def whitened(advantages_BT: FloatArray, loss_mask_BT: MaskArray) -> FloatArray:
    """(A - mean A) / std A over the loss tokens of a batch, with the population's standard deviation; 0 elsewhere."""
    loss_BT = loss_mask_BT == 1
    found_N = advantages_BT[loss_BT].astype(np.float64)
    scaled_BT = (advantages_BT - found_N.mean()) / (found_N.std() + STD_EPSILON)
    return np.where(loss_BT, scaled_BT, 0.0).astype(np.float32)


def _constant(rewards_G: Sequence[float]) -> bool:
    return len(set(rewards_G)) <= 1


def _check(rewards_G: Sequence[float]) -> None:
    for member, reward in enumerate(rewards_G):
        if not math.isfinite(reward):
            raise ValueError(
                f"member {member} of the group has reward {reward}: a score that failed has no value and no "
                f"advantage; drop the member or its group before this (rewards: {list(rewards_G)})"
            )
