"""`Budget`: what an episode may use before it is over, `rollout.budget`.

    budget: {turns: 40, tokens: 8192, seconds: 600}

An episode that has used up any of these is truncated where it stands, and trained on. A deadline
(`rollout.deadlines`) is something else: what misses one has failed, and is played again. The limit
of a single answer is `rollout.sampling.max_tokens`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from pydantic import Field

from agentrl.settings.base import Settings


class OwnBudget(Settings):
    """The budget of the episodes of one environment, or one suite. What it leaves out is as
    `rollout.budget`.
    """

    turns: int | None = Field(None, gt=0)
    """As `rollout.budget.turns`."""
    tokens: int | None = Field(None, gt=0)
    """As `rollout.budget.tokens`."""
    seconds: float | None = Field(None, gt=0)
    """As `rollout.budget.seconds`."""


class Budget(Settings):
    """Limits of an episode, which is truncated when it reaches one."""

    turns: int = Field(16, gt=0)
    """Turns, of all agents together. Of a program (`env: agent:...`): its calls."""
    tokens: int | None = Field(None, gt=0)
    """Tokens that models sample in all turns, of all agents together. The last answer gets no more
    than what is left; a program's calls at the same time may each have that. By default, only the
    other limits hold."""
    seconds: float | None = Field(None, gt=0)
    """Seconds since the episode began. The turn that is under way then is played to its end. By
    default, only the other limits hold."""

    def with_own(self, own: OwnBudget) -> "Budget":
        """The same, with the limits of an environment or a suite in place of those that it sets."""
        return self.model_copy(update={name: limit for name, limit in own if limit is not None})

    def most_tokens(self, answer: int) -> int:
        """The most tokens that an episode can sample, with answers of at most `answer` tokens."""
        return min(self.turns * answer, self.tokens or self.turns * answer)

    def spent(self, turns: int, tokens: int, seconds: float) -> str:
        """The limit that an episode has reached, as in `Truncated`; empty if there is none."""
        if turns >= self.turns:
            return "turns"
        if self.tokens is not None and tokens >= self.tokens:
            return "tokens"
        return "seconds" if self.seconds is not None and seconds >= self.seconds else ""


def _ignore_answer(tokens: int, context: int) -> None:
    """The default of `BudgetUsage.on_answer`."""


@dataclass(eq=False, slots=True)
class BudgetUsage:
    """The used part of an episode's budget: one value for all of its agents and calls."""

    budget: Budget = field(default_factory=Budget)
    """The limits."""
    sampled_tokens: int = 0
    """Tokens of the models' answers so far."""
    on_answer: Callable[[int, int], None] = _ignore_answer
    """Called with the number of tokens of each answer, and of all contexts after it."""
    contexts: dict[str, int] = field(default_factory=dict)
    """The tokens of each conversation with the policy."""

    def add_answer(self, tokens: int, context: int = 0, session: str = "") -> None:
        """Count an answer of so many tokens. `context`: those of its conversation by now; 0 if an
        engine of another model holds it.
        """
        self.sampled_tokens += tokens
        if context:
            self.contexts[session] = context
        self.on_answer(tokens, sum(self.contexts.values()))

    def longest_answer(self, most: int) -> int:
        """The tokens that the next answer may have: `most`, or fewer if less is left of the
        budget.
        """
        if self.budget.tokens is None:
            return most
        # At least 1, as engines refuse 0: calls at the same time may overdraw the budget.
        return max(1, min(most, self.budget.tokens - self.sampled_tokens))

    def spent(self, turns: int, seconds: float) -> str:
        """The limit that the episode has reached after so many turns and seconds, as `Truncated`
        names it; empty while it may go on.
        """
        return self.budget.spent(turns, self.sampled_tokens, seconds)
