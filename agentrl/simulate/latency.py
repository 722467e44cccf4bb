"""Distributions of durations in seconds (or of numbers of tokens or turns), as settings.

    step_seconds: {kind: lognormal, median: 2.0, sigma: 1.0, cap: 20.0}

Each draws only from the generator it is given.
"""

import math
from random import Random
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from agentrl.settings.base import Settings


class Constant(Settings):
    """Always the same value."""

    kind: Literal["constant"] = "constant"
    value: float = Field(ge=0)
    """The value of every sample."""

    def sample(self, rng: Random) -> float:
        """One draw."""
        return self.value


class Uniform(Settings):
    """Uniform between two limits."""

    kind: Literal["uniform"] = "uniform"
    low: float = Field(ge=0)
    """The smallest sample."""
    high: float = Field(ge=0)
    """The largest sample."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low ({self.low:g}) must not be above high ({self.high:g})")
        return self

    def sample(self, rng: Random) -> float:
        """One draw."""
        return self.low + (self.high - self.low) * rng.random()


class Normal(Settings):
    """Normal around a mean. A sample below the floor is replaced by the floor."""

    kind: Literal["normal"] = "normal"
    mean: float = Field(ge=0)
    """Mean before the floor."""
    sd: float = Field(ge=0)
    """Standard deviation before the floor."""
    floor: float = Field(0.0, ge=0)
    """The smallest sample."""

    def sample(self, rng: Random) -> float:
        """One draw."""
        drawn = rng.gauss(self.mean, self.sd)
        return drawn if drawn > self.floor else self.floor


class Lognormal(Settings):
    """Heavy-tailed: `median * exp(sigma * z)` with z standard normal. The mean is `median *
    exp(sigma**2 / 2)`.
    """

    kind: Literal["lognormal"] = "lognormal"
    median: float = Field(gt=0)
    """Half of the samples are smaller, before the cap."""
    sigma: float = Field(ge=0)
    """Standard deviation of the logarithm."""
    cap: float | None = Field(None, gt=0)
    """The largest sample; a larger one is replaced by the cap."""

    def sample(self, rng: Random) -> float:
        """One draw."""
        drawn = self.median * math.exp(self.sigma * rng.gauss(0.0, 1.0))
        return drawn if self.cap is None or drawn < self.cap else self.cap


class Pareto(Settings):
    """A power law: P(sample > x) = (minimum / x) ** alpha. With alpha <= 1 it has no mean."""

    kind: Literal["pareto"] = "pareto"
    minimum: float = Field(gt=0)
    """The smallest sample."""
    alpha: float = Field(gt=0)
    """Exponent of the tail: the smaller, the heavier the tail."""
    cap: float | None = Field(None, gt=0)
    """The largest sample; a larger one is replaced by the cap."""

    def sample(self, rng: Random) -> float:
        """One draw."""
        drawn = float(self.minimum * (1.0 - rng.random()) ** (-1.0 / self.alpha))
        return drawn if self.cap is None or drawn < self.cap else self.cap


Latency = Annotated[Constant | Uniform | Normal | Lognormal | Pareto, Field(discriminator="kind")]
"""Any of these distributions; `kind` selects which."""

NO_TIME = Constant(value=0.0)

__all__ = ["NO_TIME", "Constant", "Latency", "Lognormal", "Normal", "Pareto", "Uniform"]
