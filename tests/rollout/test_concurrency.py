"""The controller of live episodes: gentle up, at once down, and calm. EpisodeSlots: bounded, in
order, none lost.
"""

import asyncio
import itertools
import math
import random

from hypothesis import given
from hypothesis import strategies as st

from agentrl.flow import Flow, run_virtual
from agentrl.rollout.concurrency import ConcurrencyController, EngineLoad, EpisodeSlots
from agentrl.rollout.staleness import Ticket
from tests.properties import examples

IDLE = EngineLoad(running=64, waiting=0)


def engine_with_room_for(room: int):
    """A stationary engine: preempts above `room` live episodes, roomy below nine tenths of it."""

    def load(live: int) -> EngineLoad:
        return EngineLoad(
            running=live,
            waiting=0,
            kv_use=min(1.0, 0.85 * live / room),
            preemptions=int(live > room),
        )

    return load


def test_it_grows_gently_while_the_engine_has_room_and_never_past_its_limits():
    limit = ConcurrencyController.between(16, 1000)
    steps = [limit.limit]
    for _ in range(100):
        limit = limit.observe(IDLE, live=limit.limit)
        steps.append(limit.limit)
    assert steps[-1] == 1000
    assert all(
        0 <= after - before <= max(1, before // 8) for before, after in itertools.pairwise(steps)
    )


def test_it_does_not_grow_while_the_limit_is_not_what_binds():
    limit = ConcurrencyController.between(16, 1000)
    assert limit.observe(IDLE, live=15) == limit


def test_it_shrinks_at_once_below_where_pressure_was_met():
    limit = ConcurrencyController(limit=100, low=16, high=1000, met=1001)
    for pressed in (
        EngineLoad(80, 0, preemptions=1),
        EngineLoad(80, 0, kv_use=0.97),
        EngineLoad(20, 60),
    ):
        assert limit.observe(pressed, live=100).limit == 75
        assert limit.observe(pressed, live=60).limit == 45


def test_a_batch_that_is_full_with_a_short_queue_is_left_alone():
    limit = ConcurrencyController(limit=100, low=16, high=1000, met=1001)
    assert limit.observe(EngineLoad(64, 30, kv_use=0.9), live=100) == limit


@given(room=st.integers(20, 3000), low=st.integers(1, 64), observations=st.integers(50, 2000))
@examples(60)
def test_a_stationary_engine_is_pressed_ever_more_seldom_and_kept_busy(room, low, observations):
    load_of, limit, shrinks, pressed_in_a_row = (
        engine_with_room_for(room),
        ConcurrencyController.between(low, 4096),
        0,
        0,
    )
    for _ in range(observations):
        after = limit.observe(load_of(limit.limit), live=limit.limit)
        shrinks += after.limit < limit.limit
        pressed_in_a_row = pressed_in_a_row + 1 if limit.limit > room > low else 0
        assert pressed_in_a_row <= 1, "one observation of pressure is enough to get below it"
        limit = after
    # Each retreat doubles the patience before the next attempt, so attempts are logarithmic in
    # time.
    assert shrinks <= 2 + math.log2(1 + observations / 8)
    if observations > 500:
        assert limit.limit >= min(room, 4096) * 9 // 16 or limit.limit == low


@given(
    loads=st.lists(
        st.tuples(st.integers(0, 500), st.integers(0, 500), st.floats(0, 1), st.integers(0, 3)),
        max_size=80,
    )
)
def test_it_stays_between_its_limits_whatever_it_sees(loads):
    limit = ConcurrencyController.between(8, 300)
    for running, waiting, kv_use, preemptions in loads:
        limit = limit.observe(
            EngineLoad(running, waiting, kv_use, preemptions), live=running + waiting
        )
        assert 8 <= limit.limit <= 300


@given(seed=st.integers(0, 10**6))
@examples(30)
def test_slots_are_bounded_and_none_is_lost_when_waiters_are_cancelled(seed):
    async def main() -> None:
        rng, slots, most = random.Random(seed), EpisodeSlots(5), 0

        async def visit(number: int) -> None:
            nonlocal most
            await slots.acquire(Ticket(number % 3, number, 0))
            try:
                most = max(most, slots.taken)
                await asyncio.sleep(rng.random())
            finally:
                slots.release()

        async with Flow("visits") as flow:
            tasks = [flow.start(visit(number), name=str(number)) for number in range(60)]
            for task in rng.sample(tasks, 20):
                await asyncio.sleep(rng.random() / 5)
                task.cancel()
        assert most == 5
        assert slots.taken == 0
        assert slots.free

    run_virtual(main)


def test_the_earlier_ticket_gets_the_slot():
    async def main() -> None:
        slots, order = EpisodeSlots(1), []
        assert slots.reserve(3) == 1

        async def visit(ticket: Ticket) -> None:
            await slots.acquire(ticket)
            order.append(ticket.number)
            slots.release()

        async with Flow("visits") as flow:
            for number in (3, 1, 2):
                flow.start(visit(Ticket(0, number, 0)), name=str(number))
            await asyncio.sleep(0)
            assert slots.reserve(1) == 0
            slots.release()
        assert order == [1, 2, 3]

    run_virtual(main)


def test_the_limit_follows_the_number_of_engines_and_forgets_where_the_others_were_overloaded():
    two = ConcurrencyController.between(256, 2048).observe(EngineLoad(256, 0), live=256)
    assert two.limit == 288
    three = two.between_others(384, 3072)
    assert (three.limit, three.low, three.high) == (432, 384, 3072)
    assert three.between_others(384, 3072) is three
    pressed = three.observe(EngineLoad(300, 400), live=432)
    assert pressed.limit == 384  # never below what the engines serve at once
    assert pressed.met == 432
    one = pressed.between_others(128, 1024)
    assert (one.limit, one.met) == (128, 1025)
    # It grows again from there, although it was overloaded with other engines.
    assert one.observe(EngineLoad(128, 0), live=128).limit == 144
    # Bounds of the settings do not depend on the engines.
    bounded = ConcurrencyController.between(10, 20)
    assert bounded.between_others(10, 20) is bounded


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 9)), min_size=1), st.integers(0, 99))
def test_the_limit_stays_between_whatever_bounds_it_gets(bounds, running):
    controller = ConcurrencyController.between(16, 128)
    for low, factor in bounds:
        controller = controller.between_others(low, low * factor)
        assert low <= controller.limit <= low * factor
        controller = controller.observe(EngineLoad(running, 0), live=controller.limit)
        assert low <= controller.limit <= low * factor


def test_it_grows_by_what_is_missing_in_the_batches_and_at_most_twofold():
    limit = ConcurrencyController.between(100, 10_000)
    assert limit.observe(EngineLoad(80, 0, places=100), live=100).limit == 125
    assert limit.observe(EngineLoad(10, 0, places=100), live=100).limit == 200
    assert limit.observe(EngineLoad(99, 0, places=100), live=100).limit == 112
    assert limit.observe(EngineLoad(0, 0, places=100), live=100).limit == 200
    assert limit.observe(EngineLoad(10, 0, places=100), live=99) == limit
