"""Results of games: the policy's success by the opponent's version and by seat."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from agentrl.trajectory import Group, succeeded

_DECAY = 0.5
"""How much earlier games count against those of the newest step in which an opponent was met."""


def results_of(groups: Sequence[Group]) -> dict[str, float]:
    """A step's metrics of games against opponents: episodes and success, by version and seat, and
    of all together.

    Episodes of which nothing tells whether they succeeded count in the share alone.
    """
    games: dict[tuple[int, str], list[bool]] = defaultdict(list)
    pairs = [
        pair for group in groups for pair in zip(group.trajectories, group.scores, strict=True)
    ]
    met = [(trajectory, score) for trajectory, score in pairs if trajectory.opponent is not None]
    for trajectory, score in met:
        won = succeeded(trajectory, score)
        if trajectory.opponent is not None and won is not None:
            games[trajectory.opponent, trajectory.agent].append(won)
    metrics = {"opponents/share": len(met) / len(pairs)}
    for (version, agent), of_seat in sorted(games.items()):
        metrics[f"opponents/{version}/{agent}/episodes"] = float(len(of_seat))
        metrics[f"opponents/{version}/{agent}/success"] = fmean(of_seat)
    if games:
        metrics["opponents/success"] = fmean(one for of_seat in games.values() for one in of_seat)
    return metrics


@dataclass(slots=True)
class Results:
    """How the policy has done against each version, mostly of late: (episodes won, episodes)."""

    tallies: dict[int, tuple[float, float]] = field(default_factory=dict)

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add the results of a step, as `results_of` gives them."""
        met: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for name, episodes in metrics.items():
            if match := re.fullmatch(r"opponents/(\d+)/(.+)/episodes", name):
                won = episodes * metrics[f"opponents/{match[1]}/{match[2]}/success"]
                met[int(match[1])].append((won, episodes))
        for version, found in met.items():
            won, episodes = self.tallies.get(version, (0.0, 0.0))
            self.tallies[version] = (
                _DECAY * won + sum(one for one, _ in found),
                _DECAY * episodes + sum(count for _, count in found),
            )

    def success(self, version: int) -> float:
        """The policy's success against a version: (won + 1) / (episodes + 2), which is 1/2 for an
        unknown one.
        """
        won, episodes = self.tallies.get(version, (0.0, 0.0))
        return (won + 1) / (episodes + 2)

    def weight(self, version: int) -> float:
        """How often a version is drawn, up to a factor: (1 - success)^2, the most often those that
        are hard to beat.

        Prioritised fictitious self-play: Vinyals et al., "Grandmaster level in StarCraft II using
        multi-agent reinforcement learning" (Nature 575, 2019), Methods.
        """
        return (1 - self.success(version)) ** 2
