"""The last number of the answer is the right one, within a tolerance."""

import math
import re
from typing import Any

from pydantic import Field

from agentrl.rewards.rules.answer import AnswerRule, AnswerSettings, checked
from agentrl.rewards.rules.notation import exact_number, plain

# Every repetition is bounded, so that no text makes it slow.
_NUMBER = re.compile(
    r"(?:(?<!\w)[-+])?(?<!\d)"
    r"(?:(?:\d{1,3}(?:,\d{3}){1,20}|\d{1,60})(?:\.\d{0,60})?|\.\d{1,60})"
    r"(?:[eE][-+]?\d{1,3}\b)?"
)


class Numeric(AnswerRule):
    """1 where the last number of the answer is near a right one.

    It reads 1,234.5 and -3e-2 and 3 × 10⁻² and a percent sign as a hundredth; a fraction counts by
    its last number, so ask for decimals (or use the rule `math`).
    """

    class Config(AnswerSettings):
        """The tolerance."""

        tolerance: float = Field(1e-6, ge=0)
        """Largest difference, as a share of the larger number."""
        absolute: float = Field(0.0, ge=0)
        """A difference that is always allowed, however small the right number is."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._config = config

    def right(self, answer: str, gold: Any) -> bool:
        """True if the last number is near this one."""
        value = last_number(answer)
        right = checked(self._config.gold, gold, _parse_gold)
        return value is not None and math.isclose(
            value, right, rel_tol=self._config.tolerance, abs_tol=self._config.absolute
        )


def last_number(text: str) -> float | None:
    """The last number in a text; None where there is none."""
    text = plain(text)
    found = None
    for found in _NUMBER.finditer(text):  # noqa: B007  the last one
        pass
    if found is None:
        return None
    value = float(found[0].replace(",", ""))
    follows = text[found.end() : found.end() + 20].lstrip().removeprefix("\\")  # LaTeX writes \%
    return value / 100 if follows[:1] == "%" else value


def _parse_gold(gold: Any) -> float:
    """The number of a right answer, which may be text.

    Raises:
        ValueError: there is none.
    """
    exact = last_number(gold) if isinstance(gold, str) else exact_number(gold)
    value = None if exact is None else float(exact)
    if value is None or not math.isfinite(value):
        raise ValueError("the rule `numeric` needs a number")
    return value
