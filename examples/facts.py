"""Short questions whose answer a small pretrained model often knows, and seldom says in one
sentence that ends.

The questions are the rows of facts.jsonl: capitals and opposites, each with an answer of its own,
so that no answer is right for more than a few of them.
"""

import re
from collections.abc import Mapping
from typing import Any

from agentrl import Settings, StepResult, TextEnv, read_options

MOST_WORDS = 8
"""Words of an answer: "The capital of New Zealand is Wellington" has seven."""


class Facts(TextEnv):
    """One question. Reward 1 if the answer has at most eight words and the right one is the last of
    them.
    """

    isolation = "inline"

    class Options(Settings):
        """A row of the file."""

        prompt: str
        """The question."""
        answer: str
        """Its right answer."""

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        """Ask the question."""
        row = read_options(self.Options, options)
        self.answer = words(row.answer)
        return row.prompt

    def step(self, action: str) -> StepResult:
        """Compare the last words; case and punctuation do not matter."""
        said = words(action)
        right = len(said) <= MOST_WORDS and said[-len(self.answer) :] == self.answer
        return "", float(right), True, False, {"success": right}


def words(text: str) -> list[str]:
    """The words of a text, in lower case and without punctuation."""
    return re.findall(r"[a-z]+", text.lower())
