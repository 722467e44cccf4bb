"""The answer fits a regular expression."""

import re
from typing import Any, Literal, Self

from pydantic import model_validator

from agentrl.rewards.rules.answer import AnswerRule, AnswerSettings, answer_of, checked, gold_of
from agentrl.trajectory import Trajectory


class Regex(AnswerRule):
    """1 where the pattern is found in the answer. A pattern that backtracks for ever is ended with its process."""

    isolation = "process"

    class Config(AnswerSettings):
        """The pattern."""

        pattern: str | None = None
        """A regular expression of Python's `re`, for all tasks; by default the task's option `gold` is one."""
        whole: bool = False
        """The whole answer has to fit, and not a part of it."""

        @model_validator(mode="after")
        def _is_a_pattern(self) -> Self:
            if self.pattern is not None:
                _compiled(self.pattern)
            return self

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._config = config

    def content(self, trajectory: Trajectory) -> tuple[str | None, tuple[Any, ...]]:
        """The answer, and the patterns.

        Raises:
            ConfigError: there is no pattern, or it is none.
        """
        shared, gold = self._config.pattern, self._config.gold
        patterns = gold_of(trajectory, gold) if shared is None else (shared,)
        for pattern in patterns:
            checked(gold, str(pattern), _compiled)
        return answer_of(trajectory, self._config.tag), patterns

    def right(self, answer: str, gold: Any) -> bool:
        """Whether the pattern is found."""
        how: Literal["fullmatch", "search"] = "fullmatch" if self._config.whole else "search"
        return getattr(re, how)(str(gold), answer) is not None


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
