"""Whatever asks whether numbers differ has one tolerance, relative to their scale."""

import functools
import math
import operator
import random
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.dpo import ranked_pairs
from agentrl.algorithms.grpo import Grpo
from agentrl.algorithms.sft import RejectionSampling
from agentrl.estimation.advisors import explained_variance
from agentrl.observe.health import disagreement
from agentrl.scoring.part import RewardPart
from agentrl.scoring.pipeline import total
from agentrl.tasks.levels import Levels
from agentrl.testing.rewards import trajectory
from agentrl.tokens.arrays import above, at_least, constant, floats, settled
from agentrl.trajectory import Group, Score

NOISY = (0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2)


def group(*rewards: float) -> Group:
    played = tuple(
        replace(trajectory("x", rewards=[1.0]), id=str(number)) for number in range(len(rewards))
    )
    return Group(played[0].task, played, tuple(map(Score, rewards)))


@given(
    st.lists(st.floats(-1, 1), min_size=1, max_size=200),
    st.integers(-12, 12),
    st.randoms(use_true_random=False),
)
def test_sums_of_the_same_numbers_in_another_order_are_equal(
    numbers: list[float], power: int, rng: random.Random
) -> None:
    scaled = [10.0**power * number for number in numbers]
    other = rng.sample(scaled, len(scaled))
    scale = max(map(abs, scaled))
    assert constant((sum(scaled), sum(other)), scale)
    assert settled(sum(scaled) - sum(other), len(scaled) * scale) == 0.0


@given(st.floats(1e-12, 1e12), st.sampled_from([-1, 1]), st.floats(1e-9, 1.0))
def test_a_billionth_is_a_difference_at_any_scale(size: float, sign: int, more: float) -> None:
    low, high = sorted((sign * size, sign * size * (1 + more)))
    assert not constant((low, high))
    assert above(high, low)
    assert not at_least(low, high)


def test_what_is_equal_but_for_rounding_is_equal_and_what_is_not_finite_is_not() -> None:
    assert constant(NOISY)
    assert constant([])
    assert constant([math.inf, math.inf])
    assert at_least(0.7 + 0.2 + 0.1, 1.0)  # 0.9999999999999999
    assert not at_least(math.nan, 1.0)
    assert not at_least(-math.inf, 1.0)
    assert not constant([0.0, math.inf])
    assert settled(math.inf, math.inf) == math.inf
    assert constant([1e6, 1e6 + 1e-7])
    assert not constant([1e6, 1e6 + 1e-3])


def test_a_score_that_misses_success_at_by_rounding_is_a_success() -> None:
    part = RewardPart(None, "judge", success_at=0.8)
    mean = (0.4 + 1.0 + 1.0) / 3  # 0.7999999999999999
    assert part.verdict(Score(mean)) is True
    assert part.verdict(Score(0.8 - 1e-6)) is False


def test_a_group_whose_rewards_differ_by_rounding_is_not_mixed_and_gives_no_pair() -> None:
    noisy, true = group(*NOISY), group(0.3, 0.3 + 1e-6, 0.3, 0.3)
    assert not noisy.has_signal
    assert true.has_signal
    assert Grpo().advantages(noisy) == [0.0] * 4
    for which in ("best_worst", "all"):
        assert ranked_pairs(list(NOISY), which, "hard") == []
    assert len(ranked_pairs(list(true.rewards_G), "best_worst", "hard")) == 1
    keep = {
        name: RejectionSampling(RejectionSampling.Config(keep=name))
        for name in ("best", "above_mean")
    }
    assert keep["best"].advantages(noisy) == [1.0] * 4
    assert keep["above_mean"].advantages(noisy) == [0.0] * 4


def test_parts_that_cancel_out_leave_an_exact_zero() -> None:
    parts = [
        RewardPart(lambda trajectory: 0.0, name, weight)
        for name, weight in (("a", 3.0), ("b", -1.0))
    ]
    assert 3 * 0.1 - 0.3 != 0
    assert total(parts, [Score(0.1), Score(0.3)]).value == 0.0
    shaped = trajectory(["x"] * 4, rewards=[0.1, 0.2, -0.3, 5e-17])
    assert shaped.env_return == 0.0
    assert replace(shaped, turns=shaped.turns[:2]).env_return == 0.1 + 0.2


def test_a_turn_that_gets_the_rest_of_a_score_gets_no_rounding() -> None:
    earned = [0.1] * 10
    added = functools.reduce(operator.add, earned)  # `sum` rounds once from Python 3.12 on
    assert added != math.fsum(earned)
    played = trajectory(["x"] * 11, rewards=earned)
    (rewards,) = Group(played.task, (played,), (Score(added, turns=tuple(earned)),)).turn_rewards_G
    assert list(rewards) == [*earned, 0.0]


def test_a_critic_explains_nothing_of_returns_that_differ_by_rounding() -> None:
    returns_N, values_N = (
        floats(np.array([0.1 + 0.2, 0.3, np.float32(0.3) * (1 + 1e-7)])),
        floats(np.array([0.0, 1.0, 2.0])),
    )
    assert returns_N.std() > 0
    assert explained_variance(values_N, returns_N) == 0.0


def test_episodes_reach_a_level_and_parts_agree_but_for_rounding() -> None:
    levels = Levels(Levels.Config(levels=({"size": 1}, {"size": 2}), success_at=1.0), "env", 0)
    levels.observe(0, levels._levels[0].task(0), [0.7 + 0.2 + 0.1] * 4)
    assert levels.metrics()["curriculum/0/success"] == 1.0
    told = group(0.0, 0.0)
    parts = [{"a": 0.3, "b": 1.0}, {"a": 0.1 + 0.2, "b": 0.0}]
    scores = tuple(replace(score, parts=own) for score, own in zip(told.scores, parts, strict=True))
    assert disagreement([replace(told, scores=scores)]) is None
