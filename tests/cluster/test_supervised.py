"""Restarts: how many may be in vain, and which request workers die of."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.cluster.supervised import Supervised, start_deadline
from agentrl.errors import EngineDeadError, LethalRequestError, StallError, WorkerDiedError
from agentrl.flow import Flow, Suspect, Suspicion, now, run_virtual


@given(work=st.lists(st.booleans(), max_size=60), allowed=st.integers(0, 5))
def test_no_more_restarts_than_are_allowed_are_in_vain(work: list[bool], allowed: int) -> None:
    async def recover(supervised: Supervised) -> bool:
        try:
            await supervised.recover(WorkerDiedError("env", 1, "killed"), EngineDeadError)
        except EngineDeadError as error:
            reasons.add(str(error))
            return False
        return True

    async def main() -> None:
        supervised, in_vain, total = Supervised("env 1", "a verdict", allowed=allowed), 0, 0
        for worked in work:
            if worked:
                supervised.progress()
                in_vain = 0
            began = now()
            may = await recover(supervised)
            assert may == (in_vain < allowed)
            in_vain, total = in_vain + may, total + may
            assert supervised.restarts == total
            pause = 0.0 if in_vain < 2 else min(0.5 * 2 ** (in_vain - 2), 30.0)
            assert now() - began == pytest.approx(pause if may else 0.0)

    reasons: set[str] = set()
    run_virtual(main)
    often = f"restarted {allowed} times in a row" if allowed else "not restarted"
    assert reasons <= {f"{often} without a verdict in between (cluster.restarts)"}


@pytest.mark.parametrize(("failures", "starts"), [(0, 1), (2, 3), (3, 3)])
def test_a_start_that_fails_is_tried_again_until_its_attempts_are_spent(
    failures: int, starts: int
) -> None:
    began: list[float] = []

    async def start() -> str:
        began.append(now())
        if len(began) <= failures:
            raise WorkerDiedError("env", 1, "no machine")
        return "started"

    async def main() -> str:
        return await Supervised("env 1", "a verdict").start_again(start, WorkerDiedError, 3)

    if failures < 3:
        assert run_virtual(main) == "started"
    else:
        with pytest.raises(WorkerDiedError, match="no machine"):
            run_virtual(main)
    assert began == [0.0, 0.5, 1.5][:starts]


def named(*names: str) -> list[Suspect]:
    return [Suspect(name, name.encode) for name in names]


def set_aside(suspicion: Suspicion, suspect: Suspect) -> bool:
    try:
        suspicion.check(suspect)
    except LethalRequestError:
        return True
    return False


@pytest.mark.parametrize(
    ("deaths", "culprits"),
    [
        (["a"], ""),
        (["a", "a"], "a"),
        (["ab", "b"], "b"),
        (["ab", "ab"], ""),  # either of them
        (["ab", "ab", "a"], "a"),
        (["ab", "ab", "ab", "ab"], "ab"),  # they were not asked one at a time
        (["abc", "cde", "e"], "c"),  # which is the reason for two deaths, so e was there at one
        (["ab", "cd", "ef"], ""),
    ],
)
def test_the_one_request_that_was_there_at_two_deaths_is_set_aside(
    deaths: list[str], culprits: str
) -> None:
    suspicion, suspects = (
        Suspicion(LethalRequestError, "engines"),
        {one.name: one for one in named(*"abcdef")},
    )
    for present in deaths:
        suspicion.died([suspects[name] for name in present], "killed")
    assert "".join(name for name, one in suspects.items() if set_aside(suspicion, one)) == culprits
    assert suspicion.set_aside == len(culprits)


def test_a_request_that_was_answered_is_not_suspected_of_what_was_before() -> None:
    suspicion, (one,) = Suspicion(LethalRequestError, "engines"), named("a")
    for _ in range(5):
        suspicion.died([one], "killed")
        suspicion.ended(one)
    assert not set_aside(suspicion, one)


def test_what_was_set_aside_stays_so_for_others_of_the_same_content() -> None:
    suspicion, (one, same) = Suspicion(LethalRequestError, "engines"), named("a", "a")
    suspicion.died([one], "killed")
    suspicion.died([suspicion.suspect("a", lambda: b"a")], "killed")
    assert set_aside(suspicion, same)


def test_equal_suspects_take_turns_until_one_of_them_is_found() -> None:
    suspicion, suspects = Suspicion(LethalRequestError, "engines"), named(*"abcd")
    began: list[tuple[str, float]] = []

    async def ask(one: Suspect) -> None:
        async with suspicion.turn(one):
            began.append((one.name, now()))
            await asyncio.sleep(1)
            if one.name == "b":
                suspicion.died([one], "killed")

    async def main() -> None:
        for _ in range(2):
            suspicion.died(suspects, "killed")
        async with Flow("asking") as flow:
            for one in suspects:
                flow.start(ask(one), name=one.name)

    run_virtual(main)
    assert began == [("a", 0.0), ("b", 1.0), ("c", 2.0), ("d", 2.0)]


def test_what_does_not_start_in_time_is_named_and_its_own_timeouts_pass() -> None:
    async def main() -> None:
        with pytest.raises(
            StallError, match=r"engine 3 did not start within 5 s \(cluster.start_seconds\)"
        ):
            async with start_deadline("engine 3", 5.0):
                await asyncio.sleep(6)
        with pytest.raises(TimeoutError, match="its own"):
            async with start_deadline("engine 3", 5.0):
                raise TimeoutError("its own")

    run_virtual(main)
