"""Advantages: how much better a trajectory, or one of its turns, was than expected. Pure functions.

The functions of a group's rewards raise `ValueError` on a reward that is not a finite number (a failed score is NaN,
and must be filtered before). They return exact zeros if all rewards are equal, as in a group of one.

Dimension suffixes: G members of a group; of a batch M samples, N loss tokens and J trajectories; K steps of
trajectories, which are tokens or turns.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Literal

import numpy as np

from agentrl.arrays import FloatArray, IntArray, floats
from agentrl.protocols import MemberAdvantage

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


Comparison = Literal["none", "group_mean", "group_std", "leave_one_out"]
"""What a return is compared with: nothing, or the returns of the group, with or without itself."""
_ADVANTAGES: dict[Comparison, Advantage] = {
    "none": list,
    "group_mean": group_mean,
    "group_std": group_std,
    "leave_one_out": leave_one_out,
}


def compared(returns_G: Sequence[float], with_what: Comparison) -> list[float]:
    """The advantage of each return by one of the functions above."""
    _check(returns_G)
    return _ADVANTAGES[with_what](returns_G)


def returns_to_go(rewards: Sequence[float], gamma: float) -> list[float]:
    """G_k = r_k + gamma G_(k+1) of each turn: what came after it, as a turn cannot change what came before."""
    return list(accumulate(reversed(rewards), lambda later, reward: reward + gamma * later))[::-1]


def compared_by_turn(
    turn_rewards_G: Sequence[Sequence[float]], with_what: Comparison, gamma: float, baseline: Literal["episode", "turn"]
) -> list[list[float]]:
    """The advantages of each member's turns: their returns to go, less a baseline.

    The baseline of a turn is that of whole returns (`episode`), or of the returns to go from turns with the same number
    (`turn`), which are 0 for episodes that were over by then. Only so is it unbiased: the mean over the episodes that
    came that far depends on when the policy stops (verl issue 7244). With `group_std`, all are divided by the standard
    deviation of the group's returns.
    """
    togo_G = [returns_to_go(rewards, gamma) for rewards in turn_rewards_G]
    returns_G = [togo[0] if togo else 0.0 for togo in togo_G]
    centred: Comparison = "group_mean" if with_what == "group_std" else with_what
    scale = 1.0
    if with_what == "group_std":
        scale = math.sqrt(math.fsum(a * a for a in group_mean(returns_G)) / len(returns_G)) + STD_EPSILON
    if baseline == "episode":
        advantages_G = compared(returns_G, centred)
        baselines_G = [own - advantage for own, advantage in zip(returns_G, advantages_G, strict=True)]
        return [[(g - b) / scale for g in togo] for togo, b in zip(togo_G, baselines_G, strict=True)]
    turns = range(max(map(len, togo_G), default=0))
    padded_KG = [compared([togo[k] if k < len(togo) else 0.0 for togo in togo_G], centred) for k in turns]
    return [[padded_KG[k][i] / scale for k in range(len(togo))] for i, togo in enumerate(togo_G)]


def compared_by_state(
    turn_rewards_G: Sequence[Sequence[float]], states_G: Sequence[Sequence[Hashable]], gamma: float, *, by_std: bool
) -> list[list[float]]:
    """The advantages of turns among all turns of the group that began in the same state: their returns to go, compared.

    A turn whose state occurs once gets 0. GiGPO (arXiv:2505.10978), equations 6 to 8.
    """
    togo_G = [returns_to_go(rewards, gamma) for rewards in turn_rewards_G]
    alike = defaultdict(list)
    for togo, states in zip(togo_G, states_G, strict=True):
        for g, state in zip(togo, states, strict=True):
            alike[state].append(g)
    centred = {
        state: iter(compared(returns, "group_std" if by_std else "group_mean")) for state, returns in alike.items()
    }
    return [[next(centred[state]) for state in states] for states in states_G]


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of trajectories, end to end: tokens, or turns.

    `discounts_K` lie between a step and the next. `lengths_J` is the number of steps of each trajectory, and `ends_J`
    the value after its last one: 0 where the episode ended by itself.
    """

    rewards_K: FloatArray
    values_K: FloatArray
    discounts_K: FloatArray
    lengths_J: IntArray
    ends_J: FloatArray


def generalized(steps: Steps, lam_J: FloatArray) -> FloatArray:
    """A_k = d_k + discount_k lambda A_(k+1), with d_k = r_k + discount_k V_(k+1) - V_k, for each step.

    Generalized advantage estimation (arXiv:1506.02438), equation 16, with a lambda for each trajectory.
    """
    # All trajectories at once, from their last steps backwards; the longest first, so that the rest are a slice.
    order_J = np.argsort(-steps.lengths_J, kind="stable")[: int((steps.lengths_J > 0).sum())]
    lengths_J, last_J = steps.lengths_J[order_J], np.cumsum(steps.lengths_J)[order_J] - 1
    next_K = np.append(steps.values_K[1:], 0.0)
    next_K[last_J] = steps.ends_J[order_J]
    advantages_K = steps.rewards_K + steps.discounts_K * next_K - steps.values_K
    for back in range(1, int(lengths_J.max(initial=0))):
        count = int(np.searchsorted(-lengths_J, -back))
        here = last_J[:count] - back
        advantages_K[here] += steps.discounts_K[here] * lam_J[order_J[:count]] * advantages_K[here + 1]
    return floats(advantages_K)


def whitened(advantages_N: FloatArray) -> FloatArray:
    """(A - mean A) / std A over the loss tokens of a batch, with the population standard deviation."""
    found_N = advantages_N.astype(np.float64)
    return floats((advantages_N - found_N.mean()) / (found_N.std() + STD_EPSILON))


def normalised(advantages: Sequence[Sequence[MemberAdvantage]], scopes: Sequence[str]) -> list[list[MemberAdvantage]]:
    """(A - mean A) / std A over all advantages of the groups of one scope, with the population standard deviation.

    A trajectory counts once, or once for each of its turns. A scope whose advantages are all equal gets exact zeros.
    """
    spread: dict[str, tuple[float, float]] = {}
    for scope in dict.fromkeys(scopes):
        groups = [of_group for of_group, own in zip(advantages, scopes, strict=True) if own == scope]
        values = [a for member in chain(*groups) for a in ([member] if isinstance(member, float | int) else member)]
        mean = math.fsum(values) / len(values)
        std = 0.0 if _constant(values) else math.sqrt(math.fsum((a - mean) ** 2 for a in values) / len(values))
        spread[scope] = (values[0] if _constant(values) else mean, std)

    def scaled(member: MemberAdvantage, mean: float, std: float) -> MemberAdvantage:
        if isinstance(member, float | int):
            return (member - mean) / (std + STD_EPSILON)
        return [(a - mean) / (std + STD_EPSILON) for a in member]

    return [
        [scaled(member, *spread[scope]) for member in of_group]
        for of_group, scope in zip(advantages, scopes, strict=True)
    ]


def _constant(rewards_G: Sequence[float]) -> bool:
    return len(set(rewards_G)) <= 1


def _check(rewards_G: Sequence[float]) -> None:
    for member, reward in enumerate(rewards_G):
        if not math.isfinite(reward):
            raise ValueError(
                f"member {member} of the group has reward {reward}: a score that failed has no value and no "
                f"advantage; drop the member or its group before this (rewards: {list(rewards_G)})"
            )
