"""A batch cut into shards for the ranks of a trainer: as many micro-batches for each, and nearly the same work."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.arrays import FloatArray
from agentrl.batch import TrainBatch, micro_batches, minibatches


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows that one rank computes at once. One that does not count is computed all the same, with a weight of zero: it
    keeps a rank that has nothing left to do in step with the others.
    """

    rows: TrainBatch
    counts: bool = True

    @property
    def cost(self) -> int:
        """Tokens that go through the model, padding included."""
        return int(self.rows.tokens_BT.size)


BatchShard = Sequence[Sequence[MicroBatch]]
"""What one rank computes in a step: the micro-batches of each minibatch."""


def shard_batch(batch: TrainBatch, *, ranks: int, micro_batch_tokens: int, minibatch_count: int) -> list[BatchShard]:
    """Cut a batch into minibatches and micro-batches, and give each rank its shard.

    In each minibatch every rank gets the same number of micro-batches; the tokens of two ranks differ by at most the
    largest micro-batch. Rows without a loss token are left out. One rank gets all, in order.

    Raises:
        ValueError: a minibatch has no loss token at all.
    """
    by_minibatch = [
        _shard_minibatch(part, ranks, micro_batch_tokens)
        for part in minibatches(batch, minibatch_count)
        if part.num_loss_tokens
    ]
    if not by_minibatch:
        raise ValueError("there is no loss token to train on")
    return [[by_rank[rank] for by_rank in by_minibatch] for rank in range(ranks)]


def gather(batch: TrainBatch, shards: Sequence[BatchShard], predictions: Sequence[Sequence[FloatArray]]) -> FloatArray:
    """What the ranks predicted for the loss tokens of each of their micro-batches, in the layout of the batch (shape
    BT); 0 where there is no loss.

    The batch was sharded as one minibatch, so each micro-batch is some of its rows.
    """
    gathered_BT = np.zeros(batch.tokens_BT.shape, np.float32)
    row_of = {int(segment): row for row, segment in enumerate(batch.segment_ids_BT[:, 0])}
    for shard, of_rank in zip(shards, predictions, strict=True):
        for micro_batch, predictions_N in zip(shard[0], of_rank, strict=True):
            if micro_batch.counts:
                rows = micro_batch.rows
                first, (count, columns) = row_of[int(rows.segment_ids_BT[0, 0])], rows.tokens_BT.shape
                gathered_BT[first : first + count, :columns][rows.loss_mask_BT == 1] = predictions_N
    return gathered_BT


def _shard_minibatch(part: TrainBatch, ranks: int, tokens: int) -> list[list[MicroBatch]]:
    if ranks > 1:  # so many micro-batches that no rank has to idle, where there are enough rows
        tokens = min(tokens, -(-int(part.tokens_BT.size) // ranks))
    found = [MicroBatch(rows) for rows in micro_batches(part, tokens) if rows.num_loss_tokens]
    if ranks == 1:
        return [found]
    by_rank: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    most = -(-len(found) // ranks)
    for micro_batch in sorted(found, key=lambda one: -one.cost):
        unfilled = [own for own in by_rank if len(own) < most]
        min(unfilled, key=lambda own: sum(one.cost for one in own)).append(micro_batch)
    filler = MicroBatch(min(found, key=lambda one: one.cost).rows, counts=False)
    return [own + [filler] * (most - len(own)) for own in by_rank]
