"""The staleness rule: which group may start, and which groups are trained on next.

A pure object: it knows no task, no clock and no token, only tickets. With K = `max_staleness`, G = `groups_per_step`:

- **admit**: at most (K + 1) G tickets exist at once. One admitted while version v is live has deadline step v + K.
- **select**: step s takes G ready tickets, earliest deadline first. It waits exactly as long as every choice of G ready
  ones would leave a deadline that can no longer be kept: after the choice, for every d >= s, at most (d - s) G tickets
  with a deadline <= d may remain.
- **publish**: when version s + 1 is live, the trained tickets' slots are free.

Theorem: no group is ever trained at a step after its deadline, so no token is older than K versions, and nothing is
dropped. Proof: a ticket admitted at v raises the counts only for d >= v + K, where at most (K + 1) G <= (d - v + 1) G
tickets exist in all; so after every admission at most (d - s + 1) G tickets have a deadline <= d, for every d >= s.
Hence the G earliest of *all* tickets are always a legal choice, and a legal choice of ready ones exists at the latest
when those are ready. Each choice leaves at most (d - s) G = (d - (s + 1) + 1) G for the next step. With d = s: none
with deadline s remains after step s. It waits only when the bound would otherwise break: the least waiting there is.
"""

from collections.abc import Collection
from dataclasses import dataclass

from agentrl.errors import StalenessError


@dataclass(frozen=True, slots=True, order=True)
class Ticket:
    """The right of one group to exist. Ordered by deadline, then by admission."""

    deadline: int
    number: int
    admitted_version: int


class DeadlineFirst:
    """The rule above. `version` is the live policy version, which is also the number of the next step."""

    def __init__(self, *, max_staleness: int, groups_per_step: int, version: int = 0) -> None:
        if max_staleness < 0 or groups_per_step < 1:
            raise ValueError("max_staleness must be at least 0 and groups_per_step at least 1")
        self.max_staleness = max_staleness
        self.groups_per_step = groups_per_step
        self.version = version
        self._next_number = 0
        self._waiting: set[Ticket] = set()
        self._training: set[Ticket] = set()

    @property
    def capacity(self) -> int:
        """How many groups may exist at once."""
        return (self.max_staleness + 1) * self.groups_per_step

    def admit(self) -> Ticket | None:
        """A ticket for one more group, or `None` while all slots are taken."""
        if len(self._waiting) + len(self._training) >= self.capacity:
            return None
        ticket = Ticket(self.version + self.max_staleness, self._next_number, self.version)
        self._next_number += 1
        self._waiting.add(ticket)
        return ticket

    def select(self, ready: Collection[Ticket]) -> list[Ticket] | None:
        """The tickets of the next step, earliest deadline first, or `None` when more must become ready before.

        Raises:
            StalenessError: a ready ticket is past its deadline (impossible while callers keep to the rule).
        """
        if self._training:
            raise StalenessError("the batch before is still being trained on: publish its weights first")
        batch = sorted(ready)[: self.groups_per_step]
        if batch and batch[0].deadline < self.version:
            raise StalenessError(f"{batch[0]} cannot be trained at step {self.version}")
        if len(batch) < self.groups_per_step or not self._feasible(batch):
            return None
        self._waiting.difference_update(batch)
        self._training.update(batch)
        return batch

    def _feasible(self, batch: list[Ticket]) -> bool:
        left = self._waiting.difference(batch)
        return all(
            sum(ticket.deadline <= d for ticket in left) <= (d - self.version) * self.groups_per_step
            for d in range(self.version, self.version + self.max_staleness + 1)
        )

    def forfeit(self, ticket: Ticket) -> None:
        """Give back the slot of a group that failed for good."""
        self._waiting.remove(ticket)

    def publish(self, version: int) -> None:
        """`version` is live: the slots of the batch it was trained on are free."""
        if version != self.version + 1:
            raise StalenessError(f"version {version} cannot follow version {self.version}")
        self.version = version
        self._training.clear()
