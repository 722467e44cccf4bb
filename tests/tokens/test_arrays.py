"""Immutable arrays: what they share, and that nothing can change them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.tokens.arrays import GrowingInts, floats, ints, mask
from agentrl.trajectory import Completion, Turn


@pytest.mark.parametrize("make", [ints, floats, mask])
def test_what_is_made_of_a_sequence_cannot_be_written(make):
    array = make([0, 1, 1])
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    assert np.shares_memory(make(array[1:]), array)


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=90), max_size=12))
def test_values_that_were_looked_at_stay_while_others_are_appended(parts):
    growing, expected, seen = GrowingInts(), [], []
    for part in parts:
        growing.append(ints(part))
        expected += part
        seen.append((growing.values, list(expected)))
    assert len(growing) == len(expected)
    for values, then in seen:
        assert values.tolist() == then
        assert not values.flags.writeable


def test_completions_and_turns_are_equal_by_value():
    def turn(last: int) -> Turn:
        return Turn(
            (1, 2), Completion([3, last], [-0.5, -1.0], [0, 1], "stop"), 1.0, {"success": True}
        )

    assert turn(4) == turn(4)
    assert turn(4) != turn(5)
    assert turn(4).completion != "a completion"
    with pytest.raises(TypeError, match="unhashable"):
        hash(turn(4))


def test_a_completion_needs_a_logprob_and_a_version_for_each_token():
    with pytest.raises(ValueError, match="2 tokens, 1 logprobs, 2 versions"):
        Completion([3, 4], [-0.5], [0, 1], "stop")
