"""Cuts a batch into shards for a trainer's data-parallel ranks, with equal numbers of micro-batches
and nearly equal work.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from agentrl.batch import TrainBatch, equal_parts
from agentrl.tokens.arrays import FloatArray
from agentrl.trainers.packing import MicroBatch, micro_batches
from agentrl.trainers.settings import TrainerSettings

BatchShard = Sequence[Sequence[MicroBatch]]
"""The work of a data-parallel rank in a step: the micro-batches of each minibatch."""


def shard_batch(
    batch: TrainBatch,
    settings: TrainerSettings,
    *,
    parts: int,
    minibatches: int = 1,
    attention: float = 0.0,
) -> list[BatchShard]:
    """Cut a batch into minibatches, these into rows of micro-batches (`micro_batches`), and divide
    the rows into a shard for each of so many data-parallel ranks (`Mesh.data_parallel_size`).

    In each minibatch every shard gets a micro-batch of each row. The shards' costs
    (`MicroBatch.cost`, with `attention`) differ by at most that of the largest micro-batch. Samples
    without a loss token are left out.

    Raises:
        ValueError: the batch has no loss token.
    """
    by_minibatch = []
    for minibatch in minibatches_of(batch, minibatches):
        if minibatch.num_loss_tokens:
            rows = micro_batches(
                minibatch, settings.tokens_at_once, parts=parts, attention=attention
            )
            by_minibatch.append(_deal_rows(rows, parts, attention))
    if not by_minibatch:
        raise ValueError("there is no loss token to train on")
    return [list(shard) for shard in zip(*by_minibatch, strict=True)]


def minibatches_of(batch: TrainBatch, count: int) -> list[TrainBatch]:
    """Split the samples, in order, into `count` batches of nearly equal numbers of loss tokens.

    Neighbours stay together, so each border splits at most one group. With fewer samples than
    `count`, each sample is a batch.

    Raises:
        ValueError: `count` is below 1.
    """
    if count < 1:
        raise ValueError(f"a batch splits into 1 or more minibatches, got {count}")
    return batch.split(equal_parts(batch.loss_tokens_M, count))


def gather(
    batch: TrainBatch, shards: Sequence[BatchShard], predictions: Sequence[Sequence[FloatArray]]
) -> FloatArray:
    """The ranks' predictions for the loss tokens, in the order of the batch; shape N.

    The batch must have been sharded as one minibatch. Example: samples 0, 1 and 2 have 2, 1 and 2
    loss tokens, and a rank computed the samples 2 and 0 in one micro-batch. Its predictions (4,)
    are split into 2 + 2: those of sample 2 go to the places 3 and 4, those of sample 0 to 0 and 1.
    """
    gathered_N = np.zeros(batch.num_loss_tokens, np.float32)
    ends_M = np.cumsum(batch.loss_tokens_M).tolist()
    for shard, rank_predictions in zip(shards, predictions, strict=True):
        for micro_batch, predicted_N in zip(shard[0], rank_predictions, strict=True):
            if not micro_batch.counts:
                continue
            counts_M = micro_batch.samples.loss_tokens_M
            by_sample = np.split(predicted_N, np.cumsum(counts_M)[:-1])
            for number, sample_N in zip(micro_batch.numbers_M.tolist(), by_sample, strict=True):
                gathered_N[ends_M[number] - len(sample_N) : ends_M[number]] = sample_N
    return gathered_N


def gather_rows(
    batch: TrainBatch,
    shards: Sequence[BatchShard],
    minibatches: int,
    values: Sequence[Sequence[FloatArray]],
) -> FloatArray:
    """K numbers for each loss token, in the order of a batch that was sharded as `minibatches`;
    shape (K, N).

    `values` has those of each rank's micro-batches, one minibatch after another, each of shape (K,
    its loss tokens).
    """
    gathered = []
    unread = [iter(rank_values) for rank_values in values]
    # `shard_batch` left out the same minibatches, so shards and parts have the same numbers.
    parts = [part for part in minibatches_of(batch, minibatches) if part.num_loss_tokens]
    for number, part in enumerate(parts):
        part_shards = [[shard[number]] for shard in shards]
        part_values = [
            list(islice(rank_values, len(shard[0])))
            for rank_values, shard in zip(unread, part_shards, strict=True)
        ]
        rows = []
        for row in range(len(part_values[0][0])):
            row_values = [[one_KN[row] for one_KN in rank] for rank in part_values]
            rows.append(gather(part, part_shards, row_values))
        gathered.append(rows)
    return np.concatenate(gathered, axis=1)


def row_costs(shards: Sequence[BatchShard], attention: float) -> list[list[float]]:
    """The costs of the micro-batches that count, of each row of a batch."""
    return [
        [one.cost(attention) for one in row if one.counts]
        for minibatch in zip(*shards, strict=True)
        for row in zip(*minibatch, strict=True)
    ]


def _deal_rows(
    rows: Sequence[Sequence[MicroBatch]], parts: int, attention: float
) -> list[list[MicroBatch]]:
    """The micro-batches of each part. Of each row, the costliest goes to the part with the least
    work so far.

    Example: two parts and rows of the costs (9, 4) and (7, 2). Part 0 gets 9 and then 2, part 1
    gets 4 and then 7.
    """
    shards: list[list[MicroBatch]] = [[] for _ in range(parts)]
    loads = [0.0] * parts
    cheapest = min((one for row in rows for one in row), key=lambda one: one.cost(attention))
    for row in rows:
        by_cost = sorted(row, key=lambda one: -one.cost(attention))
        # Every part takes part in the collectives of a row: one without work repeats the cheapest
        # micro-batch, with a weight of zero.
        filled = [*by_cost, *[replace(cheapest, counts=False)] * (parts - len(row))]
        for part, one in zip(sorted(range(parts), key=loads.__getitem__), filled, strict=True):
            shards[part].append(one)
            loads[part] += one.cost(attention) * one.counts
    return shards
