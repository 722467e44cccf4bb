"""The substrate: clock, flow, channel, deadlines."""

import asyncio
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError, DeadlineError, FilterBudgetError, RetriesExhaustedError
from agentrl.flow import (
    Channel,
    ChannelClosedError,
    EventLog,
    Flow,
    Turnstile,
    VirtualDeadlockError,
    deadline,
    now,
    pause_deadlines,
    run_virtual,
)
from tests.tiers import only


def heavy_tailed_run(seed: int, episodes: int) -> tuple[str, float]:
    async def episode(number: int, log: EventLog, done: Channel[int]) -> None:
        rng = random.Random(f"{seed}/{number}")
        for _ in range(5):
            await asyncio.sleep(rng.lognormvariate(0.0, 1.4))
        log.record("done", str(number))
        await done.put(number)

    async def main() -> tuple[str, float]:
        log = EventLog()
        async with Flow("episodes") as flow:
            done = flow.channel("done", capacity=16)
            for number in range(episodes):
                flow.start(episode(number, log, done), name=f"episode-{number}")
            seen = [await done.get() for _ in range(episodes)]
        assert sorted(seen) == list(range(episodes))
        return log.digest(), now()

    return run_virtual(main)


@pytest.mark.parametrize("episodes", only([1_000, 10_000], 1_000))
def test_thousands_of_heavy_tailed_episodes_run_in_virtual_time_in_seconds_with_one_hash(episodes):
    started = time.perf_counter()
    first, virtual = heavy_tailed_run(7, episodes)
    assert (first, virtual) == heavy_tailed_run(7, episodes)
    assert first != heavy_tailed_run(8, episodes)[0]
    assert virtual > 60
    assert time.perf_counter() - started < 60


def test_virtual_time_starts_at_zero_and_moves_only_by_timers(virtual):
    async def main() -> list[float]:
        times = [now()]
        for _ in range(1000):
            await asyncio.sleep(0)
        times.append(now())
        await asyncio.sleep(86400 * 30)
        return [*times, now()]

    assert virtual(main) == pytest.approx([0, 0, 86400 * 30])


def test_a_virtual_program_that_can_never_go_on_says_who_waits(virtual):
    async def main() -> None:
        async with Flow("stuck") as flow:
            flow.start(asyncio.Event().wait(), name="waiter")

    with pytest.raises(VirtualDeadlockError, match="stuck/waiter"):
        virtual(main)


def test_the_first_failure_surfaces_itself_and_cancels_its_siblings(virtual):
    ended: list[str] = []

    async def sibling() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append("sibling")

    async def users_own_code() -> None:
        await asyncio.sleep(1)
        raise KeyError("mine")

    async def main() -> None:
        async with Flow("f") as flow:
            flow.start(sibling(), name="sibling")
            flow.start(users_own_code(), name="bad")

    with pytest.raises(KeyError, match="mine") as caught:
        virtual(main)
    assert "users_own_code" in [frame.name for frame in caught.traceback]
    assert ended == ["sibling"]


@pytest.mark.parametrize("waits_inside", [True, False])
def test_who_catches_the_failure_of_a_flow_is_not_cancelled_by_it(virtual, waits_inside):
    async def fail() -> None:
        await asyncio.sleep(1)
        raise KeyError("x")

    async def flow_that_fails() -> None:
        async with Flow("flow") as flow:
            flow.start(fail(), name="fail")
            if waits_inside:
                await asyncio.sleep(10)

    async def main() -> None:
        owner = asyncio.current_task()
        assert owner is not None
        with pytest.raises(KeyError):
            await flow_that_fails()
        assert owner.cancelling() == 0
        # Which tells its own cancellation from others by that number.
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await asyncio.sleep(10)

    virtual(main)


def test_cancelling_a_flow_ends_every_task(virtual):
    async def main() -> int:
        async with Flow("f") as flow:
            for number in range(5):
                flow.start(asyncio.sleep(10**6), name=str(number))
            await asyncio.sleep(1)
            flow.cancel()
        assert now() == pytest.approx(1)
        return len(flow)

    assert virtual(main) == 0


def test_a_deadline_names_what_was_late_and_leaves_other_timeouts_alone(virtual):
    async def late() -> None:
        with deadline("environment", "step", 2.0):
            await asyncio.sleep(5)

    async def own_timeout() -> None:
        with deadline("environment", "step", 2.0):
            raise TimeoutError("the environment's own")

    with pytest.raises(DeadlineError, match=r"step did not answer within its deadline of 2 s"):
        virtual(late)
    with pytest.raises(TimeoutError, match="own"):
        virtual(own_timeout)


def test_a_full_channel_holds_the_producer_back_and_measures_it(virtual):
    async def main() -> None:
        channel: Channel[int] = Channel("c", 2)

        async with Flow("f") as flow:

            async def produce() -> None:
                for i in range(4):
                    await channel.put(i)
                channel.close()

            flow.start(produce(), name="producer")
            await asyncio.sleep(3)
            assert len(channel) == 2
            assert [item async for item in channel] == [0, 1, 2, 3]
        stats = channel.snapshot()
        assert (stats.puts, stats.gets, stats.depth) == (4, 4, 0)
        assert stats.put_wait == pytest.approx(3)
        with pytest.raises(ChannelClosedError):
            await channel.put(9)
        with pytest.raises(ChannelClosedError):
            await channel.get()

    virtual(main)


@given(
    capacity=st.integers(1, 4),
    producers=st.integers(1, 4),
    items=st.integers(0, 12),
    cancel=st.lists(st.integers(0, 20), max_size=6),
)
def test_a_channel_loses_and_repeats_nothing_when_waiters_are_cancelled(
    capacity, producers, items, cancel
):
    async def main() -> None:
        channel: Channel[tuple[int, int]] = Channel("c", capacity)
        got: list[tuple[int, int]] = []
        put: list[tuple[int, int]] = []

        async def produce(who: int) -> None:
            for i in range(items):
                await asyncio.sleep((who * 7 + i * 3) % 5)
                await channel.put((who, i))
                put.append((who, i))

        async def consume() -> None:
            while True:
                item = await channel.get()
                got.append(item)
                await asyncio.sleep(1)

        async with Flow("f") as flow:
            tasks = [flow.start(produce(who), name=f"p{who}") for who in range(producers)]
            victims = [flow.start(consume(), name=f"v{i}") for i in range(len(cancel))]
            for after, victim in zip(sorted(cancel), victims, strict=True):
                await asyncio.sleep(max(0, after - now()))
                victim.cancel()
            survivor = flow.start(consume(), name="survivor")
            await asyncio.wait(tasks)
            await asyncio.sleep(1000)
            survivor.cancel()
        assert (
            sorted(got)
            == sorted(put)
            == [(who, i) for who in range(producers) for i in range(items)]
        )

    run_virtual(main)


def test_a_turnstile_lets_so_many_pass_in_an_iteration_of_the_loop_in_their_order() -> None:
    turnstile = Turnstile(3)
    passed: list[int] = []
    most = 0

    async def pass_twice(number: int) -> None:
        for _ in range(2):
            await turnstile.passes()
            passed.append(number)

    async def main() -> None:
        nonlocal most
        async with Flow("crowd") as flow:
            tasks = [flow.start(pass_twice(number), name=str(number)) for number in range(20)]
            while not all(task.done() for task in tasks):
                before = len(passed)
                await asyncio.sleep(0)
                most = max(most, len(passed) - before)

    asyncio.run(main())
    assert most <= 6, "three that leave it, and three whom these let in"
    assert passed == [*range(20), *range(20)]


def test_errors_of_one_kind_that_say_it_of_different_tasks_are_one_error(virtual):
    async def fails(task: str) -> None:
        raise ConfigError(f"task {task} has no answer")

    async def main() -> None:
        async with Flow("reward") as flow:
            for task in "abc":
                flow.start(fails(task), name=task)

    with pytest.raises(ConfigError, match="task a has no answer"):
        virtual(main)


def test_different_errors_of_agentrl_at_once_are_the_first_with_the_others_noted(virtual):
    async def fails(error: Exception) -> None:
        raise error

    async def main() -> None:
        async with Flow("rollouts") as flow:
            for number in range(3):
                flow.start(
                    fails(FilterBudgetError(f"{number} groups were filtered")),
                    name=f"filtered {number}",
                )
            flow.start(fails(RetriesExhaustedError("2 tasks failed")), name="failed")

    with pytest.raises(FilterBudgetError, match="0 groups were filtered") as raised:
        virtual(main)
    assert raised.value.__notes__ == ["At the same time: RetriesExhaustedError: 2 tasks failed"]


def test_a_defect_beside_an_error_of_agentrl_is_not_hidden(virtual):
    async def fails(error: Exception) -> None:
        raise error

    async def main() -> None:
        async with Flow("rollouts") as flow:
            flow.start(fails(FilterBudgetError("too many groups")), name="filtered")
            flow.start(fails(KeyError("a defect")), name="defect")

    with pytest.raises(ExceptionGroup):
        virtual(main)


def test_paused_deadlines_of_a_task_begin_anew_and_those_of_others_go_on() -> None:
    async def waiting(seconds: float, pause: float) -> float:
        with deadline("environment", "episode", 20), deadline("engine", "generate", 10):
            await asyncio.sleep(4)
            with pause_deadlines():
                await asyncio.sleep(pause)
            await asyncio.sleep(seconds)
        return now()

    async def main() -> None:
        async with Flow("test") as flow:
            paused_one = flow.start(waiting(9, 1000), name="paused")
            with (
                pytest.raises(DeadlineError, match=r"generate .* of 10 s"),
                deadline("engine", "generate", 10),
            ):
                await asyncio.sleep(11)
            assert now() == 10
        assert paused_one.result() == 4 + 1000 + 9
        with pytest.raises(DeadlineError, match="generate"):
            await waiting(11, 1000)
        assert now() == 1013 + 4 + 1000 + 10

    run_virtual(main)
