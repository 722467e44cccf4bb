"""What a yardstick is: a published result, the arms that repeat it on a small scale, and what is
measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True, slots=True)
class Order:
    """Something published: the first arm ends better than the second."""

    better: str
    worse: str


@dataclass(frozen=True, slots=True)
class Yardstick:
    """A published result to repeat.

    With one seed, all arms begin with the same imitated model, which the first arm makes.
    """

    name: str
    published: str
    """What was found, in a sentence, with its source."""
    config: str
    """Of examples/, without `.yaml`."""
    arms: Mapping[str, Sequence[str]]
    """The settings of each, after the common ones."""
    orders: Sequence[Order] = ()
    settings: Sequence[str] = ()
    """Those that all arms have."""
    metric: str = "eval/success"
    best: Literal["high", "low"] = "high"
    note: str = ""
    """What differs from the original, and why an order does not hold."""


@dataclass(frozen=True, slots=True)
class Curve:
    """The metric of a run by the steps and the tokens that were trained on before."""

    steps: Sequence[int]
    tokens: Sequence[int]
    values: Sequence[float]
    cpu_seconds: float
    commit: str

    def at(self, tokens: int) -> float:
        """The metric when so many tokens had been trained on, interpolated."""
        return float(np.interp(tokens, self.tokens, self.values))

    def collapsed(self, best: Literal["high", "low"]) -> bool:
        """Whether more than half of what was gained at the best moment (0.05 at least) is lost at
        the end.
        """
        sign = 1 if best == "high" else -1
        values = [sign * value for value in self.values]
        gained = max(values) - values[0]
        return gained > 0.05 and max(values) - values[-1] > gained / 2


Results = dict[str, dict[str, dict[str, Curve]]]
"""Curves by yardstick, arm and seed."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a published order holds here: the mean difference at the end, over seeds, with its
    standard error.
    """

    order: Order
    difference: float
    error: float
    seeds: int = field(default=0)

    @property
    def words(self) -> str:
        """In a word: the difference has to be twice its error."""
        if self.seeds < 2 or abs(self.difference) < 2 * self.error:
            return "not shown"
        return "holds" if self.difference > 0 else "reversed"
