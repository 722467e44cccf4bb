"""The answer is mathematically equal to the right one."""

import logging
import re
from typing import Any

from agentrl.errors import ConfigError
from agentrl.package.distribution import install_command
from agentrl.rewards.rules.answer import AnswerRule, AnswerSettings, checked
from agentrl.rewards.rules.final_answer import (
    answer_part,
    final_answer,
    in_dollars,
    last_formula,
    two_sided,
)
from agentrl.rewards.rules.notation import exact_number, plain, without_exponents
from agentrl.rewards.rules.sameness import NOT_COMPUTED, close, same, value_of
from agentrl.rewards.rules.units import units_differ, without_unit
from agentrl.trajectory import Task

LONGEST_MATH = 2_000
"""Characters of an answer that are parsed: its last ones."""


class Math(AnswerRule):
    """1 where the answer (its last boxed, LaTeX or plain expression) is mathematically equal to the
    right one.

    math-verify parses both. Numbers are compared exactly; a decimal is right if it agrees with the
    right answer to six decimals and five significant digits, or to twelve significant digits.
    `5e-5` is 0.00005, and has Euler's number only where the right answer has it. A right answer
    that is a word, such as `Monday`, is compared as text. Where both have a unit of measure it is
    the same one: neither 12 m nor 0.12 m answers a question for 12 cm, and 12 does.

    sympy can be made to compute for ever by a short text, so this runs in a process with a
    deadline. Needs the package math-verify (`pip install "agentrl-train[rewards]"`).
    """

    isolation = "process"
    imports = ("math_verify",)

    class Config(AnswerSettings):
        """The places of the answers."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._option = config.gold

    def check_first_task(self, task: Task) -> None:
        """Check that mathematics can be read from the right answers of a task.

        Raises:
            ConfigError: it cannot.
        """
        for gold in self.golds(task):
            if not _as_words(text := _gold_as_text(gold)):
                self._forms(gold, text)

    def golds(self, task: Task) -> tuple[Any, ...]:
        """The right answers.

        Raises:
            ConfigError: there is none, or one is neither text nor a number.
        """
        golds = super().golds(task)
        for gold in golds:
            checked(self._option, gold, _gold_as_text)
        return golds

    def right(self, answer: str, gold: Any) -> bool:
        """True if both are equal. An answer that cannot be read, or compared with the right one, is
        not.

        Raises:
            ConfigError: the right answer cannot be read.
        """
        # sympy's time grows fast with the length, and the answer stands at the end.
        answer, text = answer[-LONGEST_MATH:], checked(self._option, gold, _gold_as_text)
        said = [
            part for part in (final_answer(answer, several=False), last_formula(answer)) if part
        ]
        if word := _as_words(text):
            return any(_as_words(part, shortest=1) == word for part in said)
        if units_differ(text, answer_part(answer)):
            return False
        # math-verify finds nothing in some right answers, such as the word DNE, unless they are
        # marked as mathematics.
        if any(_letters(part) == _letters(text) for part in said[:1]):
            return True
        forms = self._forms(gold, text)
        return any(_is_right(answer, form, in_percent="%" in text) for form in forms)

    def _forms(self, gold: Any, text: str) -> list[Any]:
        """The meanings of the right answer as sympy's expressions: two of them for `2e-3`.

        Raises:
            ConfigError: there is no mathematics in it.
        """
        from sympy import Float, Rational

        if not isinstance(gold, str):
            return [(Float if isinstance(gold, float) else Rational)(text)]
        text = without_unit(text)
        readings = [plain(text), without_exponents(text)]
        parsed = [_parse(_readable_gold(reading)) for reading in readings if reading is not None]
        forms = [found[0] for found in parsed if found and not isinstance(found[0], str)]
        if not forms:
            raise ConfigError(
                f"the task's option {self._option!r} is {gold!r:.80}, in which there is no"
                " mathematics"
            )
        return forms


def _gold_as_text(gold: Any) -> str:
    """A right answer as text.

    Raises:
        ValueError: it is neither text nor a finite number.
    """
    if isinstance(gold, str):
        return gold
    number = exact_number(gold)
    if number is None:
        raise ValueError("the rule `math` needs a number, or mathematics as text, such as '(1, 2)'")
    return str(number)


_WRAPPED = re.compile(r"\\(?:text|mathrm|textbf|mathbf|textit|operatorname|mbox)\s*\{([^{}]*)\}")
_LETTERS = re.compile(r"[^\W\d_]+(?:[ '\u2019-]+[^\W\d_]+)*")
_SHORT_WORDS = frozenset(("yes", "no", "odd"))
_FUNCTIONS = frozenset(
    (
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "log",
        "ln",
        "exp",
        "sqrt",
        "pi",
        "max",
        "min",
        "lim",
        "and",
        "or",
    )
)


def _as_words(text: str, shortest: int = 4) -> str | None:
    """A text that is words and no mathematics, without its LaTeX and capitals; None for others.

    What is not marked as text, as by `\\text{...}`, has so many letters at least, or is one of a
    few short words: `xy` is a product.
    """
    bare = text.replace("$", "").strip()
    said, marked = _WRAPPED.subn(r"\1", bare)
    said = said.strip("().* ")
    if not _LETTERS.fullmatch(said):
        return None
    if not marked and len(said) < shortest and said.casefold() not in _SHORT_WORDS:
        return None
    words = said.casefold().replace("\u2019", "'").split()
    return None if _FUNCTIONS.intersection(words) else " ".join(words)


def _letters(text: str) -> str:
    """A text without what surrounds and spaces out its letters and signs."""
    bare = _WRAPPED.sub(r"\1", plain(text).replace("$", ""))
    return "".join(bare.strip(" \t\n*`").removesuffix(".").split())


def _readable_gold(text: str) -> str:
    """A right answer in the form in which math-verify reads all of it."""
    if "boxed" in text:
        return final_answer(text, several=True) or ""
    text = two_sided(text)
    return text if "$" in text else in_dollars(text)


def _parse(text: str) -> list[Any]:
    """The results of math-verify for a text: one of sympy's expressions if it can read one, and its
    text.
    """
    try:
        from math_verify import parse
    except ImportError as error:
        raise ConfigError(
            f"reward=math needs math-verify ({error}): {install_command('rewards')}"
        ) from error
    # It warns that we set the deadline ourselves.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return list(parse(text, parsing_timeout=None))


def _is_right(answer: str, expected: Any, *, in_percent: bool) -> bool:
    """True if the answer in a message equals an expression, in one of its readings."""
    from sympy import E, FiniteSet, Tuple

    several = isinstance(expected, FiniteSet | Tuple)
    readings = [answer, without_exponents(answer) if expected.has(E) else None]
    said = [final_answer(reading, several=several) for reading in readings if reading is not None]
    parsed = [_parse(text) for text in said if text is not None]
    forms = [found[0] for found in parsed if found and not isinstance(found[0], str)]
    return any(_is_equal(form, expected, in_percent=in_percent) for form in forms)


def _is_equal(form: Any, expected: Any, *, in_percent: bool) -> bool:
    """True if a parsed answer can be right, and equals the expression."""
    try:
        meant = is_meant(form, expected) and _agrees_in_percent(
            form, expected, in_percent=in_percent
        )
        return meant and same(expected, form)
    except NOT_COMPUTED:  # nobody can say that such an answer is right
        return False


def _agrees_in_percent(form: Any, expected: Any, *, in_percent: bool) -> bool:
    """True if an answer with a percent sign, or to a question that has one, can be right.

    math-verify ignores the sign where that helps. Here 7 % is 0.07, and answers a question for a
    share only: the right answer is `in_percent` too, or between -1 and 1.
    """
    from sympy import UnevaluatedExpr

    share = value_of(expected)
    if share is None or not (in_percent or form.has(UnevaluatedExpr)):
        return True
    return close(form, expected) and (in_percent or abs(share) <= 1)


def is_meant(form: Any, expected: Any) -> bool:
    """True if a parsed answer can be right: no equation in it is false, and it is a set only if a
    set is expected.

    math-verify compares the last side of `5 = 7`, and the only element of a set or of the interval
    [7, 7].
    """
    from sympy import Basic, Equality, Expr, Set

    expected = expected.rhs if isinstance(expected, Equality) else expected
    if isinstance(form, Set) and isinstance(expected, Expr):
        return False
    equations = form.atoms(Equality) if isinstance(form, Basic) else ()
    return not any(
        # None where sympy cannot tell, which is no reason to call an answer wrong.
        not (each.lhs.free_symbols | each.rhs.free_symbols) and each.lhs.equals(each.rhs) is False
        for each in equations
    )
