"""`rollout.branches`: episodes that leave another one at a turn, and go on from there alone.

    branches: {at: uniform, width: 1, budget: 2}

Where to branch is decided before the episode, or by what it has shown so far, and never by what
comes after the turn: else the branches would not be what the policy plays from that state on
(`agentrl/algorithms/branches.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from types import MappingProxyType
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from agentrl.settings.base import Settings
from agentrl.trajectory import BranchPoint, Trajectory, Turn

NOTHING: Mapping[int, float] = MappingProxyType({})
EXPLORED = 0.25
"""With `at=disagreement`, the share of branches that is drawn equally from all turns."""
FIRST_TOKENS = 8
"""So many tokens of an answer say how sure the policy was of it."""


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
        """The turns at which a branch can leave an episode of at most so many turns."""
        return range(1, min(self.before or turns, turns))

    def plan(self, turns: int, rng: Random, spreads: Mapping[int, float] = NOTHING) -> "BranchPlan":
        """Where a member branches whose episodes have at most so many turns. `spreads`: those of
        the returns of earlier siblings, by the turn at which they parted.
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
            chosen = _drawn(possible, chances(spreads, possible, turns), points, rng)
        else:
            last = len(possible) + 1
            chosen = [round(n * last / (points + 1)) for n in range(1, points + 1)]
        return BranchPlan(frozenset(chosen).intersection(possible), points)


def chances(spreads: Mapping[int, float], turns: Sequence[int], end: int) -> list[float]:
    """How probable each of these turns is: by what it decides, and to a part equally.

    A turn decides the difference between its spread and that of the next turn. Between turns whose
    spread is known it falls evenly, and up to the turn `end`, the limit of episodes, to 0.
    """
    known = [turn for turn in sorted(spreads) if turn < end]
    heights = [*(spreads[turn] for turn in known), 0.0]
    before, after = (
        np.interp([turn + later for turn in turns], [*known, end], heights) for later in (0, 1)
    )
    decided = [max(0.0, float(one)) for one in before - after]
    equal, total = 1 / len(turns), sum(decided)
    if total <= 0:
        return [equal] * len(turns)
    # The share first: a product of the smallest floats would round it up.
    return [(1 - EXPLORED) * (one / total) + EXPLORED * equal for one in decided]


def _drawn(turns: Sequence[int], chances: Sequence[float], count: int, rng: Random) -> list[int]:
    """So many of the turns, each at most once."""
    left = dict(zip(turns, chances, strict=True))
    chosen: list[int] = []
    while left and len(chosen) < count:
        (turn,) = rng.choices(list(left), list(left.values()))
        chosen.append(turn)
        del left[turn]
    return chosen


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
