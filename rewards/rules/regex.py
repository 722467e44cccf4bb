"""The answer fits a regular expression."""

import re
from typing import Any, Literal, Self

from pydantic import model_validator

from agentrl.rewards.rules.answer import AnswerRule, AnswerSettings, checked
from agentrl.trajectory import Task


class Regex(AnswerRule):
    """1 where the pattern is found in the answer. A pattern that backtracks for ever is ended with
    its process.
    """

    isolation = "process"

    class Config(AnswerSettings):
        """The pattern."""

        pattern: str | None = None
        """A regular expression of Python's `re`, for all tasks; by default the task's option `gold`
        is one.
        """
        whole: bool = False
        """The whole answer has to fit, and not a part of it."""

        @model_validator(mode="after")
        def _is_a_pattern(self) -> Self:
            if self.pattern is not None:
                _compile(self.pattern)
            return self

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._config = config

    def golds(self, task: Task) -> tuple[Any, ...]:
        """The patterns.

        Raises:
            ConfigError: there is no pattern, or it is none.
        """
        patterns = super().golds(task) if self._config.pattern is None else (self._config.pattern,)
        for pattern in patterns:
            checked(self._config.gold, pattern, _compile)
        return patterns

    def right(self, answer: str, gold: Any) -> bool:
        """True if the pattern is found."""
        how: Literal["fullmatch", "search"] = "fullmatch" if self._config.whole else "search"
        return getattr(re, how)(gold, answer) is not None


def _compile(pattern: Any) -> re.Pattern[str]:
    if not isinstance(pattern, str):
        raise ValueError(r"a pattern is text, such as '\b42\b' for the number 42")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
