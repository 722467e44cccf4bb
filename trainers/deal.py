"""A batch dealt to the ranks of a trainer: the same number of micro-batches for each, nearly the same work."""

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.batch import TrainBatch, micro_batches, minibatches


@dataclass(frozen=True, slots=True)
class Portion:
    """A micro-batch for one rank. One that does not count is computed all the same, with a weight of zero: it keeps a
    rank that has nothing left to do in step with the others.
    """

    rows: TrainBatch
    counts: bool = True

    @property
    def cost(self) -> int:
        """Tokens that go through the model, padding included."""
        return int(self.rows.tokens_BT.size)


Share = Sequence[Sequence[Portion]]
"""What one rank computes in a step: the portions of each minibatch."""


def deal(batch: TrainBatch, *, ranks: int, micro_batch_tokens: int, minibatch_count: int) -> list[Share]:
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


def _deal_one(part: TrainBatch, ranks: int, tokens: int) -> list[list[Portion]]:
    if ranks > 1:  # so many micro-batches that nobody has to idle, where there are enough rows
        tokens = min(tokens, -(-int(part.tokens_BT.size) // ranks))
    portions = [Portion(rows) for rows in micro_batches(part, tokens) if rows.num_loss_tokens]
    if ranks == 1:
        return [portions]
    dealt: list[list[Portion]] = [[] for _ in range(ranks)]
    most = -(-len(portions) // ranks)
    for portion in sorted(portions, key=lambda portion: -portion.cost):
        open_hands = [hand for hand in dealt if len(hand) < most]
        min(open_hands, key=lambda hand: sum(p.cost for p in hand)).append(portion)
    filler = Portion(min(portions, key=lambda portion: portion.cost).rows, counts=False)
    return [hand + [filler] * (most - len(hand)) for hand in dealt]
