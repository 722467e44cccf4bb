"""`Budget`: what an episode may use before it is over, `rollout.budget`.

    budget: {turns: 40, tokens: 8192, seconds: 600}

An episode that has used up any of these is truncated where it stands, and trained on. A deadline
(`rollout.deadlines`) is something else: what misses one has failed, and is played again. The limit
of a single answer is `rollout.sampling.max_tokens`.
"""

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
    """What an episode may use; it is truncated after that."""

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
        """The limit that an episode has reached, as `Truncated` names it; empty while it may go on."""
        if turns >= self.turns:
            return "turns"
        if self.tokens is not None and tokens >= self.tokens:
            return "tokens"
        return "seconds" if self.seconds is not None and seconds >= self.seconds else ""
