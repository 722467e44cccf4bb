"""Arithmetic with tools: the smallest complete tool environment. Copy it to start your own."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from agentrl.envs.base import ToolEnv, ToolError, ToolResult, read_options
from agentrl.settings.base import Settings


class Calculator(ToolEnv):
    """A word problem with numbers too large to guess; each public method below is a tool for the
    model.

    Reward 1 for the right answer, given with `submit`, which ends the episode.
    """

    system_prompt = (
        "Solve the problem with the tools. Compute every step with a tool, then submit the result."
    )
    # It answers in microseconds, so it needs no thread.
    isolation = "inline"
    restorable = True

    class Options(Settings):
        """The options of `reset`."""

        digits: int = Field(3, ge=1, le=9)
        """Digits of each number in the problem."""

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        """Draw the problem. All state of the episode is set here."""
        digits = read_options(self.Options, options).digits
        # The base class has seeded `rng`: never use the global `random`.
        boxes, each, lost = (self.rng.randrange(10 ** (digits - 1), 10**digits) for _ in range(3))
        lost = min(lost, boxes * each)
        self.answer = boxes * each - lost
        return (
            f"A shop gets {boxes} boxes of {each} apples each. {lost} apples are bad. How many good"
            " apples are there?"
        )

    # The signature becomes the schema that the model sees, the docstring its description. Arguments
    # are checked against the types before the method is called.

    def add(self, a: int, b: int) -> int:
        """Compute a + b."""
        return self._check_size(a) + self._check_size(b)

    def subtract(self, a: int, b: int) -> int:
        """Compute a - b."""
        return self._check_size(a) - self._check_size(b)

    def multiply(self, a: int, b: int) -> int:
        """Compute a * b."""
        return self._check_size(a) * self._check_size(b)

    def divide(self, a: int, b: int) -> float:
        """Compute a / b."""
        if b == 0:
            # The model sees this error; any other exception would be a failure of the environment.
            raise ToolError("division by zero")
        return self._check_size(a) / self._check_size(b)

    def submit(self, answer: int) -> ToolResult:
        """Give the final answer. There is only one try.

        Args:
            answer: the number of good apples
        """
        right = answer == self.answer
        verdict = "right" if right else "wrong"
        return ToolResult(verdict, reward=float(right), terminated=True, success=right)

    # An underscore keeps a method from being a tool.
    def _check_size(self, number: int) -> int:
        if abs(number) >= 10**30:
            raise ToolError("the numbers of this calculator have at most 30 digits")
        return number
