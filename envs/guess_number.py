"""Guess a number: the smallest complete environment without tools. Copy it to start your own."""

import random
import re
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from agentrl.envs.base import TextEnv, plays, read_options
from agentrl.protocols import StepResult
from agentrl.settings.base import Settings


class GuessNumber(TextEnv):
    """A secret number from 1 to `high`; after each guess a hint, higher or lower. Reward 1 for the
    right guess.
    """

    system_prompt = "Guess the secret number. Answer with one number."
    # It answers in microseconds, so it needs no thread.
    isolation = "inline"
    restorable = True

    class Options(Settings):
        """The options of `reset`."""

        high: int = Field(16, ge=1)
        """The secret number is from 1 to this one."""
        prefixes: int = Field(1, ge=1)
        """The number of prefixes that the numbers of a task may have, for many more tasks: with
        `high` 16 and the prefix 37 they are 3701 to 3716."""
        max_turns: int = Field(8, ge=1)
        """Guesses before the episode is truncated; a message without a number counts as one."""

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        """Draw the secret. All state of the episode is set here, so nothing is left over from the
        last one.
        """
        self.options = read_options(self.Options, options)
        # The base class has seeded `rng`: never use the global `random`.
        secret = self.rng.randint(1, self.options.high)
        before = self.rng.randrange(self.options.prefixes) * 10 ** len(str(self.options.high))
        self.secret = before + secret
        self.range = before + 1, before + self.options.high
        self.turns = 0
        # The range that is not yet ruled out; only the scripted player below uses it.
        self.low, self.high = self.range
        return f"Guess a number {self._range_text()}."

    def step(self, action: str) -> StepResult:
        """Compare the guess with the secret."""
        self.turns += 1
        hint = self._hint(action)
        right = hint == "right"
        truncated = not right and self.turns >= self.options.max_turns
        # The reward is always a float. Evaluations count "success".
        return hint, float(right), right, truncated, {"success": right}

    def _range_text(self) -> str:
        low, high = self.range
        return f"from {low} to {high}"

    def _hint(self, action: str) -> str:
        # A message is free text. Answer one that cannot be used; never raise.
        numbers = re.findall(r"(?<![\w.-])\d{1,9}(?![\w.])", action, re.ASCII)
        if len(numbers) != 1:
            return f"Answer with one number {self._range_text()}."
        guess = int(numbers[0])
        if guess == self.secret:
            return "right"
        if guess < self.secret:
            self.low = max(self.low, guess + 1)
            return "higher"
        self.high = min(self.high, guess - 1)
        return "lower"


@plays(GuessNumber)
def weak_player(env: GuessNumber, rng: random.Random, skill: float = 0.3) -> str:
    """Halve the remaining range with probability `skill`, else guess. For warm starts."""
    if rng.random() < skill:
        return str((env.low + env.high) // 2)
    return str(rng.randint(*env.range))
