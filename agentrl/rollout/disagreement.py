"""`rollout.branches.at=disagreement`: branches leave most often at the turns whose answers decide
most, as measured on the run's earlier trees.

The variance of the returns of siblings that part at a turn comes from everything that is decided
from that turn on. So the drop of this variance from one turn to the next is the part that the
answer of the turn decides: the variance of the values of the states that the siblings reach. Only
trees that have been trained on count, so nothing in an episode influences where it branches.
`BranchesConfig` draws the turns.
"""

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, variance
from typing import Any

from agentrl.trajectory import Group

NEWEST = 64
"""Branch points that count for each turn: older ones come from older policies."""


@dataclass(slots=True)
class _Trees:
    """Statistics of the trees of an environment."""

    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=NEWEST))
    """Turns of the newest whole episodes."""
    variances: defaultdict[int, deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=NEWEST))
    )
    """The variances of the returns at the newest branch points, by turn."""


@dataclass(slots=True)
class Disagreement:
    """How far the returns of siblings differ, by environment and by the turn at which they part.

    Its state is kept in checkpoints.
    """

    _trees: defaultdict[str, _Trees] = field(default_factory=lambda: defaultdict(_Trees))

    def observe(self, group: Group) -> None:
        """Count the trees of a group that is trained on."""
        trees = self._trees[group.task.env]
        earned = dict(zip((t.id for t in group.trajectories), group.rewards_G, strict=True))
        siblings: dict[tuple[str, int], list[float]] = {}
        for trajectory in group.trajectories:
            if (point := trajectory.branch) is None:
                trees.lengths.append(len(trajectory.turns))
            else:
                # The parent is a sibling of its branches: it also plays on from this turn.
                returns = siblings.setdefault((point.parent, point.turn), [earned[point.parent]])
                returns.append(earned[trajectory.id])
        for (_, turn), returns in siblings.items():
            trees.variances[turn].append(variance(returns))

    def spreads(self, env: str) -> dict[int, float]:
        """How much is decided from a turn on, by turn: the mean variance of the returns of the
        siblings that part there, times the share of episodes that reach the turn.
        """
        trees = self._trees.get(env, _Trees())
        spreads = {}
        for turn, variances in sorted(trees.variances.items()):
            reached = sum(length > turn for length in trees.lengths) / len(trees.lengths)
            spreads[turn] = reached * fmean(variances)
        if spreads:
            spreads[max(trees.lengths)] = 0.0  # nothing is decided after the last turn
        return spreads

    def state(self) -> Mapping[str, Any]:
        """The statistics, by environment, for `restore`."""
        return {
            env: {
                "lengths": list(trees.lengths),
                "variances": [[turn, list(newest)] for turn, newest in trees.variances.items()],
            }
            for env, trees in self._trees.items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the statistics of an earlier launch."""
        for env, kept in state.items():
            trees = self._trees[env]
            trees.lengths.extend(kept["lengths"])
            for turn, variances in kept["variances"]:
                trees.variances[turn].extend(variances)
