"""The staleness rules: which group may start, and which groups are trained on next.

The rules are pure objects that handle only tickets, not tasks, clocks or tokens. All have the same
interface. A ticket is *playing* from `admit`, *ready* from `finish`, *training* from `select`, and
gone at the next `publish`, or at once by `forfeit`. With K = `max_staleness`, a ticket admitted
while version v is live has the deadline step v + K. G is `groups_per_step`.

`DeadlineFirst`, the default, keeps the bound, drops nothing, and waits least:

- **admit**: at most (K + 1) G tickets exist at once.
- **select**: step s takes G ready tickets, earliest deadline first. It waits exactly while every
  choice of G ready tickets would leave a deadline that can no longer be met: after the choice, for
  every d >= s, at most (d - s) G tickets with a deadline <= d may remain.
- **publish**: when version s + 1 is live, the trained tickets' slots are free.

Theorem: no group is ever trained at a step after its deadline, so no token is older than K
versions, and nothing is dropped. Proof: a ticket admitted at v raises the counts only for d >= v +
K, where at most (K + 1) G <= (d - v + 1) G tickets exist in all; so after every admission at most
(d - s + 1) G tickets have a deadline <= d, for every d >= s. Hence the G earliest of *all* tickets
are always a legal choice, and a legal choice of ready ones exists at the latest when those are
ready. Each choice leaves at most (d - s) G = (d - (s + 1) + 1) G for the next step. With d = s:
none with deadline s remains after step s. The rule waits only when the bound would otherwise break:
no rule can wait less.

The other rules make another choice where `DeadlineFirst` waits for a straggler:

- `Segment` (ours): as `DeadlineFirst`, but instead of waiting for a straggler it trains on what the
  straggler has played so far, beside the G ready groups, and a critic stands for the rest. The
  straggler plays on with a deadline as if it were admitted now, so the proof above holds. Needs an
  algorithm with a critic. A single turn that outlasts K versions cannot be cut: its old tokens
  carry no loss.
- `Mask` (ours): at most (s + K + 1) G groups are admitted in total by step s; it takes the ready
  tickets with the earliest deadlines, and never waits; tokens older than the bound carry no loss.
  Every group is trained on, and no gradient comes from a token older than K versions; the price is
  that the first tokens of some stragglers are not trained on.
- `Drop` (verl, prime-rl): first come, first served; groups too old for the next step are given up
  and replaced, as soon as the batch before is chosen without them: nothing more is sampled for them
  while it is trained on. Bounded, but biased towards short episodes.

A rule is a plug-in (entry-point group `agentrl.staleness_rules`): a subclass of `StalenessRule`
whose properties say what it promises, and `agentrl.testing.check_staleness_rule` holds it to them.
`agentrl/rollout/rule_registry.py` knows all rules by name. Those of other systems, which only
simulations use, are in `agentrl/simulate/rival_rules.py`.
"""

from collections import Counter
from collections.abc import Mapping
from heapq import nsmallest
from itertools import islice
from typing import ClassVar, NamedTuple

from agentrl.errors import StalenessError


class Ticket(NamedTuple):
    """Permission for one group to run. Ordered by deadline, then by admission."""

    deadline: int
    """The last step at which no token of the group is older than the bound."""
    number: int
    """Tickets of the rule before it."""
    admitted_version: int
    """The policy version that was live when it was given out."""


class StalenessRule:
    """Base class of all rules: keeps track of the tickets. A subclass overrides `_has_room`,
    `_choose` or `give_up`.

    Example, with K = 1 and G = 1, so that two groups may exist at once:
        >>> rule = DeadlineFirst(max_staleness=1, groups_per_step=1)
        >>> slow, quick = rule.admit(), rule.admit()
        >>> rule.finish(quick)
        >>> rule.select() == [quick]  # nothing forces step 0 to wait for the slow one
        True
        >>> rule.publish(1)  # version 1 is live, and a slot is free
        []
        >>> next_one = rule.admit()
        >>> rule.finish(next_one)
        >>> rule.select() is None  # at step 1 the slow one is due: its deadline is 0 + K
        True
        >>> rule.finish(slow)
        >>> rule.select() == [slow]
        True
    """

    bounded: ClassVar[bool] = True
    """No group is ever trained on after its deadline. The scheduler ends a run that breaks this."""
    masks: ClassVar[bool] = False
    """Tokens older than the bound carry no loss."""
    drops: ClassVar[bool] = False
    """It may give up groups, which are then replaced."""
    trains_on_segments: ClassVar[bool] = False
    """It takes parts of groups that are still being played (`renewed`). What follows a part is
    worth what a critic says, so the algorithm must have one."""
    train_with: ClassVar[str] = ""
    """Of a rule for simulations alone: the rule to train with instead, and why that is as good."""
    renewed: Mapping[Ticket, Ticket] = {}
    """The tickets of the groups of which a part belongs to the last batch, each with the one that
    replaces it."""

    def __init__(self, *, max_staleness: int, groups_per_step: int, version: int = 0) -> None:
        if max_staleness < 0 or groups_per_step < 1:
            raise ValueError("max_staleness must be at least 0 and groups_per_step at least 1")
        self.max_staleness = max_staleness
        """K, in versions."""
        self.groups_per_step = groups_per_step
        """G."""
        self.version = version
        """The live policy version, which is also the number of the next step."""
        self._next_number = 0
        self._playing: dict[Ticket, None] = {}  # in order of admission
        self._ready: dict[Ticket, None] = {}  # in order of finishing
        self._training: list[Ticket] = []
        self._playing_until: Counter[int] = Counter()  # number of tickets by deadline
        self._ready_until: Counter[int] = Counter()

    @property
    def capacity(self) -> int:
        """Groups that may exist at once."""
        return (self.max_staleness + 1) * self.groups_per_step

    @property
    def next_step(self) -> int:
        """The step at which the next batch will be trained on."""
        return self.version + bool(self._training)

    def admit(self) -> Ticket | None:
        """A ticket for one more group, or `None` if there is no room."""
        if not self._has_room():
            return None
        ticket = Ticket(self.version + self.max_staleness, self._next_number, self.version)
        self._next_number += 1
        self._playing[ticket] = None
        self._playing_until[ticket.deadline] += 1
        return ticket

    def finish(self, ticket: Ticket) -> None:
        """Record that the ticket's group has been played."""
        self._leave_play(ticket)
        self._ready[ticket] = None
        self._ready_until[ticket.deadline] += 1

    def forfeit(self, ticket: Ticket) -> None:
        """Free the slot of a playing group that will not be trained on."""
        self._leave_play(ticket)

    def select(self) -> list[Ticket] | None:
        """The tickets of the next step, or `None` if more must become ready first.

        Raises:
            StalenessError: the previous batch is still being trained on.
        """
        if self._training:
            raise StalenessError(
                "the previous batch is still being trained on: publish its weights first"
            )
        batch = self._choose() if len(self._ready) >= self.groups_per_step else None
        if batch is None:
            return None
        for ticket in batch:
            del self._ready[ticket]
            self._ready_until[ticket.deadline] -= 1
        self._training = batch
        return batch

    def may_publish(self) -> bool:
        """True if new weights may go live now. A rule that waits for groups here needs engines with
        devices of their own: where they take turns with the trainer, they sleep meanwhile.
        """
        return True

    def publish(self, version: int) -> list[Ticket]:
        """Record that `version` is live; free the slots of its training batch. Returns tickets
        given up as stale.

        Raises:
            StalenessError: `version` does not directly follow the live version.
        """
        if version != self.version + 1:
            raise StalenessError(f"version {version} cannot follow version {self.version}")
        self.version = version
        self._training = []
        # No group has this deadline any more.
        del self._playing_until[version - 1], self._ready_until[version - 1]
        return self.give_up()

    def give_up(self) -> list[Ticket]:
        """The tickets of groups that can no longer be trained on in time, and are therefore no
        more; usually none.
        """
        return []

    def _leave_play(self, ticket: Ticket) -> None:
        del self._playing[ticket]
        self._playing_until[ticket.deadline] -= 1

    def _has_room(self) -> bool:
        return len(self._playing) + len(self._ready) + len(self._training) < self.capacity

    def _choose(self) -> list[Ticket] | None:
        """The next batch out of at least `groups_per_step` ready tickets: by default, first come,
        first served.
        """
        return list(islice(self._ready, self.groups_per_step))


class DeadlineFirst(StalenessRule):
    """Earliest deadline first; waits only if a group could not be trained in time otherwise."""

    def _choose(self) -> list[Ticket] | None:
        if self._first_missed_deadline() is not None:
            return None
        return nsmallest(self.groups_per_step, self._ready)

    def _first_missed_deadline(self) -> int | None:
        """The first deadline that could not be met any more if the earliest G ready tickets were
        taken now.
        """
        remaining = 0  # tickets with a deadline of at most d that are left after this batch
        places = self.groups_per_step  # of the batch, that tickets with later deadlines may take
        for d in range(self.version, self.version + self.max_staleness + 1):
            taken = min(places, self._ready_until[d])
            places -= taken
            remaining += self._playing_until[d] + self._ready_until[d] - taken
            # The steps after this one, up to d, have (d - s) G places.
            if remaining > (d - self.version) * self.groups_per_step:
                return d
        return None


class Segment(DeadlineFirst):
    """As `DeadlineFirst`, but takes parts of the stragglers that it would wait for."""

    bounded = False
    masks = True
    trains_on_segments = True

    def _choose(self) -> list[Ticket] | None:
        self.renewed = {}
        # All ready tickets up to a missed deadline are taken, so those that remain until then are
        # playing.
        while self._first_missed_deadline() is not None:
            old = min(self._playing)
            new = old._replace(deadline=self.version + self.max_staleness)
            self._leave_play(old)
            self._playing[new] = None
            self._playing_until[new.deadline] += 1
            self.renewed[old] = new
        return nsmallest(self.groups_per_step, self._ready)


class Mask(StalenessRule):
    """Limits the number of admissions; takes the earliest deadlines among the ready tickets; late
    tokens carry no loss.
    """

    bounded = False
    masks = True

    def __init__(self, *, max_staleness: int, groups_per_step: int, version: int = 0) -> None:
        super().__init__(
            max_staleness=max_staleness, groups_per_step=groups_per_step, version=version
        )
        self._first_version = version
        self._forfeited = 0

    def forfeit(self, ticket: Ticket) -> None:
        """As for every rule; the ticket's admission no longer counts."""
        super().forfeit(ticket)
        self._forfeited += 1

    def _has_room(self) -> bool:
        steps = self.version - self._first_version + self.max_staleness + 1
        return self._next_number - self._forfeited < steps * self.groups_per_step

    def _choose(self) -> list[Ticket] | None:
        return nsmallest(self.groups_per_step, self._ready)


class Drop(StalenessRule):
    """First come, first served; gives up groups that will be too old for the next step, as soon as
    that is certain.
    """

    drops = True

    def give_up(self) -> list[Ticket]:
        """The tickets whose deadline is before the next step, playing or ready."""
        existing = [*self._playing, *self._ready]
        late = [ticket for ticket in existing if ticket.deadline < self.next_step]
        for ticket in late:
            self._playing.pop(ticket, None)
            self._ready.pop(ticket, None)
        return late
