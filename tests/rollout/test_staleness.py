"""The staleness rules keep what they promise on every schedule."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError, ConformanceError, StalenessError
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.rule_registry import installed_rules, load_rule
from agentrl.rollout.staleness import DeadlineFirst, Drop, Mask, Segment, StalenessRule, Ticket
from agentrl.simulate.rival_rules import Drain, Gate, Wait
from agentrl.testing import check_staleness_rule
from agentrl.testing.staleness_rules import Adversary, check_promises


def test_the_rules_of_this_project_and_of_its_rivals_are_installed():
    ours = {"deadline_first": DeadlineFirst, "mask": Mask, "segment": Segment, "drop": Drop}
    rivals = {"wait": Wait, "gate": Gate, "drain": Drain}
    for name, rule in {**ours, **rivals}.items():
        assert load_rule(name) is rule
        assert bool(rule.train_with) == (name in rivals)


@pytest.mark.parametrize("name", sorted(installed_rules()))
@given(
    max_staleness=st.integers(0, 5),
    groups=st.integers(1, 6),
    seed=st.integers(0, 10**9),
    failing=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_no_schedule_breaks_what_a_rule_says_of_itself(name, max_staleness, groups, seed, failing):
    rule = load_rule(name)(max_staleness=max_staleness, groups_per_step=groups)
    played = Adversary(rule, random.Random(seed), failing).drive(steps=25)
    check_promises(rule, played)
    assert len(played.trained) == 25 * groups


class Forgetful(DeadlineFirst):
    """Takes whatever is ready."""

    def _choose(self):
        return list(self._ready)[: self.groups_per_step]


class Greedy(StalenessRule):
    """Admits without end."""

    def _has_room(self):
        return True


class Stuck(StalenessRule):
    """Wants more than it admits."""

    def _choose(self):
        return None


class Quiet(Drop):
    drops = False


class Cutting(Segment):
    trains_on_segments = False


@pytest.mark.parametrize(
    ("rule", "finding"),
    [
        (Forgetful, "says that it is bounded, and trains on a group"),
        (Greedy, "groups exist at once"),
        (Stuck, "nothing can become ready any more"),
        (Quiet, "set `drops = True`"),
        (Cutting, "set `trains_on_segments = True`"),
    ],
)
def test_a_rule_that_breaks_its_promise_is_found(rule, finding):
    with pytest.raises(ConformanceError, match=f"{rule.__name__}, with max_staleness=.*{finding}"):
        check_staleness_rule(rule)


def test_a_rule_that_raises_is_found_with_the_schedule():
    class Raises(DeadlineFirst):
        def select(self):
            raise KeyError("lost")

    with pytest.raises(ConformanceError, match=r"Raises, with max_staleness=.*raised KeyError"):
        check_staleness_rule(Raises)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((DeadlineFirst(max_staleness=1, groups_per_step=1),), "needs a subclass of StalenessRule"),
        (("drop",), "needs a subclass of StalenessRule, got 'drop'"),
        ((DeadlineFirst, 0), "needs a schedule, got schedules=0"),
    ],
)
def test_a_check_of_no_rule_or_no_schedule_is_refused(arguments, said):
    with pytest.raises(ConformanceError, match=said):
        check_staleness_rule(*arguments)


def test_a_rule_that_keeps_its_promises_passes():
    check_staleness_rule(DeadlineFirst, schedules=20)


@pytest.mark.parametrize(
    ("name", "instead"), [("wait", "deadline_first"), ("gate", "mask"), ("drain", "deadline_first")]
)
def test_a_rivals_rule_is_refused_for_training_with_the_rule_to_take(name, instead):
    config = RolloutConfig(staleness_rule=name)  # as `agentrl simulate` reads it
    with pytest.raises(
        ConfigError,
        match=f"staleness_rule={name} .*`agentrl simulate`.* train with {instead}, which",
    ):
        config.check_rule_trains()
    RolloutConfig(staleness_rule=instead).check_rule_trains()


def test_a_rule_of_another_package_is_named_by_its_address():
    address = f"{__name__}:Forgetful"
    assert RolloutConfig(staleness_rule=address).rule is Forgetful
    with pytest.raises(
        ValueError,
        match=r"there is no staleness rule 'deadline_frist'\. Did you mean 'deadline_first'",
    ):
        RolloutConfig(staleness_rule="deadline_frist")
    with pytest.raises(ValueError, match="is no staleness rule: write a subclass"):
        RolloutConfig(staleness_rule=f"{__name__}:Adversary")


@given(groups=st.integers(2, 6), seed=st.integers(0, 10**9))
def test_the_gate_drops_nothing_and_says_that_it_is_not_bounded(groups, seed):
    rule = Gate(max_staleness=1, groups_per_step=groups)
    played = Adversary(rule, random.Random(seed)).drive(steps=25)
    assert len(played.trained) == 25 * groups
    assert not played.dropped
    assert not rule.bounded


def test_the_gate_lets_a_straggler_grow_older_than_the_bound():
    rule = Gate(max_staleness=1, groups_per_step=1)
    straggler = rule.admit()
    for version in range(4):
        other = rule.admit()
        rule.finish(other)
        assert rule.select() == [other]
        rule.publish(version + 1)
    rule.finish(straggler)
    assert rule.select() == [straggler]
    assert rule.version - straggler.admitted_version == 4


@given(max_staleness=st.integers(0, 4), groups=st.integers(1, 4), seed=st.integers(0, 10**9))
def test_deadline_first_waits_only_when_every_choice_would_break_a_deadline(
    max_staleness, groups, seed
):
    rng = random.Random(seed)
    rule = DeadlineFirst(max_staleness=max_staleness, groups_per_step=groups)
    existing: list[Ticket] = []
    ready: list[Ticket] = []
    for step in range(8):
        while ticket := rule.admit():
            existing.append(ticket)
        playing = [ticket for ticket in existing if ticket not in ready]
        rng.shuffle(playing)
        while (batch := rule.select()) is None:
            if len(ready) >= groups:
                # An earliest-deadline choice is the best one for every deadline, so if it leaves
                # more than can be trained in time, all choices do.
                left = [t for t in existing if t not in sorted(ready)[:groups]]
                assert any(
                    sum(t.deadline <= d for t in left) > (d - step) * groups
                    for d in range(step, step + max_staleness + 1)
                )
            ready.append(playing.pop())
            rule.finish(ready[-1])
        existing = [t for t in existing if t not in batch]
        ready = [t for t in ready if t not in batch]
        rule.publish(step + 1)


@given(
    max_staleness=st.integers(0, 5),
    groups=st.integers(1, 6),
    seed=st.integers(0, 10**9),
    failing=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_segments_wait_for_no_straggler_and_take_every_part_in_time(
    max_staleness, groups, seed, failing
):
    class Checked(Segment):
        def select(self):
            ready = len(self._ready)
            batch = super().select()
            assert (batch is None) == (ready < groups)
            return batch

    rule = Checked(max_staleness=max_staleness, groups_per_step=groups)
    played = Adversary(rule, random.Random(seed), failing).drive(steps=25)
    numbers = [ticket.number for _, ticket in played.trained]
    assert len(numbers) == len(set(numbers)) == 25 * groups
    assert all(
        step <= ticket.deadline <= step + max_staleness
        for step, ticket in [*played.trained, *played.cut]
    )
    assert not played.dropped
    assert max_staleness or not played.cut


def test_a_straggler_is_cut_when_its_deadline_has_come_and_plays_on():
    rule = Segment(max_staleness=2, groups_per_step=1)
    straggler = rule.admit()
    for step in range(5):
        other = rule.admit()
        rule.finish(other)
        assert rule.select() == [other]
        assert [ticket.number for ticket in rule.renewed] == (
            [straggler.number] if step in (2, 4) else []
        )
        rule.publish(step + 1)
    (last,) = rule._playing
    assert last == straggler._replace(deadline=6)
    rule.finish(last)
    assert rule.select() == [last]


def test_a_straggler_holds_the_trainer_only_when_its_deadline_has_come():
    rule = DeadlineFirst(max_staleness=2, groups_per_step=1)
    straggler, second, third = (rule.admit() for _ in range(3))
    assert rule.admit() is None
    rule.finish(second)
    assert rule.select() == [second]
    rule.publish(1)
    fourth = rule.admit()
    rule.finish(third)
    rule.finish(fourth)
    assert rule.select() == [third]
    rule.publish(2)
    assert rule.select() is None
    rule.finish(straggler)
    assert rule.select() == [straggler]


def test_a_failed_straggler_holds_nobody():
    rule = DeadlineFirst(max_staleness=0, groups_per_step=1)
    straggler = rule.admit()
    assert rule.select() is None
    rule.forfeit(straggler)
    rule.finish(rule.admit())
    assert rule.select()


def test_wait_trains_in_order_of_admission():
    rule = Wait(max_staleness=1, groups_per_step=1)
    first, second = rule.admit(), rule.admit()
    rule.finish(second)
    assert rule.select() is None
    rule.finish(first)
    assert rule.select() == [first]


def test_drop_gives_up_what_missed_its_deadline_playing_or_finished():
    rule = Drop(max_staleness=1, groups_per_step=1)
    slow, quick = rule.admit(), rule.admit()
    rule.finish(quick)
    assert rule.select() == [quick]
    assert rule.give_up() == rule.publish(1) == []
    fresh = rule.admit()
    rule.finish(fresh)
    assert rule.give_up() == []  # it may still be chosen
    assert rule.select() == [fresh]
    assert rule.admit() is None
    assert rule.give_up() == [slow]
    assert rule.admit().deadline == 2  # its place is free at once
    assert rule.publish(2) == []


def test_drain_admits_nothing_while_weights_wait():
    rule = Drain(max_staleness=1, groups_per_step=1)
    first, second = rule.admit(), rule.admit()
    rule.finish(first)
    assert rule.select() == [first]
    assert not rule.may_publish()
    rule.forfeit(second)
    assert rule.admit() is None
    assert rule.may_publish()
    rule.publish(1)
    assert rule.admit()


def test_versions_follow_one_another():
    rule = DeadlineFirst(max_staleness=0, groups_per_step=1)
    with pytest.raises(StalenessError, match="cannot follow"):
        rule.publish(2)
