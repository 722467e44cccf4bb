"""When two computed numbers count as equal: their difference is no more than rounding can make.

0.1 + 0.2 is not 0.3 for a computer. So rewards, returns and advantages that are equal in truth may
differ in their last digits, and whatever asks whether they differ (is there anything to learn from
this group? is this episode the better one?) asks here. The tolerance is relative to the scale of
the numbers: the largest of them, or of what they are sums of, by size, since a sum of n numbers is
off by about n times 1e-16 of that. So rewards near a million may truly differ by 1e-3: 1e-9 of the
scale is always seen. Where a sum comes to nothing, `settled` makes it an exact zero.

Numbers that were computed in single precision, such as the scores of a model, are off by 1e-7 of
their scale, and count as different. Round them in the reward if that matters.
"""

from collections.abc import Iterable, Sequence

ROUNDING = 1e-11
"""Differences up to this share of the scale are rounding: a hundred thousand additions in double
precision.
"""
ROUNDING_OF_SINGLES = 5e-7
"""The same of arrays in single precision, which hold seven digits."""


def scale_of(numbers: Iterable[float]) -> float:
    """The largest of the numbers by size, without its sign; 0 if there are none."""
    return max(map(abs, numbers), default=0.0)


def constant(numbers: Sequence[float], scale: float = 0.0, rounding: float = ROUNDING) -> bool:
    """Whether all numbers are equal, as none at all and a single one are. `scale`: of what they are
    sums of, if larger than they are.
    """
    if not numbers:
        return True
    low, high = min(numbers), max(numbers)
    return low == high or high - low < rounding * max(scale, -low, high)


def settled(total: float, scale: float) -> float:
    """A sum of numbers of this scale; 0 if what is left of them is no more than rounding."""
    return 0.0 if abs(total) < ROUNDING * scale else total


def above(number: float, other: float, scale: float = 0.0) -> bool:
    """Whether a number is larger than another one by more than rounding."""
    return number > other and not constant((number, other), scale)


def at_least(number: float, bound: float, scale: float = 0.0) -> bool:
    """Whether a number reaches a bound, but for rounding."""
    return not above(bound, number, scale)
