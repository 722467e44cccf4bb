"""Batches are packed into micro-batches without losing, cutting or mixing a sample."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.batch import TrainBatch, collate
from agentrl.testing.trainers import random_samples
from agentrl.trainers.packing import micro_batches, pack

seeds, counts = st.integers(0, 10**6), st.integers(1, 20)
lengths = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def batch_of(seed: int, count: int) -> TrainBatch:
    return collate(random_samples(50, seed=seed, count=count))


@given(seeds, counts, st.integers(1, 400), st.integers(1, 4))
def test_micro_batches_are_whole_samples_within_the_budget(
    seed: int, count: int, tokens: int, parts: int
) -> None:
    batch = batch_of(seed, count)
    found = micro_batches(batch, tokens, parts=parts)
    share = -(-len(batch.tokens_S) // parts)
    for micro_batch in found:
        lengths_M = micro_batch.samples.lengths_M
        assert micro_batch.tokens == lengths_M.sum()
        assert micro_batch.computed_tokens <= min(tokens, share) or len(lengths_M) == 1
        assert lengths_M.tolist() == sorted(lengths_M, reverse=True), (
            "attention pads segments of similar length"
        )
        assert np.array_equal(lengths_M, batch.lengths_M[micro_batch.numbers_M])
    numbers = [number for micro_batch in found for number in micro_batch.numbers_M.tolist()]
    assert sorted(numbers) == list(range(count))
    ordered = batch.ordered(numbers)
    assert np.array_equal(np.concatenate([one.samples.tokens_S for one in found]), ordered.tokens_S)
    assert np.array_equal(
        np.concatenate([one.samples.advantages_N for one in found]), ordered.advantages_N
    )


@given(lengths, st.integers(1, 60))
def test_a_sequence_is_as_long_as_allowed_or_one_sample(listed: list[int], tokens: int) -> None:
    sequences = pack(listed, tokens)
    assert sorted(item for sequence in sequences for item in sequence) == list(range(len(listed)))
    assert all(sum(listed[item] for item in one) <= tokens or len(one) == 1 for one in sequences)
    used = [sum(listed[item] for item in one) for one in sequences]
    assert used == sorted(used, reverse=True), "longer ones come first"


@given(lengths, st.integers(40, 80))
def test_packing_leaves_at_most_one_sequence_half_empty(listed: list[int], tokens: int) -> None:
    used = [sum(listed[item] for item in one) for one in pack(listed, tokens)]
    assert sum(2 * count <= tokens for count in used) <= 1


def test_impossible_budgets_say_so() -> None:
    with pytest.raises(ValueError, match="1 or more tokens"):
        micro_batches(batch_of(0, 1), 0)
