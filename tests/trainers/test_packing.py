"""Batches are packed into rows and micro-batches without losing, cutting or mixing a sample."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.batch import TrainBatch, collate
from agentrl.testing.trainers import random_samples
from agentrl.trainers.packing import MicroBatch, lay, micro_batches, pack

seeds, counts = st.integers(0, 10**6), st.integers(1, 20)
lengths = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def batch_of(seed: int, count: int) -> TrainBatch:
    return collate(random_samples(50, seed=seed, count=count))


def assert_laid_out(micro_batch: MicroBatch, batch: TrainBatch) -> None:
    """Each sample stands in one row in one piece, as it is in the batch, and padding is inert."""
    rows = lay(micro_batch)
    assert rows.tokens_BT.shape == micro_batch.shape
    assert sorted(set(rows.segments_BT.ravel().tolist()) - {0}) == sorted(micro_batch.numbers_M + 1)
    starts_M = np.cumsum(batch.lengths_M) - batch.lengths_M
    for number in micro_batch.numbers_M.tolist():
        in_row, columns = np.nonzero(rows.segments_BT == number + 1)
        length = int(batch.lengths_M[number])
        here = slice(int(starts_M[number]), int(starts_M[number]) + length)
        assert len(set(in_row)) == 1, "a sample crosses rows"
        assert columns.tolist() == list(range(columns[0], columns[0] + length)), "a sample is torn"
        assert rows.positions_BT[in_row, columns].tolist() == list(range(length))
        assert np.array_equal(rows.tokens_BT[in_row, columns], batch.tokens_S[here])
        assert np.array_equal(rows.loss_mask_BT[in_row, columns], batch.loss_mask_S[here])
    padding = rows.segments_BT == 0
    assert not rows.loss_mask_BT[padding].any()
    assert not rows.tokens_BT[padding].any()


@given(seeds, counts, st.integers(1, 90), st.integers(1, 400), st.integers(1, 4))
def test_micro_batches_are_all_rows_within_the_budget(
    seed: int, count: int, row_tokens: int, tokens: int, parts: int
) -> None:
    batch = batch_of(seed, count)
    found = micro_batches(batch, row_tokens, tokens, parts=parts)
    for micro_batch in found:
        rows, columns = micro_batch.shape
        assert micro_batch.cost == rows * columns
        assert micro_batch.cost <= tokens or rows == 1
        assert_laid_out(micro_batch, batch)
    numbers = [number for micro_batch in found for number in micro_batch.numbers_M.tolist()]
    assert sorted(numbers) == list(range(count))
    whole = sum(micro_batch.shape[0] for micro_batch in found) * found[0].shape[1]
    assert all(one.cost <= -(-whole // parts) or one.shape[0] == 1 for one in found)
    in_order = [x for micro_batch in found for x in micro_batch.samples.advantages_N.tolist()]
    assert in_order == batch.ordered(numbers).advantages_N.tolist()


@given(lengths, st.integers(1, 60))
def test_a_row_is_as_long_as_allowed_or_one_sample(listed: list[int], row_tokens: int) -> None:
    rows = pack(listed, row_tokens)
    assert sorted(item for row in rows for item in row) == list(range(len(listed)))
    assert all(sum(listed[item] for item in row) <= row_tokens or len(row) == 1 for row in rows)
    used = [sum(listed[item] for item in row) for row in rows]
    assert used == sorted(used, reverse=True), "longer rows come first"


@given(lengths, st.integers(40, 80))
def test_packing_leaves_at_most_one_row_half_empty(listed: list[int], row_tokens: int) -> None:
    used = [sum(listed[item] for item in row) for row in pack(listed, row_tokens)]
    assert sum(2 * tokens <= row_tokens for tokens in used) <= 1


def test_impossible_budgets_say_so() -> None:
    batch = batch_of(0, 1)
    with pytest.raises(ValueError, match="row_tokens"):
        micro_batches(batch, 0, 10)
    with pytest.raises(ValueError, match="micro-batches"):
        micro_batches(batch, 10, 0)
