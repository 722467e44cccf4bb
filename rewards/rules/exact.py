"""The answer is the right one, letter for letter."""

import string
from typing import Any

from agentrl.rewards.rules.answer import AnswerRule, AnswerSettings

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Exact(AnswerRule):
    """1 where the answer equals a right one, after spaces are made one and what `ignore_case` and the like say."""

    class Config(AnswerSettings):
        """What makes no difference."""

        ignore_case: bool = True
        """Upper and lower case are the same."""
        ignore_punctuation: bool = False
        """Punctuation is left out."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._config = config

    def right(self, answer: str, gold: Any) -> bool:
        """Whether both are the same text."""
        return self._plain(answer) == self._plain(str(gold))

    def _plain(self, text: str) -> str:
        text = text.casefold() if self._config.ignore_case else text
        text = text.translate(_NO_PUNCTUATION) if self._config.ignore_punctuation else text
        return " ".join(text.split())
