"""Results of games: the policy's success by the opponent's version and by seat."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean
from typing import Any, Self

from agentrl.trajectory import Group, succeeded

_DECAY = 0.5
"""Weight of earlier games, relative to those of the newest step in which an opponent was met."""


@dataclass(frozen=True, slots=True)
class Games:
    """The games of a step against opponents."""

    share: float
    """Share of all episodes that were played against opponents."""
    wins: Mapping[tuple[int, str], Sequence[bool]]
    """The results of games by the opponent's version and the policy's seat: true for a win.
    Episodes of which nothing tells whether they succeeded count in the share alone.
    """

    @classmethod
    def of_groups(cls, groups: Sequence[Group]) -> Self:
        """The games in the groups of a step."""
        wins: dict[tuple[int, str], list[bool]] = defaultdict(list)
        episodes, against_opponents = 0, 0
        for group in groups:
            for trajectory, score in zip(group.trajectories, group.scores, strict=True):
                episodes += 1
                if trajectory.opponent is None:
                    continue
                against_opponents += 1
                won = succeeded(trajectory, score)
                if won is not None:
                    wins[trajectory.opponent, trajectory.agent].append(won)
        return cls(against_opponents / episodes, dict(sorted(wins.items())))

    def metrics(self) -> dict[str, float]:
        """Episodes and success, by version and seat, and of all together."""
        metrics = {"opponents/share": self.share}
        for (version, agent), of_seat in self.wins.items():
            metrics[f"opponents/{version}/{agent}/episodes"] = float(len(of_seat))
            metrics[f"opponents/{version}/{agent}/success"] = fmean(of_seat)
        if self.wins:
            metrics["opponents/success"] = fmean(chain.from_iterable(self.wins.values()))
        return metrics

    def tallies(self) -> dict[int, tuple[float, float]]:
        """(games won, games) by the opponent's version."""
        tallies: dict[int, tuple[float, float]] = {}
        for (version, _), of_seat in self.wins.items():
            won, games = tallies.get(version, (0.0, 0.0))
            tallies[version] = (won + sum(of_seat), games + len(of_seat))
        return tallies


@dataclass(slots=True)
class Results:
    """The policy's results against each version, mostly recent ones. `Stateful`."""

    tallies: dict[int, tuple[float, float]] = field(default_factory=dict)
    """(Games won, games) by version; earlier games count less."""

    def add(self, tallies: Mapping[int, tuple[float, float]]) -> None:
        """Add the games of a step: (won, games) by version."""
        for version, (won, games) in tallies.items():
            won_before, games_before = self.tallies.get(version, (0.0, 0.0))
            self.tallies[version] = (_DECAY * won_before + won, _DECAY * games_before + games)

    def state(self) -> Mapping[str, Any]:
        """The tallies, by version."""
        return {str(version): list(tally) for version, tally in self.tallies.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the tallies of an earlier launch."""
        self.tallies = {int(version): (won, games) for version, (won, games) in state.items()}

    def success(self, version: int) -> float:
        """The policy's success against a version: (won + 1) / (episodes + 2), which is 1/2 for an
        unknown one.
        """
        won, episodes = self.tallies.get(version, (0.0, 0.0))
        return (won + 1) / (episodes + 2)

    def weight(self, version: int) -> float:
        """The weight of a version in the draw, up to a factor: (1 - success)^2, the largest for
        those that are hard to beat.

        Prioritised fictitious self-play: Vinyals et al., "Grandmaster level in StarCraft II using
        multi-agent reinforcement learning" (Nature 575, 2019), Methods.
        """
        return (1 - self.success(version)) ** 2
