"""The tree of an episode's calls, read off their tokens: each turn continues another one."""

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
    ends, rows = _ends(turns)
    found: list[int | None] = []
    for place, turn in enumerate(turns):
        if place and not turn["forked"]:
            found.append(place - 1)
            continue
        prompt = np.asarray(turn["prompt_ids"], np.int64)
        fitting = [
            (length, other)
            for other, length in enumerate(ends)
            if other != place
            and 0 < length <= len(prompt)
            and _begins(prompt, rows[other][:length])
        ]
        found.append(max(fitting)[1] if fitting else None)
    return found


def _ends(turns: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[_Tokens]]:
    """The lengths in tokens of each turn's prompt and answer, and the whole row of tokens that they
    begin.
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


def _begins(prompt: _Tokens, tokens: _Tokens) -> bool:
    last = len(tokens) - 1
    return bool(prompt[last] == tokens[last]) and np.array_equal(prompt[: last + 1], tokens)
