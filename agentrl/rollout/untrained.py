"""Episodes that were played and not trained on: some of them are kept, to look at."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from agentrl.trajectory import Score, Trajectory


@dataclass(slots=True)
class UntrainedEpisodes:
    """The first `most` trajectories of each kind of end ("filtered", or the layer that failed);
    taken step by step.
    """

    most: int
    _kept: list[tuple[Trajectory, Score]] = field(default_factory=list)
    _counts: Counter[str] = field(default_factory=Counter)

    def keep(self, kind: str, played: Iterable[tuple[Trajectory, Score]]) -> None:
        """Keep trajectories that will not be trained on, as far as there is room; those without a
        turn are left out.
        """
        for trajectory, score in played:
            if trajectory.turns and self._counts[kind] < self.most:
                self._counts[kind] += 1
                self._kept.append((trajectory, score))

    def take(self) -> list[tuple[Trajectory, Score]]:
        """What was kept since the last call."""
        taken, self._kept = self._kept, []
        self._counts.clear()
        return taken
