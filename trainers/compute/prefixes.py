"""Prefixes that training samples have in common, so that they go through the model once.

The members of a group begin with the same prompt, and often with the same turns; all samples of a
run may begin with the same instructions. A hidden state depends only on the tokens up to its own,
so samples that agree up to a token have the same one, and its gradient is the sum over all of them.

Dimension suffixes: T tokens of samples end to end; S of these that are computed; M samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from agentrl.tokens.arrays import IntArray

WORTH_JOINING = 0.25
"""Samples are packed together if they share at least this part of one of them."""
REPEATED = 8
"""So many tokens that repeat a prefix need about the memory of one that is computed: they are in
attention only.
"""


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Which tokens of samples are computed.

    `places_T`: the place of each token, or of the equal one in another sample, among those that are
    computed. `computed_S`: the tokens that are computed, in their order.
    """

    places_T: IntArray
    computed_S: IntArray


def find_shared(rows: Sequence[IntArray]) -> SharedPrefixes | None:
    """The prefixes that several of the rows have; None if there are none."""
    order, shared = in_tree_order(rows)
    if not any(shared):
        return None
    lengths_M = np.asarray([len(row) for row in rows])
    starts_M = np.cumsum(lengths_M) - lengths_M
    # The first token that is equal, up to itself.
    first_T = np.arange(lengths_M.sum(), dtype=np.int32)
    before = 0
    for number, count in zip(order, shared, strict=True):
        start = starts_M[number]
        first_T[start : start + count] = first_T[starts_M[before] : starts_M[before] + count]
        before = number
    computed_S = np.unique(first_T)
    return SharedPrefixes(np.searchsorted(computed_S, first_T).astype(np.int32), computed_S)


def in_tree_order(rows: Sequence[IntArray]) -> tuple[list[int], list[int]]:
    """The numbers of the rows such that each shares most with the one before, and how many tokens
    it shares with it.
    """
    keys = [row.astype(">i4").tobytes() for row in rows]  # bytes that sort as their tokens do
    order = sorted(range(len(rows)), key=keys.__getitem__)
    return order, [0, *(_common_prefix(rows[one], rows[other]) for one, other in pairwise(order))][
        : len(rows)
    ]


@dataclass(slots=True)
class PrefixFamily:
    """Rows that are computed together, by their numbers; the tokens that go through the model for
    them; and as how many they count, with the repetitions of their prefixes.
    """

    numbers: list[int]
    computed: int
    counted: int


def families(
    rows: Sequence[IntArray], tree: tuple[Sequence[int], Sequence[int]], tokens: int
) -> list[PrefixFamily]:
    """Rows that are worth computing together. `tree`: their order (`in_tree_order`).

    A family counts as at most `tokens`, if it is not a single row.
    """
    found: list[PrefixFamily] = []
    for number, shared in zip(*tree, strict=True):
        length = len(rows[number])
        counted = counted_tokens(length, shared)
        if shared >= WORTH_JOINING * length and found[-1].counted + counted <= tokens:
            family = found[-1]
            family.numbers.append(number)
            family.computed += length - shared
            family.counted += counted
        else:
            found.append(PrefixFamily([number], length, length))
    return found


def counted_tokens(length: int, shared: int) -> int:
    """As how many tokens a row counts that shares so many with the one before."""
    return length - shared + -(-shared // REPEATED)


def _common_prefix(one: IntArray, other: IntArray) -> int:
    """The length of the prefix that two rows share."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length
