"""`rollout.branches`: episodes that leave another one at a turn, and go on from there alone.

    branches: {at: uniform, width: 1, budget: 2}

Where to branch is decided before the episode, or by what it has shown so far, and never by what
comes after the turn: else the branches would not be what the policy plays from that state on
(`agentrl/algorithms/branches.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from pydantic import Field, model_validator

from agentrl.settings.base import Settings
from agentrl.trajectory import BranchPoint, Trajectory, Turn

FIRST_TOKENS = 8
"""So many tokens of an answer say how sure the policy was of it."""


class BranchesConfig(Settings):
    """Where the members of a group branch, and how often."""

    at: Literal["uniform", "entropy", "every", "level"] = "uniform"
    """The turns at which branches leave a member: `uniform` draws their numbers, `level` spreads
    them evenly, `every` takes the first ones in turn, and `entropy` those after an answer that
    the policy was unsure of (`nats`), to measure what it was worth."""
    width: int = Field(1, ge=1)
    """Branches that leave at each of these turns."""
    budget: int = Field(1, ge=1)
    """Most branches of a member. Those whose turn it does not reach are not played."""
    before: int | None = Field(None, ge=2)
    """The turns have numbers from 1 to below this one; by default below `rollout.budget.turns`. A
    usual length of episodes wastes fewest branches."""
    nats: float = Field(0.3, ge=0)
    """For `at=entropy`: the mean of -log p over the first 8 tokens of an answer, above which a
    branch leaves after it."""

    @model_validator(mode="after")
    def _a_turn_has_all_of_its_branches(self) -> "BranchesConfig":
        if self.budget < self.width:
            raise ValueError(
                f"budget={self.budget} is less than the width={self.width} of one turn: raise"
                " budget"
            )
        return self

    @property
    def share(self) -> float:
        """The share of each branch in its tree."""
        return 1 / (1 + self.budget // self.width * self.width)

    def plan(self, turns: int, rng: Random) -> "BranchPlan":
        """Where a member branches whose episodes have at most so many turns."""
        points = self.budget // self.width
        possible = range(1, min(self.before or turns, turns))
        if self.at == "entropy":
            return BranchPlan(frozenset(possible), points, self.nats)
        if self.at == "every":
            chosen = list(possible[:points])
        elif self.at == "uniform":
            chosen = rng.sample(possible, min(points, len(possible)))
        else:
            last = len(possible) + 1
            chosen = [round(n * last / (points + 1)) for n in range(1, points + 1)]
        return BranchPlan(frozenset(chosen).intersection(possible), points)


@dataclass(frozen=True, slots=True)
class BranchPlan:
    """Where an episode is to branch."""

    turns: frozenset[int]
    """The numbers of the turns."""
    points: int
    """Most of them that are used."""
    nats: float | None = None
    """Only after an answer that was less sure than this."""

    def has(self, turns: Sequence[Turn], used: int) -> bool:
        """True if a branch leaves after these turns, of which `used` have branches already."""
        if len(turns) not in self.turns or used >= self.points:
            return False
        return self.nats is None or surprise(turns[-1]) > self.nats


def surprise(turn: Turn) -> float:
    """The mean of -log p over the first tokens of an answer, in nats."""
    first = turn.completion.logprobs[:FIRST_TOKENS]
    return -float(first.mean()) if len(first) else 0.0


@dataclass(frozen=True, slots=True)
class BranchStart:
    """The place where an episode leaves another one."""

    state: bytes
    """That of the environment."""
    parent: Trajectory
    """The other episode, which is over."""
    branch: BranchPoint

    @property
    def shared(self) -> Sequence[Turn]:
        """The turns that both have."""
        return self.parent.turns[: self.branch.turn]
