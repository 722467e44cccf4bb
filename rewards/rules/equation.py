"""The answer is mathematically equal to the right one."""

import logging
from typing import Any

from agentrl.errors import ConfigError
from agentrl.rewards.rules.answer import AnswerRule, AnswerSettings

LONGEST_MATH = 2_000
"""Characters of an answer that are parsed: its last ones."""


class Math(AnswerRule):
    """1 where math-verify finds the answer (its last boxed, LaTeX or plain expression) equal to the right one.

    sympy can be made to compute for ever by a short text, so this runs in a process with a deadline. Needs the package
    math-verify (`pip install "agentrl[rewards]"`).
    """

    isolation = "process"
    imports = ("math_verify",)

    class Config(AnswerSettings):
        """Where the answers are."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._option = config.gold

    def right(self, answer: str, gold: Any) -> bool:
        """Whether both are equal. An answer that cannot be read, or compared with the right one, is not.

        Raises:
            ConfigError: the right answer cannot be read.
        """
        from math_verify import parse, verify

        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that we set the deadline ourselves
        text = str(gold)
        expected = parse(text if "$" in text or "\\boxed" in text else f"${text}$", parsing_timeout=None)
        if not expected:
            raise ConfigError(f"the task's option {self._option!r} is {gold!r:.80}, in which there is no mathematics")
        parsed = parse(answer[-LONGEST_MATH:], parsing_timeout=None)
        return bool(parsed) and bool(verify(expected, parsed, timeout_seconds=None))
