"""`rollout.branches`: episodes that start from a turn of another one (their parent) instead of from
the beginning.

    branches: {at: uniform, width: 1, budget: 2}

Where to branch is decided before the episode, or by what it has shown so far, and never by what
comes after the turn. Otherwise the branches would be a biased sample of what the policy plays from
that state on (`agentrl/algorithms/branches.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from types import MappingProxyType
from typing import Literal, TypeVar

import numpy as np
from pydantic import Field, model_validator

from agentrl.settings.base import Settings
from agentrl.trajectory import BranchPoint, Trajectory, Turn

T = TypeVar("T")

NO_SPREADS: Mapping[int, float] = MappingProxyType({})
"""No earlier tree is known."""
EXPLORED = 0.25
"""With `at=disagreement`, the share of branches that is drawn equally from all turns."""
FIRST_TOKENS = 8
"""Tokens of an answer that tell how sure the policy was of it."""


class BranchesConfig(Settings):
    """Where the members of a group branch, and how often."""

    at: Literal["uniform", "entropy", "every", "level", "disagreement"] = "uniform"
    """The turns at which branches leave a member: `uniform` draws their numbers, `level` spreads
    them evenly, `every` takes the first ones in turn, `entropy` those after an answer that the
    policy was unsure of (`nats`), to measure what it was worth, and `disagreement` draws them by
    what their answers decided in earlier trees: how much more the returns of siblings differ that
    part there than at the next turn."""
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

    def possible(self, turns: int) -> range:
        """The turns at which a branch can leave an episode of at most this many turns."""
        return range(1, min(self.before or turns, turns))

    def plan(
        self, turns: int, rng: Random, spreads: Mapping[int, float] = NO_SPREADS
    ) -> "BranchPlan":
        """Where a member branches whose episode has at most `turns` turns. `spreads`: see
        `Disagreement.spreads`.
        """
        points = self.budget // self.width
        possible = self.possible(turns)
        if self.at == "entropy":
            return BranchPlan(frozenset(possible), points, self.nats)
        if self.at == "every":
            chosen = list(possible[:points])
        elif self.at == "uniform":
            chosen = rng.sample(possible, min(points, len(possible)))
        elif self.at == "disagreement":
            weights = chances(spreads, possible, turns)
            chosen = draw_distinct(dict(zip(possible, weights, strict=True)), points, rng)
        else:
            last = len(possible) + 1
            chosen = [round(n * last / (points + 1)) for n in range(1, points + 1)]
        return BranchPlan(frozenset(chosen).intersection(possible), points)


def chances(spreads: Mapping[int, float], turns: Sequence[int], end: int) -> list[float]:
    """The probability of each of these turns: in part equal, for the rest proportional to how much
    the turn decides.

    A turn decides the difference between its spread and that of the next turn. The spread is
    interpolated between the turns at which it is known, and falls to 0 at `end`, the limit of
    episodes.

    Example: with the spreads {1: 1.0, 3: 0.2} and end = 4, the spread is 0.6 at turn 2, so turns 1
    and 2 decide 0.4 each and turn 3 the last 0.2.
    """
    known = [turn for turn in sorted(spreads) if turn < end]
    heights = [*(spreads[turn] for turn in known), 0.0]
    before = np.interp(turns, [*known, end], heights)
    after = np.interp([turn + 1 for turn in turns], [*known, end], heights)
    decided = [max(0.0, float(drop)) for drop in before - after]
    equal, total = 1 / len(turns), sum(decided)
    if total <= 0:
        return [equal] * len(turns)
    # The share first: a product of the smallest floats would round it up.
    return [(1 - EXPLORED) * (drop / total) + EXPLORED * equal for drop in decided]


def draw_distinct(weights: Mapping[T, float], count: int, rng: Random) -> list[T]:
    """Draw up to `count` of the keys by their weights, without replacement."""
    left = dict(weights)
    drawn: list[T] = []
    while left and len(drawn) < count:
        (key,) = rng.choices(list(left), list(left.values()))
        drawn.append(key)
        del left[key]
    return drawn


@dataclass(frozen=True, slots=True)
class BranchPlan:
    """Where an episode is to branch."""

    turns: frozenset[int]
    """The numbers of the turns at which branches may leave."""
    points: int
    """Maximum number of turns at which branches leave."""
    nats: float | None = None
    """If set, branches leave only after an answer with a `surprise` above this."""

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
    """The start of a branch."""

    state: bytes
    """A snapshot of the environment."""
    parent: Trajectory
    """The episode that it leaves, which is over."""
    branch: BranchPoint

    @property
    def shared(self) -> Sequence[Turn]:
        """The turns before the branch point, which belong to both episodes."""
        return self.parent.turns[: self.branch.turn]
