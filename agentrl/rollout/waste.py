"""`Waste`: tokens that were sampled and are not trained on, by reason.

| reason | whose tokens |
|---|---|
| `failed` | episodes that failed, and the other members of groups that failed |
| `surplus` | members whose group was complete without them (`rollout.extra_members`) |
| `stale` | groups that a staleness rule gave up |
| `filtered` | groups whose advantages are all 0 (`rollout.filter_zero_variance`) |

Tokens of an answer that was cut short are not known here: only the engine has seen them.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from agentrl.trajectory import Group, Trajectory

Reason = Literal["failed", "surplus", "stale", "filtered"]


@dataclass(slots=True)
class Waste:
    """Counts tokens until `metrics` is called, and then from zero."""

    _thrown_away: Counter[Reason] = field(default_factory=Counter)
    _trained: int = 0

    def episode(self, why: Reason, tokens: int) -> None:
        """Count the sampled tokens of an episode that was cut off or has failed."""
        self._thrown_away[why] += tokens

    def episodes(self, why: Reason, trajectories: Iterable[Trajectory]) -> None:
        """Count episodes that came to an end."""
        self._thrown_away[why] += sum(map(_new_tokens, trajectories))

    def trained(self, groups: Iterable[Group]) -> None:
        """Count what is trained on."""
        self._trained += sum(
            _new_tokens(trajectory) for group in groups for trajectory in group.trajectories
        )

    def metrics(self) -> dict[str, float]:
        """The tokens since the last call, and their share of those that were sampled."""
        wasted = self._thrown_away.total()
        sampled = wasted + self._trained
        found = {
            f"wasted_tokens/{why}": float(count)
            for why, count in self._thrown_away.items()
            if count
        }
        self._thrown_away.clear()
        self._trained = 0
        return {
            "wasted_tokens": float(wasted),
            "wasted_share": wasted / sampled if sampled else 0.0,
            **found,
        }


def _new_tokens(trajectory: Trajectory) -> int:
    return sum(len(turn.completion.token_ids) for turn in trajectory.new_turns)
