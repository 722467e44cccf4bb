"""Conformance checks of staleness rules: an adversary ends the groups in the order that is worst
for a bound, and the rule must keep what it says of itself.
"""

from dataclasses import dataclass, field
from random import Random

from agentrl.errors import RAISED_BY_CODE, ConformanceError, describe
from agentrl.rollout.staleness import StalenessRule, Ticket

_SCHEDULE_STEPS = 25
"""Steps of a schedule: enough for stragglers to grow older than every bound that is tried."""


@dataclass(eq=False, slots=True)
class Adversary:
    """Drives a rule: mostly ends the youngest group first, fails some groups, and asks for a batch
    after each.
    """

    rule: StalenessRule
    rng: Random
    failing: float = 0.0
    """The share of groups that fail."""
    playing: list[Ticket] = field(default_factory=list)
    ready: list[Ticket] = field(default_factory=list)
    trained: list[tuple[int, Ticket]] = field(default_factory=list)
    """Each ticket that was trained on, with the step."""
    cut: list[tuple[int, Ticket]] = field(default_factory=list)
    """Each ticket of which a part was trained on, with the step."""
    dropped: list[Ticket] = field(default_factory=list)

    def drive(self, steps: int) -> "Adversary":
        """Play, train and publish for so many steps.

        Raises:
            ConformanceError: the rule stands still, or breaks the order of its calls.
        """
        for step in range(steps):
            self._train(step)
            # While the trainer works, some groups begin and end.
            for _ in range(self.rng.randrange(4)):
                self._admit()
                if self.playing:
                    self._end_one()
            while not self.rule.may_publish():
                if not self.playing:
                    raise ConformanceError("may_publish() refuses although no group is playing")
                self._end_one()
            if self.rule.publish(step + 1):
                raise ConformanceError(
                    "publish() gives up groups that give_up() had not: it was certain before, and"
                    " more was sampled for them meanwhile"
                )
        return self

    def _train(self, step: int) -> None:
        """Play until there is a batch, and take it."""
        while (batch := self.rule.select()) is None:
            self._admit()
            if not self.playing:
                raise ConformanceError(
                    "select() waits although nothing can become ready any more, and admit() gives"
                    " no ticket"
                )
            self._end_one()
        if len(batch) != self.rule.groups_per_step or not set(batch) <= set(self.ready):
            raise ConformanceError(
                f"select() returned {batch}: it must return groups_per_step tickets that are ready"
            )
        self.ready = [ticket for ticket in self.ready if ticket not in batch]
        self.trained += [(step, ticket) for ticket in batch]
        self.cut += [(step, ticket) for ticket in self.rule.renewed]
        self.playing = [self.rule.renewed.get(ticket, ticket) for ticket in self.playing]
        dropped = self.rule.give_up()
        self.dropped += dropped
        self.playing = [ticket for ticket in self.playing if ticket not in dropped]
        self.ready = [ticket for ticket in self.ready if ticket not in dropped]

    def _admit(self) -> None:
        """Begin as many groups as the rule lets."""
        while ticket := self.rule.admit():
            self.playing.append(ticket)
            if len(self.playing) + len(self.ready) > self.rule.capacity:
                raise ConformanceError(
                    f"admit() lets more than {self.rule.capacity} groups exist at once: (K + 1) G"
                )

    def _end_one(self) -> None:
        """End a group, as a rule the youngest, so that the oldest grow older still."""
        youngest = self.rng.random() < 0.7
        ticket = self.playing.pop(-1 if youngest else self.rng.randrange(len(self.playing)))
        if self.rng.random() < self.failing:
            self.rule.forfeit(ticket)
        else:
            self.rule.finish(ticket)
            self.ready.append(ticket)


def check_staleness_rule(rule: type[StalenessRule], schedules: int = 200, seed: int = 0) -> None:
    """Check that a rule keeps what its properties say, on random schedules with bounds of 0 to 5.

    Raises:
        ConformanceError: names what it breaks, and the schedule.
    """
    if not (isinstance(rule, type) and issubclass(rule, StalenessRule)):
        raise ConformanceError(
            f"check_staleness_rule needs a subclass of StalenessRule, got {rule!r:.100}: it makes"
            " one for each schedule"
        )
    if schedules < 1:
        raise ConformanceError(f"check_staleness_rule needs a schedule, got schedules={schedules}")
    for number in range(schedules):
        rng = Random(f"{seed}/{number}")
        max_staleness, groups = rng.randint(0, 5), rng.randint(1, 6)
        failing = rng.choice((0.0, 0.1, 0.5))
        try:
            made = rule(max_staleness=max_staleness, groups_per_step=groups)
            played = Adversary(made, rng, failing).drive(_SCHEDULE_STEPS)
            check_promises(made, played)
        except RAISED_BY_CODE as error:
            found = error if isinstance(error, ConformanceError) else f"raised {describe(error)}"
            raise ConformanceError(
                f"{rule.__name__}, with max_staleness={max_staleness}, groups_per_step={groups} and"
                f" {failing:.0%} of groups failing: {found}"
            ) from error


def check_promises(rule: StalenessRule, played: Adversary) -> None:
    """Check what was trained on in a schedule against the properties of the rule.

    Raises:
        ConformanceError: it breaks one.
    """
    numbers = [ticket.number for _, ticket in played.trained]
    if len(numbers) != len(set(numbers)):
        raise ConformanceError("it trains on a group twice")
    ages = [step - ticket.admitted_version for step, ticket in played.trained]
    if rule.bounded and max(ages) > rule.max_staleness:
        raise ConformanceError(
            f"it says that it is bounded, and trains on a group {max(ages)} versions old"
        )
    if played.dropped and not rule.drops:
        raise ConformanceError("it gives up groups: set `drops = True`")
    if played.cut and not rule.trains_on_segments:
        raise ConformanceError("it renews tickets: set `trains_on_segments = True`")
    if rule.trains_on_segments:
        late = [ticket for step, ticket in [*played.trained, *played.cut] if step > ticket.deadline]
        if late:
            raise ConformanceError(f"it takes the part of {late[0]} after its deadline")
