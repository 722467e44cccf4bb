"""Samples packed into micro-batches.

Dimension suffixes: as in `agentrl/batch.py`; R micro-batches.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.arrays import IntArray
from agentrl.batch import TrainBatch


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples that one rank computes at once, end to end in one sequence, without padding; the longest come first.

    `numbers_M`: the numbers of the samples in the packed batch. If `counts` is false, the micro-batch is computed with
    a weight of zero: it keeps a rank that has no work left in step with the others.
    """

    samples: TrainBatch
    numbers_M: IntArray
    counts: bool = True

    @property
    def tokens(self) -> int:
        """Tokens that go through the model."""
        return len(self.samples.tokens_S)

    def cost(self, attention: float) -> float:
        """The work, in tokens of a model without attention. `attention`: the share that each token before adds."""
        lengths_M = self.samples.lengths_M.astype(np.float64)
        return float(lengths_M.sum() + attention / 2 * np.square(lengths_M).sum())


def pack(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Best-fit decreasing: each sample, longest first, goes into the fullest sequence that has room. Ties: the first.

    Returns the samples of each sequence, by their numbers. A sample longer than `tokens` gets a sequence of its own:
    nothing is ever cut. Longer sequences come first.

    Raises:
        ValueError: `tokens` is below 1.
    """
    if tokens < 1:
        raise ValueError(f"micro-batches hold 1 or more tokens, got {tokens}")
    sequences: list[list[int]] = []
    open_ones: list[tuple[int, int]] = []  # (room left, sequence), sorted
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(open_ones, (lengths[item], -1))
        if at < len(open_ones):
            room, sequence = open_ones.pop(at)
            sequences[sequence].append(item)
        else:
            room, sequence = tokens, len(sequences)
            sequences.append([item])
        if room > lengths[item]:
            insort(open_ones, (room - lengths[item], sequence))
    return sorted(sequences, key=lambda sequence: -sum(lengths[item] for item in sequence))


def micro_batches(batch: TrainBatch, tokens: int, *, parts: int = 1) -> list[MicroBatch]:
    """Pack a batch into micro-batches of at most `tokens` tokens, or of a single sample.

    For several `parts`, micro-batches are small enough for each part to get its share.

    Raises:
        ValueError: `tokens` is below 1.
    """
    lengths = batch.lengths_M.tolist()
    sequences = pack(lengths, min(tokens, -(-sum(lengths) // parts)))
    numbers_R = [np.asarray(sequence, np.int32) for sequence in sequences]
    ordered = batch.ordered([number for sequence in sequences for number in sequence])
    parts_R = ordered.split([len(sequence) for sequence in sequences])
    return [MicroBatch(*one) for one in zip(parts_R, numbers_R, strict=True)]
