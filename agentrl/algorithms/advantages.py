"""Advantages: how much better a trajectory, or one of its turns, was than expected. Pure functions.

The functions of a group's rewards raise `ValueError` on a reward that is not a finite number (a
failed score is NaN, and must be filtered before). They return exact zeros if all rewards are equal,
as in a group of one, or differ by rounding alone (`agentrl/tokens/arrays.py`; `scale` is that of
the numbers which rewards are sums of, where it is larger). Numbers are divided by no other spread
than their own, so an advantage is never larger than the root of their number.

Dimension suffixes: G members of a group; of a batch M samples, N loss tokens and J trajectories; K
steps of trajectories, which are tokens or turns.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Literal

import numpy as np

from agentrl.protocols.algorithm import MemberAdvantage
from agentrl.tokens.arrays import (
    ROUNDING_OF_SINGLES,
    FloatArray,
    IntArray,
    constant,
    floats,
    scale_of,
    settled,
)

STD_EPSILON = 1e-6
"""Added to a standard deviation before anything is divided by it."""

Deviation = Literal["population", "sample"]
"""A standard deviation: of n numbers, the root of the sum of squares over n, or over n - 1
(Bessel's correction).
"""
Advantage = Callable[[Sequence[float], float], list[float]]
"""Maps the rewards of a group's members, and their scale, to their advantages."""


def group_std(
    rewards_G: Sequence[float], scale: float = 0.0, deviation: Deviation = "population"
) -> list[float]:
    """(r_i - mean r) / std r.

    GRPO with outcome supervision: DeepSeekMath (arXiv:2402.03300), section 4.1.2, which does not
    say which standard deviation.
    """
    centred_G = group_mean(rewards_G, scale)
    std = _root_mean_square(centred_G, deviation)
    return [a / (std + STD_EPSILON) for a in centred_G]


def group_mean(rewards_G: Sequence[float], scale: float = 0.0) -> list[float]:
    """r_i - mean r. Dividing by the spread too would favour tasks that are nearly always or nearly
    never solved.

    Dr. GRPO: "Understanding R1-Zero-Like Training" (arXiv:2503.20783), section 3.2.
    """
    _check_finite(rewards_G)
    if constant(rewards_G, scale):
        return [0.0] * len(rewards_G)
    mean = math.fsum(rewards_G) / len(rewards_G)
    return [r - mean for r in rewards_G]


def leave_one_out(rewards_G: Sequence[float], scale: float = 0.0) -> list[float]:
    """r_i - mean of the other members' rewards: an unbiased baseline.

    RLOO: "Back to Basics" (arXiv:2402.14740), section 3.3.
    """
    _check_finite(rewards_G)
    if constant(rewards_G, scale):
        return [0.0] * len(rewards_G)
    total, others = math.fsum(rewards_G), len(rewards_G) - 1
    return [r - (total - r) / others for r in rewards_G]


Comparison = Literal["none", "group_mean", "group_std", "leave_one_out"]
"""The baseline of a return: none, or the returns of the group, with or without itself."""
_ADVANTAGES: dict[Comparison, Advantage] = {
    "none": lambda rewards_G, scale: list(rewards_G),
    "group_mean": group_mean,
    "group_std": group_std,
    "leave_one_out": leave_one_out,
}


def compared(
    returns_G: Sequence[float],
    with_what: Comparison,
    scale: float = 0.0,
    deviation: Deviation = "population",
) -> list[float]:
    """The advantage of each return by one of the functions above."""
    _check_finite(returns_G)
    if with_what == "group_std":
        return group_std(returns_G, scale, deviation)
    return _ADVANTAGES[with_what](returns_G, scale)


def returns_to_go(rewards: Sequence[float], gamma: float) -> list[float]:
    """G_k = r_k + gamma G_(k+1) of each turn: what came after it, as a turn cannot change what came
    before.
    """
    return list(accumulate(reversed(rewards), lambda later, reward: reward + gamma * later))[::-1]


def compared_by_turn(
    turn_rewards_G: Sequence[Sequence[float]],
    with_what: Comparison,
    gamma: float,
    baseline: Literal["episode", "turn"],
    deviation: Deviation = "population",
) -> list[list[float]]:
    """The advantages of each member's turns: their returns to go, less a baseline.

    The baseline of a turn is that of whole returns (`episode`), or of the returns to go from turns
    with the same number (`turn`), which are 0 for episodes that were over by then. Only so is it
    unbiased: the mean over the episodes that came that far depends on when the policy stops (verl
    issue 7244). With `group_std`, all are divided by their own spread: the root mean square, over
    all turns of the group, of what is left of them after the baseline. In a group of single turns
    that is the standard deviation of its returns. The spread of whole returns would be that of
    other numbers: it is 0 where the members have earned the same in different turns.
    """
    togo_G = [returns_to_go(rewards, gamma) for rewards in turn_rewards_G]
    scale = scale_of(chain(*turn_rewards_G, *togo_G))
    left_G = _subtract_baselines(
        togo_G, "group_mean" if with_what == "group_std" else with_what, baseline, scale
    )
    left_G = [[settled(a, scale) for a in left] for left in left_G]
    if with_what != "group_std":
        return left_G
    spread = _root_mean_square(list(chain(*left_G)), deviation)
    return [[a / (spread + STD_EPSILON) for a in left] for left in left_G]


def _subtract_baselines(
    togo_G: Sequence[Sequence[float]],
    with_what: Comparison,
    baseline: Literal["episode", "turn"],
    scale: float,
) -> list[list[float]]:
    """The returns to go of each member's turns, less their baselines."""
    if baseline == "episode":
        returns_G = [togo[0] if togo else 0.0 for togo in togo_G]
        advantages_G = compared(returns_G, with_what, scale)
        baselines_G = [
            own - advantage for own, advantage in zip(returns_G, advantages_G, strict=True)
        ]
        return [[g - b for g in togo] for togo, b in zip(togo_G, baselines_G, strict=True)]
    turns = range(max(map(len, togo_G), default=0))
    padded_KG = [
        compared([togo[k] if k < len(togo) else 0.0 for togo in togo_G], with_what, scale)
        for k in turns
    ]
    return [[padded_KG[k][i] for k in range(len(togo))] for i, togo in enumerate(togo_G)]


def compared_by_state(
    turn_rewards_G: Sequence[Sequence[float]],
    states_G: Sequence[Sequence[Hashable]],
    gamma: float,
    *,
    by_std: bool,
    deviation: Deviation = "population",
) -> list[list[float]]:
    """The advantages of turns among all turns of the group that began in the same state: their
    returns to go, compared.

    A turn whose state occurs once gets 0. GiGPO (arXiv:2505.10978), equations 6 to 8.
    """
    togo_G = [returns_to_go(rewards, gamma) for rewards in turn_rewards_G]
    scale = scale_of(chain(*turn_rewards_G, *togo_G))
    with_what: Comparison = "group_std" if by_std else "group_mean"
    alike = defaultdict(list)
    for togo, states in zip(togo_G, states_G, strict=True):
        for g, state in zip(togo, states, strict=True):
            alike[state].append(g)
    centred = {
        state: iter(compared(returns, with_what, scale, deviation))
        for state, returns in alike.items()
    }
    return [[next(centred[state]) for state in states] for states in states_G]


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of trajectories, end to end: tokens, or turns.

    `discounts_K` lie between a step and the next. `lengths_J` is the number of steps of each
    trajectory, and `ends_J` the value after its last one: 0 where the episode ended by itself.
    """

    rewards_K: FloatArray
    values_K: FloatArray
    discounts_K: FloatArray
    lengths_J: IntArray
    ends_J: FloatArray


def generalized(steps: Steps, lam_J: FloatArray) -> FloatArray:
    """A_k = d_k + discount_k lambda A_(k+1), with d_k = r_k + discount_k V_(k+1) - V_k, for each
    step.

    Generalized advantage estimation (arXiv:1506.02438), equation 16, with a lambda for each
    trajectory.
    """
    # All trajectories at once, from their last steps backwards; the longest first, so that the rest
    # are a slice.
    order_J = np.argsort(-steps.lengths_J, kind="stable")[: int((steps.lengths_J > 0).sum())]
    lengths_J, last_J = steps.lengths_J[order_J], np.cumsum(steps.lengths_J)[order_J] - 1
    next_K = np.append(steps.values_K[1:], 0.0)
    next_K[last_J] = steps.ends_J[order_J]
    advantages_K = steps.rewards_K + steps.discounts_K * next_K - steps.values_K
    for back in range(1, int(lengths_J.max(initial=0))):
        count = int(np.searchsorted(-lengths_J, -back))
        here = last_J[:count] - back
        advantages_K[here] += (
            steps.discounts_K[here] * lam_J[order_J[:count]] * advantages_K[here + 1]
        )
    return floats(advantages_K)


def whitened(advantages_N: FloatArray, scale: float = 0.0) -> FloatArray:
    """(A - mean A) / std A over the loss tokens of a batch, with the population standard deviation.

    Exact zeros if all are equal. `scale`: of the rewards and values that they are sums of, in
    single precision.
    """
    found_N = advantages_N.astype(np.float64)
    if constant((float(found_N.min()), float(found_N.max())), scale, ROUNDING_OF_SINGLES):
        return floats(np.zeros_like(found_N))
    return floats((found_N - found_N.mean()) / (found_N.std() + STD_EPSILON))


def normalised(
    advantages: Sequence[Sequence[MemberAdvantage]], scopes: Sequence[str]
) -> list[list[MemberAdvantage]]:
    """(A - mean A) / std A over all advantages of the groups of one scope, with the population
    standard deviation.

    A trajectory counts once, or once for each of its turns. A scope whose advantages are all equal
    gets exact zeros.
    """
    spread: dict[str, tuple[float, float]] = {}
    for scope in dict.fromkeys(scopes):
        groups = [
            of_group for of_group, own in zip(advantages, scopes, strict=True) if own == scope
        ]
        values = numbers_in(list(chain(*groups)))
        mean = math.fsum(values) / max(1, len(values))
        spread[scope] = (
            mean,
            0.0 if constant(values) else _root_mean_square([a - mean for a in values]),
        )

    def scaled(member: MemberAdvantage, mean: float, std: float) -> MemberAdvantage:
        if isinstance(member, float | int):
            return (member - mean) / (std + STD_EPSILON) if std else 0.0
        return [(a - mean) / (std + STD_EPSILON) if std else 0.0 for a in member]

    return [
        [scaled(member, *spread[scope]) for member in of_group]
        for of_group, scope in zip(advantages, scopes, strict=True)
    ]


def numbers_in(advantages: Sequence[MemberAdvantage]) -> list[float]:
    """All numbers of members' advantages: one of each member, or one of each of its turns."""
    return [
        a
        for member in advantages
        for a in ([member] if isinstance(member, float | int) else member)
    ]


def _root_mean_square(values: Sequence[float], deviation: Deviation = "population") -> float:
    count = max(1, len(values) - (deviation == "sample"))
    return math.sqrt(math.fsum(a * a for a in values) / count)


def _check_finite(rewards_G: Sequence[float]) -> None:
    for member, reward in enumerate(rewards_G):
        if not math.isfinite(reward):
            raise ValueError(
                f"member {member} of the group has reward {reward}: a score that failed has no"
                " value and no advantage; drop the member or its group before this (rewards:"
                f" {list(rewards_G)})"
            )
