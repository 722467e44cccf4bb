"""No advantage is larger than the root of how many numbers were compared, whatever the rewards.

Numbers divided by their own spread cannot be. Numbers divided by the spread of others can: turns by
that of whole returns were 5e5 where the members had earned the same in different turns.
"""

import math
from collections.abc import Sequence
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.advantages import (
    compared_by_state,
    compared_by_turn,
    group_std,
    normalised,
    whitened,
)
from agentrl.algorithms.gigpo import Gigpo
from agentrl.algorithms.grpo import Grpo
from agentrl.algorithms.named import CISPO, GSPO, SAPO
from agentrl.algorithms.reinforce import ReinforcePlusPlus, ReturnBatchNorm
from agentrl.tokens.arrays import floats
from agentrl.trajectory import Completion, Group, Score, Task, Terminated, Trajectory, Turn
from tests.properties import examples

FLOAT = 1 + 1e-3
"""What rounding may add to a bound."""


@st.composite
def rewards_of_turns(draw: st.DrawFn) -> list[list[float]]:
    """Members whose rewards are close to each other, or equal but for rounding, at any scale."""
    scale = 10.0 ** draw(st.integers(-12, 12))
    offset = draw(st.sampled_from([0.0, 0.0, 1.0, 1e6]))
    values = st.sampled_from([0.0, 0.0, 0.25, 0.3, 0.1 + 0.2, -0.3, 1.0, 1.0 + 1e-9, 1e-13, -1.0])
    turns = st.lists(values.map(lambda value: scale * (offset + value)), min_size=1, max_size=4)
    return draw(st.lists(turns, min_size=1, max_size=5))


def flat(advantages: Sequence[float | Sequence[float]]) -> list[float]:
    return [
        a
        for member in advantages
        for a in ([member] if isinstance(member, float | int) else member)
    ]


def assert_bounded(advantages: Sequence[float], bound: float) -> None:
    assert all(math.isfinite(a) and abs(a) <= bound * FLOAT for a in advantages), (
        advantages,
        bound,
    )


@given(
    rewards_of_turns(), st.sampled_from(["episode", "turn"]), st.sampled_from([1.0, 0.9, 0.5, 0.0])
)
@examples(300)
def test_advantages_of_turns_are_bounded(turns_G, baseline, gamma) -> None:
    found = flat(compared_by_turn(turns_G, "group_std", gamma, baseline))
    assert_bounded(found, math.sqrt(len(found)))
    assert math.sqrt(math.fsum(a * a for a in found) / len(found)) <= FLOAT


@given(rewards_of_turns(), st.sampled_from([1.0, 0.9]), st.integers(1, 3))
@examples(300)
def test_advantages_among_turns_of_one_state_are_bounded(turns_G, gamma, states) -> None:
    states_G = [[number % states for number, _ in enumerate(turns)] for turns in turns_G]
    found_G = compared_by_state(turns_G, states_G, gamma, by_std=True)
    for state in range(states):
        own = [
            a
            for found, named in zip(found_G, states_G, strict=True)
            for a, s in zip(found, named, strict=True)
            if s == state
        ]
        assert_bounded(own, math.sqrt(max(0, len(own) - 1)))


@given(rewards_of_turns())
@examples(300)
def test_advantages_of_whole_rewards_are_bounded(turns_G) -> None:
    rewards_G = [sum(turns) for turns in turns_G]
    bound = math.sqrt(len(rewards_G) - 1)
    assert_bounded(group_std(rewards_G), bound)
    assert_bounded(flat(normalised([rewards_G], [""])), bound)
    numbers = list(chain(*turns_G))
    assert_bounded(whitened(floats(np.array(numbers))).tolist(), math.sqrt(len(numbers) - 1))


def group_of(turns_G: Sequence[Sequence[float]]) -> Group:
    """A group whose turns have earned this, all in one of two states."""
    task, completion = Task("e", 0), Completion((5,), (-1.0,), (0,), "stop")
    played = [
        Trajectory(
            str(member),
            task,
            tuple(
                Turn((1,), completion, reward, {}, state=str(k % 2))
                for k, reward in enumerate(turns)
            ),
            Terminated(),
        )
        for member, turns in enumerate(turns_G)
    ]
    return Group(
        task, tuple(played), tuple(Score(sum(turns), turns=tuple(turns)) for turns in turns_G)
    )


@pytest.mark.parametrize(
    "algorithm", [Grpo, GSPO, CISPO, SAPO, Gigpo, ReinforcePlusPlus, ReturnBatchNorm]
)
@given(
    rewards_of_turns(),
    st.booleans(),
    st.sampled_from(["episode", "turn"]),
    st.sampled_from([1.0, 0.5]),
)
def test_no_algorithm_has_an_advantage_beyond_the_root_of_its_numbers(
    algorithm, turns_G, togo, baseline, gamma
) -> None:
    settings = {"reward_to_go": togo, "gamma": gamma}
    settings |= (
        {"baseline": baseline, "advantage": "group_std"}
        if issubclass(algorithm.Config, Grpo.Config)
        else {}
    )
    made = algorithm(algorithm.Config.model_validate(settings))
    advantages = [made.advantages(group_of(turns_G))]
    if isinstance(made, ReinforcePlusPlus):
        advantages = made.normalized(advantages)
    turns = sum(map(len, turns_G))
    assert_bounded(flat(advantages[0]), math.sqrt(turns) * (2 if algorithm is Gigpo else 1))


def test_groups_with_equal_totals_get_bounded_advantages() -> None:
    """Returns to go of 0.5, 0.25, 0, less 0.5; their root mean square is sqrt(0.3125 / 3)."""
    spread = math.sqrt(0.3125 / 3)
    by_hand = [0.0, -0.25 / spread, -0.5 / spread]
    found = compared_by_turn([[0.25, 0.25, 0.0]] * 2, "group_std", 1.0, "episode")
    assert found == [pytest.approx(by_hand, abs=1e-4)] * 2
    assert compared_by_turn([[0.25, 0.25, 0.0]] * 2, "group_std", 1.0, "turn") == [[0.0] * 3] * 2
    late = compared_by_turn([[0.0, 1.0], [0.0, 0.0, 0.0, 1.0]], "group_std", 1.0, "turn")
    assert late == [[0.0, 0.0], pytest.approx([0.0, 0.0, math.sqrt(3), math.sqrt(3)], abs=1e-4)]


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=8))
def test_turns_of_episodes_of_one_turn_are_compared_as_whole_rewards_are(rewards) -> None:
    for baseline in ("episode", "turn"):
        by_turn = compared_by_turn([[reward] for reward in rewards], "group_std", 1.0, baseline)
        assert flat(by_turn) == pytest.approx(group_std(rewards), rel=1e-6, abs=1e-9)
