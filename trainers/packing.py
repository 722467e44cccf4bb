"""Samples packed into micro-batches.

Dimension suffixes: as in `agentrl/batch.py`; R micro-batches.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.arrays import IntArray
from agentrl.batch import TrainBatch
from agentrl.trainers.compute.prefixes import SharedPrefixes, families, find_shared


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples that one rank computes at once, end to end in one sequence, without padding; the
    longest come first.

    `numbers_M`: the numbers of the samples in the packed batch. `shared`: the prefixes that are
    computed once; None if every token is computed. If `counts` is false, the micro-batch is
    computed with a weight of zero: it keeps a rank that has no work left in step with the others.
    """

    samples: TrainBatch
    numbers_M: IntArray
    shared: SharedPrefixes | None = None
    counts: bool = True

    @property
    def tokens(self) -> int:
        """Tokens of the samples."""
        return len(self.samples.tokens_S)

    @property
    def computed_tokens(self) -> int:
        """Tokens that go through the model."""
        return self.tokens if self.shared is None else len(self.shared.computed_S)

    def cost(self, attention: float) -> float:
        """The work, in tokens of a model without attention. `attention`: the share that each token
        before adds.
        """
        lengths_M = self.samples.lengths_M.astype(np.float64)
        return float(self.computed_tokens + attention / 2 * np.square(lengths_M).sum())


def pack(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Best-fit decreasing: each sample, longest first, goes into the fullest sequence that has
    room. Ties: the first.

    Returns the samples of each sequence, by their numbers. A sample longer than `tokens` gets a
    sequence of its own: nothing is ever cut. Longer sequences come first.

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
    """Pack a batch into micro-batches of at most `tokens` tokens that go through the model, or of a
    single sample.

    Samples that share a prefix go into the same micro-batch, where it is computed once; its
    repetitions count as a part of their tokens (`REPEATED`). For several `parts`, micro-batches are
    small enough for each part to get its share.

    Raises:
        ValueError: `tokens` is below 1.
    """
    rows = np.split(batch.tokens_S, np.cumsum(batch.lengths_M)[:-1])
    found, sizes, limit = families(rows, tokens, parts=parts)
    sequences = [
        [number for one in packed for number in found[one]] for packed in pack(sizes, limit)
    ]
    for sequence in sequences:
        sequence.sort(key=lambda number: (-len(rows[number]), number))
    ordered = batch.ordered([number for sequence in sequences for number in sequence])
    parts_R = ordered.split([len(sequence) for sequence in sequences])
    return [
        MicroBatch(
            part, np.asarray(sequence, np.int32), find_shared([rows[number] for number in sequence])
        )
        for part, sequence in zip(parts_R, sequences, strict=True)
    ]
