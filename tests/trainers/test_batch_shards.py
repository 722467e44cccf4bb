"""How a batch is dealt to ranks."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.batch import collate
from agentrl.testing.trainers import random_samples
from agentrl.trainers.batch_shards import deal, gather


@given(
    seed=st.integers(0, 10**6),
    samples=st.integers(1, 40),
    ranks=st.integers(1, 5),
    tokens=st.integers(8, 400),
    minibatches=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_every_rank_does_as_much_and_every_token_is_dealt_once(seed, samples, ranks, tokens, minibatches):
    batch = collate(random_samples(50, seed=seed, count=samples), row_tokens=64)
    if batch.num_loss_tokens == 0:
        with pytest.raises(ValueError, match="no loss token"):
            deal(batch, ranks=ranks, micro_batch_tokens=tokens, minibatch_count=minibatches)
        return
    shares = deal(batch, ranks=ranks, micro_batch_tokens=tokens, minibatch_count=minibatches)
    assert len(shares) == ranks
    assert len({tuple(len(part) for part in share) for share in shares}) == 1
    counted = [p.rows for share in shares for part in share for p in part if p.counts]
    assert sum(rows.num_loss_tokens for rows in counted) == batch.num_loss_tokens
    dealt = Counter(float(x) for rows in counted for x in rows.rollout_logprobs_BT[rows.loss_mask_BT == 1])
    assert dealt == Counter(float(x) for x in batch.rollout_logprobs_BT[batch.loss_mask_BT == 1])


@given(seed=st.integers(0, 10**6), samples=st.integers(1, 40), ranks=st.integers(1, 5), tokens=st.integers(8, 400))
@settings(max_examples=60, deadline=None)
def test_what_ranks_say_of_their_portions_is_laid_as_the_batch_is(seed, samples, ranks, tokens):
    batch = collate(random_samples(50, seed=seed, count=samples), row_tokens=64)
    if batch.num_loss_tokens == 0:
        return
    shares = deal(batch, ranks=ranks, micro_batch_tokens=tokens, minibatch_count=1)
    said = [[p.rows.rollout_logprobs_BT[p.rows.loss_mask_BT == 1] for p in share[0]] for share in shares]
    assert np.array_equal(gather(batch, shares, said), batch.rollout_logprobs_BT * batch.loss_mask_BT)


@given(seed=st.integers(0, 10**6), ranks=st.integers(2, 4))
@settings(max_examples=20, deadline=None)
def test_no_rank_has_more_than_one_portion_more_to_compute_than_another(seed, ranks):
    batch = collate(random_samples(50, seed=seed, count=60), row_tokens=64)
    shares = deal(batch, ranks=ranks, micro_batch_tokens=128, minibatch_count=1)
    loads = [sum(p.cost for p in share[0]) for share in shares]
    largest = max(p.cost for share in shares for p in share[0])
    assert max(loads) - min(loads) <= largest


def test_one_rank_gets_everything_in_order():
    batch = collate(random_samples(50, seed=1, count=20), row_tokens=64)
    (share,) = deal(batch, ranks=1, micro_batch_tokens=10**6, minibatch_count=1)
    (portion,) = share[0]
    assert np.array_equal(portion.rows.tokens_BT, batch.tokens_BT[:, : portion.rows.tokens_BT.shape[1]])
