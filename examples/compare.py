"""Comparing two numbers, answered by one word: a task that a small pretrained model does sometimes, but not often."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from agentrl.envs.base import TextEnv, read_options
from agentrl.protocols import Settings, StepResult


class Compare(TextEnv):
    """One question about two numbers. Reward 1 if the answer is the right one of yes and no, and nothing else."""

    isolation = "inline"

    class Options(Settings):
        """What `reset(options=...)` takes."""

        high: int = Field(99, ge=1)
        """The numbers are from 0 to this one."""

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        """Draw the numbers, which differ."""
        first, second = self.rng.sample(range(read_options(self.Options, options).high + 1), 2)
        self.answer = "yes" if first > second else "no"
        return f"Is {first} larger than {second}? Answer yes or no."

    def step(self, action: str) -> StepResult:
        """Compare the answer; case and a full stop do not matter."""
        right = action.strip().lower().removesuffix(".") == self.answer
        return "", float(right), True, False, {"success": right}
