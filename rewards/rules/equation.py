"""The answer is mathematically equal to the right one."""

import logging
import math
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
        answer = answer[-LONGEST_MATH:]
        parsed = [
            form for form in parse(answer, parsing_timeout=None) if isinstance(form, str) or is_meant(form, expected[0])
        ]
        if not any(not isinstance(form, str) for form in parsed):
            return False
        if ("%" in answer or "%" in text) and not same_share(value_of(parsed[0]), value_of(expected[0]), "%" in text):
            return False
        return bool(verify(expected, parsed, timeout_seconds=None))


def same_share(answer: float | None, expected: float | None, in_percent: bool) -> bool:
    """Whether an answer with a percent sign, or to a question that has one, can be right.

    math-verify ignores the sign where that helps. Here 7 % is 0.07, and answers a question for a share only: the right
    answer is `in_percent` too, or between -1 and 1.
    """
    if answer is None or expected is None:
        return True
    return math.isclose(answer, expected, rel_tol=1e-6) and (in_percent or abs(expected) <= 1)


def is_meant(form: Any, expected: Any) -> bool:
    """Whether a parsed answer can be right: no equation in it is false, and it is a set only if a set is expected.

    math-verify compares the last side of `5 = 7`, and the only element of a set or of the interval [7, 7].
    """
    from sympy import Equality, Expr, Set

    expected = expected.rhs if isinstance(expected, Equality) else expected
    if isinstance(form, Set) and isinstance(expected, Expr):
        return False
    equations = form.atoms(Equality) if hasattr(form, "atoms") else ()
    return not any(not (each.lhs.free_symbols | each.rhs.free_symbols) and _differ(each) for each in equations)


def _differ(equation: Any) -> bool:
    return bool(equation.lhs.equals(equation.rhs) is False)


def value_of(form: Any) -> float | None:
    """The number that a form stands for, or that its last side gives a variable; None if it is no number."""
    from sympy import Equality, Expr

    form = form.rhs if isinstance(form, Equality) else form
    if not isinstance(form, Expr) or form.free_symbols:
        return None
    try:
        return float(form.doit().evalf())
    except (TypeError, ValueError, OverflowError):
        return None
