"""`rollout.branches.at=disagreement`: branches leave most often at the turns that decide most, as
the run's earlier trees have shown.

The returns of episodes that have parted at a turn differ by all that is decided from there on. What
they differ less by at the next turn is what the answer to this one decides: the variance of the
values of the states that siblings come to. Only trees that have been trained on count, so nothing
of an episode decides where it branches. `BranchesConfig` draws the turns.
"""

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, variance
from typing import Any

from agentrl.trajectory import Group

NEWEST = 64
"""So many of the newest places count for each turn: those of other policies are forgotten."""


@dataclass(slots=True)
class _Trees:
    """What is known of those of an environment."""

    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=NEWEST))
    """Turns of the newest whole episodes."""
    variances: defaultdict[int, deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=NEWEST))
    )
    """Those of the returns at the newest places, by the turn at which episodes have parted there"""


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
        places: dict[tuple[str, int], list[float]] = {}
        for one in group.trajectories:
            if (left := one.branch) is None:
                trees.lengths.append(len(one.turns))
            else:
                place = places.setdefault((left.parent, left.turn), [earned[left.parent]])
                place.append(earned[one.id])
        for (_, turn), returns in places.items():
            trees.variances[turn].append(variance(returns))

    def spreads(self, env: str) -> dict[int, float]:
        """What is decided from a turn on, by turn: the mean variance of the returns of those that
        part there, times the share of episodes that come so far.
        """
        trees = self._trees.get(env, _Trees())
        found = {}
        for turn, variances in sorted(trees.variances.items()):
            come = sum(length > turn for length in trees.lengths) / len(trees.lengths)
            found[turn] = come * fmean(variances)
        return found | ({max(trees.lengths): 0.0} if found else {})

    def state(self) -> Mapping[str, Any]:
        """What `restore` needs."""
        return {
            env: {
                "lengths": list(trees.lengths),
                "variances": [[turn, list(found)] for turn, found in trees.variances.items()],
            }
            for env, trees in self._trees.items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Know what the run knew whose state this is."""
        for env, known in state.items():
            trees = self._trees[env]
            trees.lengths.extend(known["lengths"])
            for turn, found in known["variances"]:
                trees.variances[turn].extend(found)
