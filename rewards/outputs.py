"""Comparison of a program's output with the expected one."""

import math
import re
from typing import Literal

Comparison = Literal["lines", "words", "exact"]
# Every repetition is bounded, so that no output makes it slow.
_NUMBER = re.compile(
    r"[-+]?(?:\d{1,400}(?:\.\d{0,400})?|\.\d{1,400})(?:[eE][-+]?\d{1,4})?", re.ASCII
)


def same_output(printed: str, expected: str, comparison: Comparison, tolerance: float) -> bool:
    """Compare two outputs.

    `lines`: spaces at the ends of lines and empty lines at the end do not count; `words`: nor does
    how words are parted; `exact`: everything counts. With a tolerance, numbers may differ by so
    much, or by so much of the expected one.
    """
    if comparison == "exact" and not tolerance:
        return printed == expected
    if comparison == "words":
        return _same_words(printed.split(), expected.split(), tolerance)
    if comparison == "exact":
        one, other = printed.split("\n"), expected.split("\n")
    else:
        one, other = _lines(printed), _lines(expected)
    if not tolerance:
        return one == other
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(
        _same_words(a.split(" "), b.split(" "), tolerance) for a, b in pairs
    )


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _same_words(printed: list[str], expected: list[str], tolerance: float) -> bool:
    pairs = zip(printed, expected, strict=False)
    return len(printed) == len(expected) and all(
        one == other or _are_near(one, other, tolerance) for one, other in pairs
    )


def _are_near(printed: str, expected: str, tolerance: float) -> bool:
    """True if both words are numbers, and differ by no more than the tolerance."""
    if not tolerance or not (_NUMBER.fullmatch(printed) and _NUMBER.fullmatch(expected)):
        return False
    one, other = float(printed), float(expected)
    return math.isfinite(one) and abs(one - other) <= tolerance * max(1.0, abs(other))
