"""How a batch is cut into shards for ranks."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.batch import collate
from agentrl.testing.trainers import random_samples
from agentrl.trainers.batch_shards import gather, shard_batch
from tests.properties import examples


@given(
    seed=st.integers(0, 10**6),
    samples=st.integers(1, 40),
    ranks=st.integers(1, 5),
    tokens=st.integers(8, 400),
    minibatches=st.integers(1, 4),
)
@examples(60)
def test_every_rank_does_as_much_and_every_token_is_in_one_shard(seed, samples, ranks, tokens, minibatches):
    batch = collate(random_samples(50, seed=seed, count=samples), row_tokens=64)
    if batch.num_loss_tokens == 0:
        with pytest.raises(ValueError, match="no loss token"):
            shard_batch(batch, ranks=ranks, micro_batch_tokens=tokens, minibatch_count=minibatches)
        return
    shards = shard_batch(batch, ranks=ranks, micro_batch_tokens=tokens, minibatch_count=minibatches)
    assert len(shards) == ranks
    assert len({tuple(len(part) for part in shard) for shard in shards}) == 1
    counted = [p.rows for shard in shards for part in shard for p in part if p.counts]
    assert sum(rows.num_loss_tokens for rows in counted) == batch.num_loss_tokens
    sharded = Counter(float(x) for rows in counted for x in rows.rollout_logprobs_BT[rows.loss_mask_BT == 1])
    assert sharded == Counter(float(x) for x in batch.rollout_logprobs_BT[batch.loss_mask_BT == 1])


@given(seed=st.integers(0, 10**6), samples=st.integers(1, 40), ranks=st.integers(1, 5), tokens=st.integers(8, 400))
@examples(60)
def test_predictions_of_ranks_are_gathered_in_the_layout_of_the_batch(seed, samples, ranks, tokens):
    batch = collate(random_samples(50, seed=seed, count=samples), row_tokens=64)
    if batch.num_loss_tokens == 0:
        return
    shards = shard_batch(batch, ranks=ranks, micro_batch_tokens=tokens, minibatch_count=1)
    said = [[p.rows.rollout_logprobs_BT[p.rows.loss_mask_BT == 1] for p in shard[0]] for shard in shards]
    assert np.array_equal(gather(batch, shards, said), batch.rollout_logprobs_BT * batch.loss_mask_BT)


@given(seed=st.integers(0, 10**6), ranks=st.integers(2, 4))
@settings(max_examples=20, deadline=None)
def test_no_rank_has_more_than_one_micro_batch_more_to_compute_than_another(seed, ranks):
    batch = collate(random_samples(50, seed=seed, count=60), row_tokens=64)
    shards = shard_batch(batch, ranks=ranks, micro_batch_tokens=128, minibatch_count=1)
    loads = [sum(p.cost for p in shard[0]) for shard in shards]
    largest = max(p.cost for shard in shards for p in shard[0])
    assert max(loads) - min(loads) <= largest


def test_one_rank_gets_everything_in_order():
    batch = collate(random_samples(50, seed=1, count=20), row_tokens=64)
    (shard,) = shard_batch(batch, ranks=1, micro_batch_tokens=10**6, minibatch_count=1)
    (micro_batch,) = shard[0]
    assert np.array_equal(micro_batch.rows.tokens_BT, batch.tokens_BT[:, : micro_batch.rows.tokens_BT.shape[1]])
