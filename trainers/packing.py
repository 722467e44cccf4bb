"""Samples packed into rows, and rows into micro-batches.

Dimension suffixes: as in `agentrl/batch.py`; of a micro-batch B rows and T columns; R micro-batches.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from agentrl.arrays import IntArray, MaskArray
from agentrl.batch import TrainBatch

Row = Sequence[int]
"""The samples of a row, by their numbers in a batch, from left to right."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows that one rank computes at once. They are sent as a flat list of samples and laid out on the rank.

    `samples`: the samples of the rows, row after row. `numbers_M`: their numbers in the packed batch. `row_samples_B`:
    the number of samples in each row. If `counts` is false, the micro-batch is computed with a weight of zero: it keeps
    a rank that has no work left in step with the others.
    """

    samples: TrainBatch
    numbers_M: IntArray
    row_samples_B: IntArray
    counts: bool = True

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows, and the tokens of the longest one."""
        ends_B = np.cumsum(self.row_samples_B)
        row_tokens_B = np.add.reduceat(self.samples.lengths_M, ends_B - self.row_samples_B)
        return len(row_tokens_B), int(row_tokens_B.max())

    @property
    def cost(self) -> int:
        """Tokens that go through the model, padding included."""
        rows, columns = self.shape
        return rows * columns


@dataclass(frozen=True, slots=True)
class Rows:
    """The tokens of a micro-batch, laid out.

    `segments_BT` are the samples' numbers in the batch plus 1 (0 is padding); attention stays inside a segment.
    `positions_BT` restarts at 0 with each segment. A token is predicted from the token before it in its segment, so
    the first token of a segment never carries loss.
    """

    tokens_BT: IntArray
    loss_mask_BT: MaskArray
    positions_BT: IntArray
    segments_BT: IntArray


def pack(lengths: Sequence[int], row_tokens: int) -> list[Row]:
    """Best-fit decreasing: each sample, longest first, goes into the fullest row that has room. Ties: the first row.

    A sample longer than `row_tokens` gets a row of its own: nothing is ever cut. Longer rows come first.

    Raises:
        ValueError: `row_tokens` is below 1.
    """
    if row_tokens < 1:
        raise ValueError(f"row_tokens must be 1 or more, got {row_tokens}")
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (room left, row), sorted
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(open_rows, (lengths[item], -1))
        if at < len(open_rows):
            room, row = open_rows.pop(at)
            rows[row].append(item)
        else:
            room, row = row_tokens, len(rows)
            rows.append([item])
        if room > lengths[item]:
            insort(open_rows, (room - lengths[item], row))
    return sorted(rows, key=lambda row: -row_length(row, lengths))


def row_length(row: Row, lengths: Sequence[int]) -> int:
    """Tokens of a row."""
    return sum(lengths[item] for item in row)


def micro_batches(batch: TrainBatch, row_tokens: int, tokens: int, *, parts: int = 1) -> list[MicroBatch]:
    """Pack a batch into rows of `row_tokens`, and the rows into micro-batches.

    A micro-batch has at most `tokens` tokens, padding included, or is a single row. For several `parts`, micro-batches
    are small enough for each part to get its share.

    Raises:
        ValueError: `row_tokens` or `tokens` is below 1.
    """
    if tokens < 1:
        raise ValueError(f"micro-batches hold 1 or more tokens, got {tokens}")
    lengths = batch.lengths_M.tolist()
    rows = pack(lengths, row_tokens)
    if parts > 1:
        tokens = min(tokens, -(-len(rows) * row_length(rows[0], lengths) // parts))
    numbers_M = np.asarray([number for row in rows for number in row], np.int32)
    row_samples_R = [np.asarray([len(row) for row in run], np.int32) for run in _runs(rows, lengths, tokens)]
    counts_R = [int(row_samples_B.sum()) for row_samples_B in row_samples_R]
    parts_R = batch.ordered(numbers_M.tolist()).split(counts_R)
    numbers_R = np.split(numbers_M, np.cumsum(counts_R)[:-1])
    return [MicroBatch(*one) for one in zip(parts_R, numbers_R, row_samples_R, strict=True)]


def lay(micro_batch: MicroBatch) -> Rows:
    """Lay out the tokens of a micro-batch in its rows. Padding is token 0."""
    samples, shape = micro_batch.samples, micro_batch.shape
    tokens_BT, loss_mask_BT = np.zeros(shape, np.int32), np.zeros(shape, np.bool_)
    positions_BT, segments_BT = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    start = 0
    for row, column, length, number in _places(micro_batch):
        here, there = (row, slice(column, column + length)), slice(start, start + length)
        tokens_BT[here], loss_mask_BT[here] = samples.tokens_S[there], samples.loss_mask_S[there]
        positions_BT[here], segments_BT[here] = np.arange(length), number + 1
        start += length
    return Rows(tokens_BT, loss_mask_BT, positions_BT, segments_BT)


def _runs(rows: Sequence[Row], lengths: Sequence[int], tokens: int) -> Iterator[Sequence[Row]]:
    """Neighbouring rows, as many at a time as fit into `tokens`, or one. The first of a run is its longest."""
    start = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or row_length(rows[start], lengths) * (end + 1 - start) > tokens:
            yield rows[start:end]
            start = end


def _places(micro_batch: MicroBatch) -> Iterator[tuple[int, int, int, int]]:
    """Each sample's row, first column, length and number."""
    samples = zip(micro_batch.samples.lengths_M.tolist(), micro_batch.numbers_M.tolist(), strict=True)
    for row, count in enumerate(micro_batch.row_samples_B.tolist()):
        column = 0
        for length, number in islice(samples, count):
            yield row, column, length, number
            column += length
