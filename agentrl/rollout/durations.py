"""The mean length of episodes of which some were cut off: they would have been longer, by nobody
knows how much.

The mean is the area under the survival curve of Kaplan and Meier (1958,
doi:10.1080/01621459.1958.10501452), for which a length that was cut says that it is at least so
long. Beyond the longest length, where the curve knows nothing if that one was cut, it goes on as
the Weibull curve that is likeliest for all lengths (Moeschberger and Klein 1985,
doi:10.2307/2530660). With nothing cut it is the plain mean. Nothing can be known of lengths that
are always cut: if nearly all are, the mean is that of the curve which those that ended suggest.

Dimension suffix: B bins of lengths.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

_PER_E = 1000
"""Bins of lengths that are e times as long: lengths that differ by less than a thousandth count as
one.
"""
_FEWEST = 2
"""Lengths that ended, without which a curve has no shape."""
_SHAPES = 0.05, 50.0
_NODES = 64

Array = npt.NDArray[np.float64]


@dataclass(slots=True)
class _Bin:
    ended: int = 0
    cut: int = 0
    total: float = 0.0


@dataclass(slots=True)
class Durations:
    """Lengths so far: of episodes that ended, and of some that were cut."""

    _bins: dict[int, _Bin] = field(default_factory=lambda: defaultdict(_Bin))
    _total: float = 0.0
    _ended: int = 0
    _cut: int = 0

    def add(self, length: float) -> None:
        """Count one that has ended."""
        self._total += length
        self._ended += 1
        if length > 0:
            one = self._bin(length)
            one.ended += 1

    def cut(self, length: float) -> None:
        """Count one that was cut at this length. One that was cut at once says nothing."""
        if length > 0:
            self._cut += 1
            self._bin(length).cut += 1

    def mean(self) -> float:
        """The mean of all as if none had been cut; 0 while none has ended."""
        if not self._cut or not self._total:
            return self._total / self._ended if self._ended else 0.0
        lengths_B, ended_B, cut_B = self._arrays()
        at_once = self._ended - ended_B.sum()  # of length 0: before everything else
        at_risk_B = np.cumsum((ended_B + cut_B)[::-1])[::-1]
        survive_B = np.cumprod(1 - ended_B / at_risk_B)
        before_B = np.concatenate([[1.0], survive_B[:-1]])
        area = float((before_B * np.diff(lengths_B, prepend=0.0)).sum())
        left = float(survive_B[-1])
        if left > 0:
            area += left * _rest(lengths_B, ended_B, cut_B)
        return area * float(at_risk_B[0] / (at_risk_B[0] + at_once))

    def _bin(self, length: float) -> _Bin:
        one = self._bins[round(_PER_E * math.log(length))]
        one.total += length
        return one

    def _arrays(self) -> tuple[Array, Array, Array]:
        bins = [self._bins[key] for key in sorted(self._bins)]
        rows: Sequence[tuple[float, int, int]] = [
            (one.total / (one.ended + one.cut), one.ended, one.cut) for one in bins
        ]
        found: Any = np.array(rows, np.float64).T
        return found[0], found[1], found[2]


def _rest(lengths_B: Array, ended_B: Array, cut_B: Array) -> float:
    """The mean length beyond the longest one of those that survive it: by the likeliest Weibull
    curve.
    """
    longest = lengths_B[-1]
    relative_B = lengths_B / longest
    shape = _shape(relative_B, ended_B, cut_B) if ended_B.sum() >= _FEWEST else 1.0
    # -log survival at the longest.
    spent = float(ended_B.sum() / ((ended_B + cut_B) * relative_B**shape).sum())
    nodes, weights = _quadrature()
    beyond = float((weights * ((spent + nodes) / spent) ** (1 / shape)).sum()) - 1
    return float(longest) * beyond


@cache
def _quadrature() -> tuple[Array, Array]:
    """Nodes and weights of the integral of f(x) exp(-x) over positive x (Gauss and Laguerre)."""
    nodes, weights = np.polynomial.laguerre.laggauss(_NODES)
    return nodes, weights


def _shape(relative_B: Array, ended_B: Array, cut_B: Array) -> float:
    """The shape for which the derivative of the likelihood is zero, by bisection: it falls with the
    shape.
    """
    logs_B = np.log(relative_B)
    counts_B = ended_B + cut_B
    mean_log = float((ended_B * logs_B).sum() / ended_B.sum())

    def slope(shape: float) -> float:
        powers_B = counts_B * relative_B**shape
        return 1 / shape + mean_log - float((powers_B * logs_B).sum() / powers_B.sum())

    low, high = _SHAPES
    for _ in range(30):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    return low
