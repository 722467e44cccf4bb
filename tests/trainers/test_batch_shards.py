"""How a batch is cut into shards for ranks."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agentrl.batch import TrainBatch, TrainingSample, collate, equal_parts
from agentrl.testing.trainers import random_samples
from agentrl.trainers.batch_shards import gather, gather_rows, minibatches_of, shard_batch
from agentrl.trainers.packing import MicroBatch
from agentrl.trainers.settings import TrainerSettings
from tests.properties import examples

seeds, counts = st.integers(0, 10**6), st.integers(1, 40)


def batch_of(seed: int, samples: int) -> TrainBatch:
    return collate(random_samples(50, seed=seed, count=samples))


def packed(micro_batch_tokens: int) -> TrainerSettings:
    return TrainerSettings(micro_batch_tokens=micro_batch_tokens)


@given(
    seed=seeds,
    samples=counts,
    ranks=st.integers(1, 5),
    tokens=st.integers(8, 400),
    minibatches=st.integers(1, 4),
)
@examples(60)
def test_every_rank_does_as_much_and_every_token_is_in_one_shard(
    seed, samples, ranks, tokens, minibatches
):
    batch = batch_of(seed, samples)
    if batch.num_loss_tokens == 0:
        with pytest.raises(ValueError, match="no loss token"):
            shard_batch(batch, packed(tokens), parts=ranks, minibatches=minibatches)
        return
    shards = shard_batch(batch, packed(tokens), parts=ranks, minibatches=minibatches)
    assert len(shards) == ranks
    assert len({tuple(len(part) for part in shard) for shard in shards}) == 1
    counted = [one.samples for shard in shards for part in shard for one in part if one.counts]
    assert sum(part.num_loss_tokens for part in counted) == batch.num_loss_tokens
    sharded = Counter(float(x) for part in counted for x in part.rollout_logprobs_N)
    assert sharded == Counter(float(x) for x in batch.rollout_logprobs_N)


@given(seed=seeds, samples=counts, ranks=st.integers(1, 5), tokens=st.integers(8, 400))
@examples(60)
def test_predictions_of_ranks_are_gathered_in_the_order_of_the_batch(seed, samples, ranks, tokens):
    batch = batch_of(seed, samples)
    if batch.num_loss_tokens == 0:
        return
    shards = shard_batch(batch, packed(tokens), parts=ranks)
    predicted = [[one.samples.rollout_logprobs_N for one in shard[0]] for shard in shards]
    assert np.array_equal(gather(batch, shards, predicted), batch.rollout_logprobs_N)


@given(seed=seeds, ranks=st.integers(2, 4), attention=st.sampled_from([0.0, 0.01, 1.0]))
@settings(max_examples=20, deadline=None)
def test_no_rank_has_more_than_one_micro_batch_more_to_compute_than_another(seed, ranks, attention):
    shards = shard_batch(batch_of(seed, 60), packed(128), parts=ranks, attention=attention)
    loads = [sum(one.cost(attention) for one in shard[0] if one.counts) for shard in shards]
    largest = max(one.cost(attention) for shard in shards for one in shard[0])
    assert max(loads) - min(loads) <= largest + 1e-6


def test_a_long_sample_costs_more_than_short_ones_of_as_many_tokens():
    def of_samples(length: int) -> MicroBatch:
        sample = TrainingSample(*([0] * length for _ in range(6)))
        return MicroBatch(
            collate([sample] * (64 // length)), np.arange(64 // length, dtype=np.int32)
        )

    long, short = of_samples(64), of_samples(8)
    assert long.cost(0.0) == short.cost(0.0) == 64
    assert long.cost(0.1) - 64 == pytest.approx(8 * (short.cost(0.1) - 64))


def test_one_rank_gets_everything():
    batch = batch_of(1, 20)
    (shard,) = shard_batch(batch, packed(10**6), parts=1)
    (micro_batch,) = shard[0]
    assert sorted(micro_batch.numbers_M) == list(range(20))


@given(seed=seeds, samples=counts, count=st.integers(1, 14))
def test_minibatches_partition_the_samples_in_order(seed, samples, count):
    batch = batch_of(seed, samples)
    parts = minibatches_of(batch, count)
    assert len(parts) == min(count, samples)
    assert all(part.num_samples for part in parts)
    assert np.array_equal(np.concatenate([part.tokens_S for part in parts]), batch.tokens_S)


@given(loss_tokens=st.lists(st.integers(1, 200), min_size=1, max_size=60), count=st.integers(1, 8))
def test_minibatches_have_as_many_loss_tokens_as_whole_samples_allow(loss_tokens, count):
    sizes = equal_parts(loss_tokens, count)
    assert sum(sizes) == len(loss_tokens)
    assert len(sizes) == min(count, len(loss_tokens))
    assert min(sizes) >= 1
    by_part = [sum(part) for part in np.split(np.array(loss_tokens), np.cumsum(sizes)[:-1])]
    exact = sum(loss_tokens) / len(sizes)
    # Each border is at most half a sample off, unless a part would have had no sample.
    assert max(abs(tokens - exact) for tokens in by_part) <= max(loss_tokens) * len(sizes)


def test_a_long_sample_beside_short_ones_is_half_of_the_batch():
    assert equal_parts([2, 2, 40, 38, 2], 2) == [3, 2]
    assert equal_parts([80, 1, 1], 2) == [1, 2]
    assert equal_parts([1, 1, 80], 2) == [2, 1]
    assert equal_parts([5], 4) == [1]


def test_no_minibatches_at_all_are_refused():
    with pytest.raises(ValueError, match="minibatches"):
        minibatches_of(batch_of(0, 1), 0)


@given(seed=seeds, samples=counts, ranks=st.integers(1, 4), minibatches=st.integers(1, 5))
def test_rows_of_numbers_come_back_in_the_order_of_the_batch(seed, samples, ranks, minibatches):
    batch = batch_of(seed, samples)
    assume(batch.num_loss_tokens > 0)
    numbered = replace(batch, advantages_N=np.arange(batch.num_loss_tokens, dtype=np.float32))
    shards = shard_batch(numbered, packed(64), parts=ranks, minibatches=minibatches)
    pairs = [
        [
            np.stack([one.samples.advantages_N, -one.samples.advantages_N])
            for part in shard
            for one in part
        ]
        for shard in shards
    ]
    gathered_2N = gather_rows(numbered, shards, minibatches, pairs)
    assert np.array_equal(gathered_2N, np.stack([numbered.advantages_N, -numbered.advantages_N]))
