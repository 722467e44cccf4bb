"""The answer is the right one, letter for letter."""

import json
import re
import string
import unicodedata
from decimal import Decimal
from typing import Any

from agentrl.conversation.right_answers import check_it_is_no_solution
from agentrl.rewards.rules.answer import AnswerRule, AnswerSettings, checked
from agentrl.rewards.rules.notation import exact_number, number_in

# Not the minus or the point of a number: -5 is not 5, and 3.5 is not 35.
_OF_A_NUMBER = r"(?!(?<!\w)-\.?\d|\.\d)"
_PUNCTUATION = re.compile(
    rf"{_OF_A_NUMBER}[{re.escape(string.punctuation)}\u2018-\u201f\u2026\u00a1\u00bf]"
)


class Exact(AnswerRule):
    """1 where the answer equals a right one, after spaces are made one and what `ignore_case` and
    the like say.

    A right answer that is a number, and not text, equals every way to write it: 0.00005 is 5e-5,
    and 42 is 42.0.
    """

    class Config(AnswerSettings):
        """The differences that do not count."""

        ignore_case: bool = True
        """Upper and lower case are the same."""
        ignore_punctuation: bool = False
        """Punctuation is left out, but for the signs and points of numbers."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._config = config

    def right(self, answer: str, gold: Any) -> bool:
        """True if both are the same text, or number."""
        right = checked(self._config.gold, gold, _parse_gold)
        if isinstance(right, str):
            return self._normalise(answer) == self._normalise(right)
        said = number_in(answer.strip().removesuffix("."))
        return said is not None and said == right

    def _normalise(self, text: str) -> str:
        """The text without the differences that do not count."""
        text = unicodedata.normalize("NFC", text)  # one form for an accented letter
        text = text.casefold() if self._config.ignore_case else text
        text = _PUNCTUATION.sub("", text) if self._config.ignore_punctuation else text
        return " ".join(text.split())


def _parse_gold(gold: Any) -> str | Decimal:
    """A right answer as the text or the number that it is.

    Raises:
        ValueError: it is neither.
    """
    check_it_is_no_solution("answer", gold)
    if isinstance(gold, bool):  # which is an int too
        return json.dumps(gold)
    right = gold if isinstance(gold, str) else exact_number(gold)
    if right is None:
        raise ValueError("the rule `exact` needs a text or a number, or a list of them")
    return right
