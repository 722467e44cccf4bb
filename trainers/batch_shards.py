"""A batch dealt to the ranks of a trainer: the same number of micro-batches for each, nearly the same work."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.batch import FloatArray, TrainBatch, micro_batches, minibatches


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch for one rank. One that does not count is computed all the same, with a weight of zero: it keeps a
    rank that has nothing left to do in step with the others.
    """

    rows: TrainBatch
    counts: bool = True

    @property
    def cost(self) -> int:
        """Tokens that go through the model, padding included."""
        return int(self.rows.tokens_BT.size)


BatchShard = Sequence[Sequence[MicroBatch]]
"""What one rank computes in a step: the portions of each minibatch."""


def deal(batch: TrainBatch, *, ranks: int, micro_batch_tokens: int, minibatch_count: int) -> list[BatchShard]:
    """Cut a batch into minibatches and micro-batches, and deal these to the ranks.

    In each minibatch every rank gets the same number of portions; the largest difference between the tokens of two
    ranks is at most the largest portion. Rows without a loss token are left out. One rank gets all, in order.

    Raises:
        ValueError: a minibatch has no loss token at all.
    """
    by_minibatch = [
        _deal_one(part, ranks, micro_batch_tokens)
        for part in minibatches(batch, minibatch_count)
        if part.num_loss_tokens
    ]
    if not by_minibatch:
        raise ValueError("there is no loss token to deal")
    return [[portions[rank] for portions in by_minibatch] for rank in range(ranks)]


def gather(batch: TrainBatch, shares: Sequence[BatchShard], predictions: Sequence[Sequence[FloatArray]]) -> FloatArray:
    """What the ranks said of the loss tokens of each of their portions, laid as the batch is; 0 where there is no loss.

    The batch was dealt in one minibatch, so each portion is some of its rows.
    """
    laid_BT = np.zeros(batch.tokens_BT.shape, np.float32)
    row_of = {int(segment): row for row, segment in enumerate(batch.segment_ids_BT[:, 0])}
    for share, of_rank in zip(shares, predictions, strict=True):
        for portion, numbers_N in zip(share[0], of_rank, strict=True):
            if portion.counts:
                rows = portion.rows
                first, (count, columns) = row_of[int(rows.segment_ids_BT[0, 0])], rows.tokens_BT.shape
                laid_BT[first : first + count, :columns][rows.loss_mask_BT == 1] = numbers_N
    return laid_BT


def _deal_one(part: TrainBatch, ranks: int, tokens: int) -> list[list[MicroBatch]]:
    if ranks > 1:  # so many micro-batches that nobody has to idle, where there are enough rows
        tokens = min(tokens, -(-int(part.tokens_BT.size) // ranks))
    portions = [MicroBatch(rows) for rows in micro_batches(part, tokens) if rows.num_loss_tokens]
    if ranks == 1:
        return [portions]
    dealt: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    most = -(-len(portions) // ranks)
    for portion in sorted(portions, key=lambda portion: -portion.cost):
        open_hands = [hand for hand in dealt if len(hand) < most]
        min(open_hands, key=lambda hand: sum(p.cost for p in hand)).append(portion)
    filler = MicroBatch(min(portions, key=lambda portion: portion.cost).rows, counts=False)
    return [hand + [filler] * (most - len(hand)) for hand in dealt]
