"""The mean length of episodes, some of which were cut off: it is known only that those would have
been longer (right-censored lengths).

The mean is the area under the survival curve of Kaplan and Meier (1958,
doi:10.1080/01621459.1958.10501452), in which a censored length is a lower bound. If the longest
length is censored, the curve is undefined beyond it; there it continues as the Weibull curve of
maximum likelihood for all lengths (Moeschberger and Klein 1985, doi:10.2307/2530660). If nothing is
censored, this is the plain mean; if nearly everything is, it rests on the few lengths that are
known.

Example: episodes of 1, 2 and 3 seconds, the second one cut. Of 3 at risk, one ends at 1: the curve
falls to 2/3. Of the 1 still at risk, one ends at 3: it falls to 0. The area is 1 * 1 + 2 * 2/3 =
2.33, where the mean of the three numbers is 2.

Dimension suffix: B bins of lengths.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import numpy.typing as npt

_BINS_PER_E = 1000
"""Bins between a length and e times that length: lengths that differ by less than a thousandth
share a bin.
"""
_MIN_ENDED = 2
"""Uncensored lengths that are needed to fit the shape of a curve."""
_SHAPES = 0.05, 50.0
"""Smallest and largest shape of a Weibull curve."""
_NODES = 64
"""Nodes of the quadrature."""

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
        """Count an episode that has ended."""
        self._total += length
        self._ended += 1
        if length > 0:
            self._bin(length).ended += 1

    def cut(self, length: float) -> None:
        """Count an episode that was cut at this length. A cut at 0 carries no information."""
        if length > 0:
            self._cut += 1
            self._bin(length).cut += 1

    def mean(self) -> float:
        """The mean of all as if none had been cut; 0 while none has ended."""
        if not self._cut or not self._total:
            return self._total / self._ended if self._ended else 0.0
        bins = [self._bins[key] for key in sorted(self._bins)]
        rows = [(one.total / (one.ended + one.cut), one.ended, one.cut) for one in bins]
        lengths_B, ended_B, cut_B = np.array(rows, np.float64).T
        # Episodes of length 0 have no bin. They scale the area at the end.
        of_length_zero = self._ended - ended_B.sum()
        # At risk in a bin are the episodes in it and in all later ones.
        at_risk_B = np.cumsum((ended_B + cut_B)[::-1])[::-1]
        survive_B = np.cumprod(1 - ended_B / at_risk_B)
        before_B = np.concatenate([[1.0], survive_B[:-1]])
        area = float((before_B * np.diff(lengths_B, prepend=0.0)).sum())
        left = float(survive_B[-1])
        if left > 0:
            area += left * _rest(lengths_B, ended_B, cut_B)
        return area * float(at_risk_B[0] / (at_risk_B[0] + of_length_zero))

    def _bin(self, length: float) -> _Bin:
        one = self._bins[round(_BINS_PER_E * math.log(length))]
        one.total += length
        return one


def _rest(lengths_B: Array, ended_B: Array, cut_B: Array) -> float:
    """The mean remaining length of the episodes that are longer than all that were seen, by the
    Weibull curve of maximum likelihood.
    """
    longest = lengths_B[-1]
    relative_B = lengths_B / longest
    shape = _shape(relative_B, ended_B, cut_B) if ended_B.sum() >= _MIN_ENDED else 1.0
    # With H = -log survival at the longest length, the survival at x times it is exp(-H x^shape).
    # The mean beyond it is the integral of exp(H - H x^shape) over x > 1; substituting
    # u = H x^shape - H, x = ((H + u) / H)^(1 / shape), gives the weight exp(-u) of the quadrature.
    hazard = float(ended_B.sum() / ((ended_B + cut_B) * relative_B**shape).sum())
    nodes, weights = _quadrature()
    beyond = float((weights * ((hazard + nodes) / hazard) ** (1 / shape)).sum()) - 1
    return float(longest) * beyond


@cache
def _quadrature() -> tuple[Array, Array]:
    """Nodes and weights of the integral of f(x) exp(-x) over positive x (Gauss and Laguerre)."""
    nodes, weights = np.polynomial.laguerre.laggauss(_NODES)
    return nodes, weights


def _shape(relative_B: Array, ended_B: Array, cut_B: Array) -> float:
    """The shape at which the derivative of the likelihood is zero. The derivative falls with the
    shape, so bisection finds it.
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
