"""Batches are packed into rows of micro-batches without losing, cutting or mixing a sample."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentrl.batch import TrainBatch, TrainingSample, collate
from agentrl.placement.rows import lockstep_ratio
from agentrl.testing.trainers import random_samples
from agentrl.tokens.arrays import floats, ints, mask
from agentrl.trainers.packing import micro_batches

seeds, counts = st.integers(0, 10**6), st.integers(1, 20)


def batch_of(seed: int, count: int) -> TrainBatch:
    return collate(random_samples(50, seed=seed, count=count))


@example(seed=202, count=1, tokens=1, parts=1, attention=0.0)  # none of its tokens is trained
@given(seeds, counts, st.integers(1, 400), st.integers(1, 4), st.sampled_from([0.0, 0.1]))
def test_micro_batches_are_whole_samples_within_the_budget(
    seed: int, count: int, tokens: int, parts: int, attention: float
) -> None:
    batch = batch_of(seed, count)
    rows = micro_batches(batch, tokens, parts=parts, attention=attention)
    found = [micro_batch for row in rows for micro_batch in row]
    for row in rows:
        assert 1 <= len(row) <= parts
        longest = max(int(one.samples.lengths_M.max()) for one in row)
        assert all(one.computed_tokens <= max(tokens, longest) for one in row)
    for micro_batch in found:
        lengths_M = micro_batch.samples.lengths_M
        assert micro_batch.tokens == lengths_M.sum()
        assert len(lengths_M) == 1 or lengths_M[0] <= tokens or parts > 1
        assert lengths_M.tolist() == sorted(lengths_M, reverse=True), (
            "attention pads segments of similar length"
        )
        assert np.array_equal(lengths_M, batch.lengths_M[micro_batch.numbers_M])
    numbers = [number for micro_batch in found for number in micro_batch.numbers_M.tolist()]
    assert sorted(numbers) == batch.loss_tokens_M.nonzero()[0].tolist()
    if not numbers:
        return
    ordered = batch.ordered(numbers)
    assert np.array_equal(np.concatenate([one.samples.tokens_S for one in found]), ordered.tokens_S)
    assert np.array_equal(
        np.concatenate([one.samples.advantages_N for one in found]), ordered.advantages_N
    )


def test_a_batch_without_loss_tokens_has_no_micro_batches() -> None:
    (sample,) = random_samples(50, seed=0, count=1)
    silent = replace(sample, loss_mask=mask([False] * len(sample.loss_mask)))
    assert micro_batches(collate([silent, silent]), 100) == []


def test_groups_are_divided_where_ranks_would_wait_for_the_largest() -> None:
    """Three groups of eight, one twice as long, on four ranks: a group for a rank is 1.6 times."""
    rng, samples = np.random.default_rng(0), []
    for length in (100, 100, 200):
        prompt = rng.integers(0, 50, 40)
        for _ in range(8):
            ids = np.concatenate([prompt, rng.integers(0, 50, length)])
            loss, zeros = np.arange(len(ids)) >= 40, np.zeros(len(ids))
            samples.append(
                TrainingSample(
                    ints(ids),
                    mask(loss),
                    floats(zeros),
                    floats(zeros),
                    ints(np.where(loss, 0, -1)),
                    ints(zeros),
                )
            )
    (row,) = micro_batches(collate(samples), 10**6, parts=4)
    assert lockstep_ratio([[one.cost(0.0) for one in row]], 4) < 1.1
    (alone,) = micro_batches(collate(samples), 10**6)
    assert len(alone) == 1
    repeated = sum(one.computed_tokens for one in row) - alone[0].computed_tokens
    assert 0 < repeated <= 40 * 5


def test_samples_without_loss_are_not_computed() -> None:
    first, second, *_ = (one for one in random_samples(50, seed=1) if one.loss_mask.any())
    silent = replace(second, loss_mask=mask(second.loss_mask * 0))
    ((only,),) = micro_batches(collate([silent, first]), 10**6)
    assert only.numbers_M.tolist() == [1]


def test_impossible_budgets_say_so() -> None:
    with pytest.raises(ValueError, match="1 or more tokens"):
        micro_batches(batch_of(0, 1), 0)
