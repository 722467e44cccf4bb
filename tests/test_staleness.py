"""The staleness rule keeps its theorem on every schedule."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import StalenessError
from agentrl.flow import DeadlineFirst, Ticket


def drive(rule: DeadlineFirst, rng: random.Random, steps: int, failing: float) -> list[tuple[int, Ticket]]:
    """An adversary that makes groups ready in any order, and fails some; asks for a batch after each."""
    playing: list[Ticket] = []
    ready: list[Ticket] = []
    trained: list[tuple[int, Ticket]] = []
    for step in range(steps):
        while (batch := rule.select(ready)) is None:
            while ticket := rule.admit():
                playing.append(ticket)
            assert playing, "the rule waits although nothing can become ready any more"
            # Mostly the youngest first: the worst case for a bound.
            ticket = playing.pop(-1 if rng.random() < 0.7 else rng.randrange(len(playing)))
            if rng.random() < failing:
                rule.forfeit(ticket)
            else:
                ready.append(ticket)
        ready = [ticket for ticket in ready if ticket not in batch]
        trained += [(step, ticket) for ticket in batch]
        assert len(playing) + len(ready) + len(batch) <= rule.capacity
        rule.publish(step + 1)
    return trained


@given(
    max_staleness=st.integers(0, 5),
    groups=st.integers(1, 6),
    seed=st.integers(0, 10**9),
    failing=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_no_schedule_breaks_the_bound_or_loses_a_group(max_staleness, groups, seed, failing):
    rule = DeadlineFirst(max_staleness=max_staleness, groups_per_step=groups)
    trained = drive(rule, random.Random(seed), steps=25, failing=failing)
    assert len(trained) == len({ticket for _, ticket in trained}) == 25 * groups
    assert all(0 <= step - ticket.admitted_version <= max_staleness for step, ticket in trained)


@given(max_staleness=st.integers(0, 4), groups=st.integers(1, 4), seed=st.integers(0, 10**9))
def test_it_waits_only_when_every_choice_would_break_a_deadline(max_staleness, groups, seed):
    rng = random.Random(seed)
    rule = DeadlineFirst(max_staleness=max_staleness, groups_per_step=groups)
    tickets: list[Ticket] = []
    for step in range(8):
        while ticket := rule.admit():
            tickets.append(ticket)
        rng.shuffle(tickets)
        ready: list[Ticket] = []
        for ticket in list(tickets):
            ready.append(ticket)
            batch = rule.select(ready)
            if batch is not None:
                break
            if len(ready) >= groups:
                # An earliest-deadline choice is the best one for every deadline, so if it leaves more than can be
                # trained in time, all choices do.
                left = [t for t in tickets if t not in sorted(ready)[:groups]]
                assert any(
                    sum(t.deadline <= d for t in left) > (d - step) * groups
                    for d in range(step, step + max_staleness + 1)
                )
        tickets = [t for t in tickets if t not in batch]
        rule.publish(step + 1)


def test_a_straggler_holds_the_trainer_only_when_its_deadline_has_come():
    rule = DeadlineFirst(max_staleness=2, groups_per_step=1)
    straggler, second, third = (rule.admit() for _ in range(3))
    assert rule.admit() is None
    assert rule.select([second]) == [second]
    rule.publish(1)
    fourth = rule.admit()
    assert rule.select([third, fourth]) == [third]
    rule.publish(2)
    assert rule.select([fourth]) is None
    assert rule.select([fourth, straggler]) == [straggler]


def test_versions_follow_one_another():
    rule = DeadlineFirst(max_staleness=0, groups_per_step=1)
    with pytest.raises(StalenessError, match="cannot follow"):
        rule.publish(2)
