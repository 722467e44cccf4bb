"""A penalty for long episodes."""

from typing import Literal, Self

from pydantic import Field, model_validator

from agentrl.settings.base import Settings
from agentrl.trajectory import Trajectory


class Length:
    """0 up to `free`, falling linearly to -1 at `limit` and beyond: DAPO's soft overlong
    punishment.

    DAPO (arXiv:2503.14476), section 3.4, equation 13, where `limit` is L_max and `limit - free` is
    L_cache.
    """

    isolation: Literal["inline"] = "inline"

    class Config(Settings):
        """The bounds of a length."""

        unit: Literal["tokens", "turns"] = "tokens"
        """Count sampled tokens, or turns."""
        free: int = Field(ge=0)
        """Up to so many cost nothing."""
        limit: int = Field(gt=0)
        """From so many on the penalty is whole."""

        @model_validator(mode="after")
        def _free_is_below_the_limit(self) -> Self:
            if self.free >= self.limit:
                raise ValueError(f"free ({self.free}) has to be below limit ({self.limit})")
            return self

    def __init__(self, config: Config) -> None:
        self._config = config

    def content(self, trajectory: Trajectory) -> int:
        """The length."""
        return trajectory.num_tokens if self._config.unit == "tokens" else len(trajectory.turns)

    def evaluate(self, content: int) -> float:
        """The penalty of this length, from -1 to 0."""
        over = (content - self._config.free) / (self._config.limit - self._config.free)
        return -min(1.0, max(0.0, over))
