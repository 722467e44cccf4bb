"""The experts that an engine chose for the tokens of a context, kept beside the tokens.

A mixture of experts computes each token by a few of its experts, which a router chooses in every
layer. That is layers times experts numbers for a token: 384 of a model with 48 layers that choose
8 experts each. They are therefore kept in small integers, and an engine in another process keeps
them in its memory and hands on references (`HeldChoices`), which only the trainer's ranks follow.

Dimension suffixes: T consecutive tokens, L layers, K experts of a token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.tokens.arrays import same_fields

UNKNOWN = -1
"""Stands for an expert of which nothing is known."""
ChosenExperts = npt.NDArray[np.integer[Any]]
"""Numbers of experts, shape (T, L, K)."""


HeldChoices = Callable[[], ChosenExperts | None]
"""Fetches choices from the memory of another process, shape (T, L, K); None if they are lost, with
the process that held them."""


@dataclass(frozen=True, slots=True, eq=False)
class ChoiceSpan:
    """The choices for `tokens` tokens of a context, from its token `start` on. Others may follow
    in `chosen`, and do not count.
    """

    start: int
    tokens: int
    chosen: ChosenExperts | HeldChoices

    __eq__ = same_fields

    @property
    def stop(self) -> int:
        """The first token after them."""
        return self.start + self.tokens


@dataclass(frozen=True, slots=True)
class ExpertChoices:
    """The known experts of a context's tokens. Where spans overlap, the first counts: that of the
    call that computed the token first.
    """

    spans: tuple[ChoiceSpan, ...] = ()

    @classmethod
    def of(cls, start: int, chosen_TLK: ChosenExperts) -> "ExpertChoices":
        """The choices for the tokens from `start` on."""
        span = ChoiceSpan(start, len(chosen_TLK), chosen_TLK)
        return cls((span,)) if len(chosen_TLK) else cls()

    @classmethod
    def joined(cls, parts: Sequence["ExpertChoices | None"]) -> "ExpertChoices | None":
        """All of several parts, the first ones first; None if nothing is known."""
        spans = tuple(span for part in parts if part is not None for span in part.spans)
        return cls(spans) if spans else None

    @property
    def known_from(self) -> int:
        """The first token of which something is known; 0 if nothing is."""
        return min((span.start for span in self.spans), default=0)

    def until(self, stop: int) -> "ExpertChoices":
        """The choices for the tokens before `stop`."""
        return ExpertChoices(
            tuple(
                replace(span, tokens=min(span.stop, stop) - span.start)
                for span in self.spans
                if span.start < stop
            )
        )

    def held(self, hold: Callable[[ChosenExperts], HeldChoices]) -> "ExpertChoices":
        """The same, with what is here given to `hold`, and a reference in its place."""
        return ExpertChoices(
            tuple(
                replace(span, chosen=hold(span.chosen))
                if isinstance(span.chosen, np.ndarray)
                else span
                for span in self.spans
            )
        )


def read_choices(
    choices: Sequence[ExpertChoices | None], lengths: Sequence[int]
) -> npt.NDArray[np.int16] | None:
    """The experts of the tokens of contexts of these lengths, end to end, shape (T, L, K); those of
    a token without choices in a layer are `UNKNOWN`. None if nothing is known of any.

    Raises:
        ValueError: the choices are of different models.
    """
    found_TLK: npt.NDArray[np.int16] | None = None
    first = 0
    for known, length in zip(choices, lengths, strict=True):
        # The first span counts, so it is written last.
        for span in reversed(() if known is None else known.spans):
            chosen = span.chosen if isinstance(span.chosen, np.ndarray) else span.chosen()
            if chosen is None:
                continue
            if found_TLK is None:
                found_TLK = np.full((sum(lengths), *chosen.shape[1:]), UNKNOWN, np.int16)
            elif chosen.shape[1:] != found_TLK.shape[1:]:
                raise ValueError(
                    f"engines report {chosen.shape[1:]} and {found_TLK.shape[1:]} layers and"
                    " experts of a token: they serve different models"
                )
            stop = min(span.stop, length)
            of_span_TLK = chosen[: max(0, stop - span.start)]
            # An engine may leave out a token in its last layer alone.
            is_known_TL = (of_span_TLK != UNKNOWN).any(2)
            found_TLK[first + span.start : first + stop][is_known_TL] = of_span_TLK[is_known_TL]
        first += length
    return found_TLK


__all__ = [
    "UNKNOWN",
    "ChoiceSpan",
    "ChosenExperts",
    "ExpertChoices",
    "HeldChoices",
    "read_choices",
]
