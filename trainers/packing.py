"""Samples packed into micro-batches.

Dimension suffixes: as in `agentrl/batch.py`; R micro-batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.batch import TrainBatch
from agentrl.placement.rows import Row, pack_rows, time_of
from agentrl.tokens.arrays import IntArray
from agentrl.trainers.compute.prefixes import (
    PrefixFamily,
    SharedPrefixes,
    counted_tokens,
    families,
    find_shared,
    in_tree_order,
)

_CUTS = (1, 2, 4)
"""Families are at most one of these parts of what they could be: smaller ones are divided more
evenly, and compute more prefixes twice.
"""


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
    sees: bool = False

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
        return _cost(self.computed_tokens, self.samples.lengths_M, attention)


def micro_batches(
    batch: TrainBatch, tokens: int, *, parts: int = 1, attention: float = 0.0
) -> list[list[MicroBatch]]:
    """Pack the samples of a batch that have loss tokens into micro-batches of at most `tokens`
    tokens that go through the model, or of a single sample, in rows of at most `parts`.

    The parts compute a row at the same time, so what costs the same is in one (`pack_rows`); beside
    a longer sample, micro-batches may be as long as it is. Samples that share a prefix go into the
    same micro-batch, where it is computed once; its repetitions count as a part of their tokens
    (`REPEATED`).

    Raises:
        ValueError: `tokens` is below 1.
    """
    trained = batch.loss_tokens_M.nonzero()[0].tolist()
    if not trained:
        return []
    texts = _comparable_tokens(batch, trained)
    sees = any(text.min() < 0 for text in texts)
    rows = [
        [sorted(one, key=lambda number: (-len(texts[number]), number)) for one in row]
        for row in _best_rows(texts, tokens, parts, attention)
    ]
    sequences = [sequence for row in rows for sequence in row]
    ordered = batch.ordered([trained[number] for sequence in sequences for number in sequence])
    parts_left = iter(ordered.split([len(sequence) for sequence in sequences]))

    def micro_batch(sequence: Sequence[int]) -> MicroBatch:
        samples = np.asarray([trained[number] for number in sequence], np.int32)
        shared = find_shared([texts[number] for number in sequence])
        return MicroBatch(next(parts_left), samples, shared, sees=sees)

    return [[micro_batch(sequence) for sequence in row] for row in rows]


def _comparable_tokens(batch: TrainBatch, samples: Sequence[int]) -> list[IntArray]:
    """The tokens of samples, as they are compared to find shared prefixes.

    The tokens of a picture are the same placeholder whatever it shows. Here they are a negative
    number that stands for the picture, so that only samples of the same pictures share a prefix.
    Example: the tokens (5, 9, 9, 7), in which 9 stands for the second picture of the batch, become
    (5, -2, -2, 7).
    """
    ends_M = np.cumsum(batch.lengths_M)
    numbers: dict[str, int] = {}
    texts: list[IntArray] = []
    for sample in samples:
        text = batch.tokens_S[ends_M[sample] - batch.lengths_M[sample] : ends_M[sample]]
        if images := [image for image in batch.images_M[sample] if image.start < len(text)]:
            text = text.copy()
            for image in images:
                number = numbers.setdefault(image.image.digest, -1 - len(numbers))
                text[image.start : image.stop] = number
        texts.append(text)
    return texts


def _best_rows(texts: Sequence[IntArray], tokens: int, parts: int, attention: float) -> list[Row]:
    """The samples of each micro-batch of each row, with families of the size that takes the least
    time.
    """
    tree = in_tree_order(texts)
    lengths = [len(text) for text in texts]
    counted = sum(counted_tokens(lengths[m], shared) for m, shared in zip(*tree, strict=True))
    largest = min(tokens, -(-counted // parts))
    best: tuple[float, list[Row]] | None = None
    # Smaller families balance the parts better, but compute some prefixes twice: try each size.
    for cut in _CUTS if parts > 1 and any(tree[1]) else (1,):
        found = families(texts, tree, largest // cut)
        costs = [
            _cost(family.computed, np.take(lengths, family.numbers), attention) for family in found
        ]
        rows = pack_rows([family.counted for family in found], costs, tokens, parts)
        seconds = time_of(rows, costs)
        if best is None or seconds < best[0]:
            best = seconds, [[_samples_of(found, packed) for packed in row] for row in rows]
    return best[1] if best else []


def _samples_of(found: Sequence[PrefixFamily], packed: Sequence[int]) -> list[int]:
    return [number for one in packed for number in found[one].numbers]


def _cost(computed: int, lengths_M: IntArray, attention: float) -> float:
    return float(computed + attention / 2 * np.square(lengths_M.astype(np.float64)).sum())
