"""The answer to a multiple-choice question."""

import re
import unicodedata
from typing import Any

from pydantic import Field

from agentrl.rewards.rules.answer import AnswerRule, AnswerSettings, checked


class Choice(AnswerRule):
    """1 where the choice that the answer names is the right one.

    Read in this order: the last "answer is (C)", "answer: C" or "option C"; the last "(C)" or
    "\\boxed{C}"; the last line that is a letter or begins with "C." or "C)". "C or D" names none.
    """

    class Config(AnswerSettings):
        """The letters."""

        choices: str = Field("ABCDE", pattern=r"^[A-Z]+$")
        """Letters that are choices."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._config = config
        letter = rf"[{config.choices}]"
        named = r"(?i:answer)\*{0,2}(?: is:?[ *]{1,4}|:[ *]{0,4})|(?i:option|choice)[ *]{1,4}"
        boxed = r"\\boxed\{(?:\\(?:text|mathrm|textbf|mathbf)\{)?"
        self._patterns = [
            re.compile(rf"(?:{named})(?:{boxed})?\(?({letter})\b"),
            re.compile(rf"(?:\(|{boxed}\(?)({letter})[)}}]"),
            re.compile(rf"(?m)^[ *]{{0,4}}({letter})(?:[.):]|[ *]{{0,4}}$)"),
        ]
        # "A and B is wrong" names A alone.
        self._several = re.compile(
            rf"{letter}[)*}}]{{0,4}} ?(?:/|&|\bor\b|\band\b) ?[(*]{{0,4}}{letter}\b"
            r"(?! (?:is|are|was|were|would|cannot|can|does)\b)"
        )

    def right(self, answer: str, gold: Any) -> bool:
        """True if this letter (or the number of a choice, from 0) is named."""
        return bool(
            self.find_choice(answer) == checked(self._config.gold, gold, self._parse_letter)
        )

    def find_choice(self, answer: str) -> str | None:
        """The letter that an answer names; None where it names none."""
        answer = unicodedata.normalize("NFKC", answer)  # full-width letters and brackets
        several = [found.span() for found in self._several.finditer(answer)]
        for pattern in self._patterns:
            last = None
            for last in pattern.finditer(answer):  # noqa: B007  the last one
                pass
            if last is not None:
                # A later pattern may match a letter of the same two, so it is not asked.
                place = last.start(1)
                is_one = not any(first <= place < stop for first, stop in several)
                return last[1] if is_one else None
        return None

    def _parse_letter(self, gold: Any) -> str:
        """The letter of a right answer, which may be its number.

        Raises:
            ValueError: it is no choice.
        """
        if (
            isinstance(gold, int)
            and not isinstance(gold, bool)
            and 0 <= gold < len(self._config.choices)
        ):
            return self._config.choices[gold]
        letter = str(gold).strip("() .").upper()
        if letter not in tuple(self._config.choices):
            raise ValueError(
                f"the rule `choice` needs one of the letters {self._config.choices}, or its number"
            )
        return letter
