"""Staleness rules of other systems, for comparison in `agentrl simulate` and the benchmarks. No run
is trained with them.

- `Wait`: strictly in order of admission. Bounded; waits for every straggler.
- `Gate` (AReaL, arXiv 2505.24298, eq. 3): at most (s + K + 1) G groups are admitted in total by
  step s; finished groups are taken first come, first served. Never waits for stragglers, which may
  therefore be older than the bound.
- `Drain`: new weights wait until no group is playing, and no group starts meanwhile. Bounded; all
  that is sampled waits for the longest episode.
"""

from heapq import nsmallest
from itertools import islice

from agentrl.rollout.staleness import Mask, StalenessRule, Ticket


class Wait(StalenessRule):
    """Strictly in order of admission."""

    train_with = "deadline_first, which keeps the same bound and waits for fewer stragglers"

    def _choose(self) -> list[Ticket] | None:
        batch = nsmallest(self.groups_per_step, self._ready)
        oldest_playing = next(iter(self._playing), None)
        # A group that is not in the batch, and was admitted before one that is, comes first.
        return None if oldest_playing is not None and oldest_playing < batch[-1] else batch


class Gate(Mask):
    """Limits the number of admissions as `Mask` does; first come, first served. Not bounded, and
    tokens of any age carry loss.
    """

    masks = False
    train_with = (
        "mask, which admits as many groups and never waits either, but lets no token older than the"
        " bound carry loss"
    )

    def _choose(self) -> list[Ticket] | None:
        return list(islice(self._ready, self.groups_per_step))


class Drain(StalenessRule):
    """New weights wait until no group is playing, and no group starts while they wait."""

    train_with = "deadline_first, which keeps the same bound while groups play on"

    def __init__(self, *, max_staleness: int, groups_per_step: int, version: int = 0) -> None:
        super().__init__(
            max_staleness=max_staleness, groups_per_step=groups_per_step, version=version
        )
        self._draining = False

    def may_publish(self) -> bool:
        """Only when no group is playing; after a refusal, no group is admitted before `publish`."""
        self._draining = bool(self._playing)
        return not self._playing

    def publish(self, version: int) -> list[Ticket]:
        """As for every rule."""
        self._draining = False
        return super().publish(version)

    def _has_room(self) -> bool:
        return not self._draining and super()._has_room()
