"""The tree of an episode's turns, reconstructed from their tokens: each turn continues an earlier
one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_Tokens = npt.NDArray[np.int64]


def parents(turns: Sequence[Mapping[str, Any]]) -> list[int | None]:
    """For each turn, the turn whose prompt and answer its own prompt begins with; the longest one,
    or `None`.

    A turn that did not fork continues the one before. The first of a row may continue any other,
    also a later one: rows are in the order in which they were trained, each sampled token in one of
    them.
    """
    ends, rows = _token_rows(turns)
    found: list[int | None] = []
    for place, turn in enumerate(turns):
        if place and not turn["forked"]:
            found.append(place - 1)
            continue
        prompt = np.asarray(turn["prompt_ids"], np.int64)
        fitting = []
        for other, length in enumerate(ends):
            if other == place or not 0 < length <= len(prompt):
                continue
            tokens = rows[other]
            # The last token alone rules most of them out, at the cost of one comparison.
            if prompt[length - 1] == tokens[length - 1] and np.array_equal(
                prompt[:length], tokens[:length]
            ):
                fitting.append((length, other))
        found.append(max(fitting)[1] if fitting else None)
    return found


def _token_rows(turns: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[_Tokens]]:
    """For each turn, where it ends in its row of tokens, and that row. A row is all tokens from one
    fork to the next; its turns share it.
    """
    starts = [place for place, turn in enumerate(turns) if place == 0 or turn["forked"]]
    ends: list[int] = []
    rows: list[_Tokens] = []
    for first, following in zip(starts, [*starts[1:], len(turns)], strict=False):
        tokens: list[int] = []
        for turn in turns[first:following]:
            tokens += [*turn["prompt_ids"], *turn["token_ids"]]
            ends.append(len(tokens))
        rows += [np.asarray(tokens, np.int64)] * (following - first)
    return ends, rows
