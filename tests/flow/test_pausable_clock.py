"""A clock that stands still, and the deadlines on it."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import DeadlineError
from agentrl.flow import Flow, PausableClock, deadline, now, run_virtual, waits

SECONDS = 10.0
PERIODS = st.lists(st.floats(0.125, 20, width=16), min_size=1, max_size=6)


async def limited(clock: PausableClock | None, seconds: float = 1e6) -> float:
    """The time at which a wait of `seconds` ended, by a deadline of ten."""
    try:
        with deadline("engine", "generate", SECONDS, clock):
            await asyncio.sleep(seconds)
    except DeadlineError:
        return -now()
    return now()


@given(starts=st.lists(st.floats(0, 30, width=16), min_size=1, max_size=5), periods=PERIODS)
def test_a_deadline_counts_only_the_seconds_in_which_its_clock_runs(
    starts: list[float], periods: list[float]
) -> None:
    """The periods run and stand still by turns; then the clock runs for ever."""
    clock = PausableClock()

    def expires(start: float) -> float:
        """By hand: the time at which so many running seconds have passed."""
        at, left = 0.0, SECONDS
        for number, period in enumerate(periods):
            begins, ends = max(at, start), at + period
            if number % 2 == 0 and begins < ends:
                if ends - begins >= left:
                    return begins + left
                left -= ends - begins
            at = ends
        return max(at, start) + left

    async def main() -> list[float]:
        async def begin(start: float) -> float:
            await asyncio.sleep(start)
            return await limited(clock)

        async with Flow("waits") as flow:
            tasks = [flow.start(begin(start), name=str(start)) for start in starts]
            for number, period in enumerate(periods):
                if number % 2 == 0:
                    await asyncio.sleep(period)
                else:
                    with clock.held():
                        await asyncio.sleep(period)
        return [-task.result() for task in tasks]

    assert run_virtual(main) == pytest.approx([expires(start) for start in starts], abs=1e-5)


def test_what_ends_in_time_after_a_pause_leaves_nothing_behind() -> None:
    clock = PausableClock()

    async def main() -> None:
        async with Flow("waits") as flow:
            late = flow.start(limited(clock, 38), name="late")
            plain = flow.start(limited(None, 38), name="plain")
            await asyncio.sleep(5)
            with clock.held(), clock.held():
                await asyncio.sleep(30)
                assert clock.now() == 5
                (wait,) = waits()
                assert (wait.count, wait.longest) == (1, 35)
        assert (late.result(), plain.result()) == (38, -10)
        assert not waits()
        await asyncio.sleep(100)

    run_virtual(main)


def test_a_clock_follows_others_while_it_waits_for_them() -> None:
    leader, other, follower = PausableClock(), PausableClock(), PausableClock()

    async def main() -> None:
        with leader.held():
            await asyncio.sleep(1)  # nobody follows
            with follower.following(leader), follower.following(leader):
                await asyncio.sleep(2)
        with follower.following(leader), follower.following(other):
            await asyncio.sleep(4)  # both run
            leader.hold()
            await asyncio.sleep(8)
            other.hold()
            await asyncio.sleep(16)
            leader.release()
            await asyncio.sleep(32)
        assert not follower.is_held  # although the other one still stands still
        await asyncio.sleep(64)
        assert follower.now() == 1 + 4 + 64

    run_virtual(main)


def test_an_allowance_that_grows_meanwhile_counts() -> None:
    async def wait() -> None:
        with deadline("environment", "group", SECONDS) as limit:
            await asyncio.sleep(9)
            limit.allowance = 5
            await asyncio.sleep(5.5)
            limit.allowance = 7
            await asyncio.sleep(1e6)

    async def main() -> None:
        with pytest.raises(DeadlineError):
            await wait()
        assert now() == 17

    run_virtual(main)
