"""Rollout workers that come and go with their load."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.ledger.ledger import Ledger
from agentrl.rollout.workers.pool import RolloutWorkers, WorkerRunner
from agentrl.rollout.workers.scaling import TARGET_SHARE, WorkerScaling
from agentrl.testing.workers import InlineWorkers
from agentrl.trajectory import Failed, Group, Terminated
from tests.processes import PATIENCE_SECONDS
from tests.rollout.test_workers import (
    POLICY,
    episode,
    eventually,
    play,
    scripted,
    trained,
    workers_at,
)
from tests.rollout.worker_parts import RENDERER, dice_parts

CONFIG = Path(__file__).parents[2] / "examples" / "frozen_lake.yaml"
LOADS = st.lists(st.floats(0, 40), min_size=1, max_size=60)


class ToldScaling(WorkerScaling):
    """Decides what it is told."""

    def __init__(self, count: int) -> None:
        super().__init__(1, 9, period=0.01)
        self.count = count

    def decide(self, count: int, busy: float) -> int:
        return self.count


@given(loads=LOADS, periods=st.integers(1, 5))
def test_a_number_of_workers_stays_in_its_bounds_and_shrinks_only_when_it_is_certain(
    loads: list[float], periods: int
) -> None:
    scaling, count = WorkerScaling(2, 12, periods_to_shrink=periods), 2
    needed = [min(max(load / TARGET_SHARE, 2), 12) for load in loads]
    for number, load in enumerate(loads):
        before, count = count, scaling.decide(count, min(load, count))
        assert 2 <= count <= 12
        if count < before:
            # Each of the last decisions had room for fewer, within the tolerance.
            assert number + 1 >= periods
            assert max(needed[number + 1 - periods : number + 1]) < count * 1.1 + 1


@given(load=st.floats(0, 100), begin=st.integers(1, 20))
def test_under_a_steady_load_the_number_settles_where_each_loop_is_busy_to_its_target(
    load: float, begin: int
) -> None:
    scaling = WorkerScaling(1, 1000, periods_to_shrink=3)
    counts = [begin]
    for _ in range(40):
        counts.append(scaling.decide(counts[-1], min(load, counts[-1])))
    assert len({*counts[-10:]}) == 1
    settled = counts[-1]
    assert load / settled <= TARGET_SHARE * 1.1 + 1e-9
    assert settled == 1 or load / (settled - 1) > TARGET_SHARE * 0.9 * (settled - 2) / settled


def test_a_number_grows_at_once_and_by_two_thirds_at_most() -> None:
    scaling = WorkerScaling(1, 100)
    assert [scaling.decide(count, float(count)) for count in (3, 6, 30)] == [5, 10, 50]
    assert scaling.decide(10, 6.5) == 10  # within the tolerance


class RestlessScaling(WorkerScaling):
    """Changes its mind all the time."""

    def __init__(self) -> None:
        super().__init__(1, 4, period=0.0)
        self.decided: list[int] = []

    def decide(self, count: int, busy: float) -> int:
        self.decided.append((1, 4, 2, 3, 1, 2)[len(self.decided) // 4 % 6])
        return self.decided[-1]


def test_workers_come_and_go_while_they_play_and_nothing_is_lost_or_changed(
    tmp_path: Path,
) -> None:
    async def batches(ledger: Ledger, scaling: WorkerScaling | None) -> list[list[Group]]:
        engine = scripted()
        async with workers_at("inline", 1, engine, scaling=scaling) as workers:
            played = await trained(WorkerRunner(workers, POLICY, RENDERER), engine, ledger)
            assert workers.worker_count().restarts == 0
            assert workers.metrics()["rollout_workers/lost_episodes"] == 0
        return played

    ledgers = [Ledger(tmp_path / "same.sqlite"), Ledger(tmp_path / "changing.sqlite")]
    scaling = RestlessScaling()
    expected = asyncio.run(batches(ledgers[0], None))
    assert asyncio.run(batches(ledgers[1], scaling)) == expected
    assert list(ledgers[0].outcomes()) == list(ledgers[1].outcomes())
    assert {*scaling.decided} == {1, 2, 3, 4}
    for ledger in ledgers:
        ledger.close()


@pytest.mark.parametrize("place", ["inline", pytest.param("processes", marks=pytest.mark.slow)])
def test_a_worker_that_leaves_plays_its_episodes_to_their_ends(place: str) -> None:
    async def main() -> None:
        scaling = ToldScaling(3)
        async with workers_at(place, 2, scaling=scaling) as workers:
            hanging = [
                asyncio.create_task(workers.play(POLICY, one, lambda report: None))
                for one in (episode(3, hangs=True), episode(7, hangs=True))
            ]
            await eventually(lambda: workers.worker_count().alive == 3)
            scaling.count = 1
            await eventually(lambda: workers.worker_count().count == 1)
            # The third one had nothing to do, and the second still plays.
            await eventually(lambda: sorted(workers._connections) == [0, 1])
            for _ in range(4):
                assert (await play(workers, episode(4))).status == Terminated()
            assert workers._connections[1].live == 1
            for one in hanging:
                one.cancel()
            await asyncio.wait(hanging, timeout=PATIENCE_SECONDS)
            # Without an episode nothing is decided, and who was about to go does.
            await eventually(lambda: sorted(workers._connections) == [0])
            assert (await play(workers, episode(4))).status == Terminated()
            assert workers.worker_count().restarts == 0

    asyncio.run(main())


def test_a_worker_that_dies_while_it_leaves_is_not_replaced() -> None:
    async def main() -> None:
        scaling, start, engine = ToldScaling(2), InlineWorkers(serve="play_for"), scripted()
        pool = RolloutWorkers(start, dice_parts, 2, scaling=scaling, silence=PATIENCE_SECONDS)
        async with engine, pool as workers:
            workers.engines.name_of(engine, "policy")
            await play(workers, episode(4))
            playing = [
                asyncio.create_task(play(workers, one))
                for one in (episode(3, hangs=True), episode(7, hangs=True))
            ]
            await eventually(lambda: [one.live for one in workers._connections.values()] == [1, 1])
            scaling.count = 1
            await eventually(lambda: workers.worker_count().count == 1)
            start.started[1].kill()
            await eventually(lambda: list(workers._places) == [0])
            done, left = await asyncio.wait(playing, return_when=asyncio.FIRST_COMPLETED)
            assert [type(one.result().status) for one in done] == [Failed]
            assert len(start.started) == 2
            assert (await play(workers, episode(4))).status == Terminated()
            for one in left:
                one.cancel()
            await asyncio.wait(left)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("written", "bounds", "shown"),
    [
        ("rollout.workers=0", None, ""),
        ("rollout.workers=3", (3, 3), "3"),
        ("rollout.workers.max=3", (1, 3), "1 to 3"),
        ("rollout.workers={min: 2, max: 4}", (2, 4), "2 to 4"),
    ],
)
def test_a_number_of_workers_is_a_number_or_its_bounds(
    written: str, bounds: tuple[int, int] | None, shown: str
) -> None:
    found = load_config(CONFIG, [written]).config.rollout.worker_range
    assert (None if found is None else (found.min, found.max)) == bounds
    assert found is None or str(found) == shown


@pytest.mark.parametrize(
    ("written", "match"),
    [
        ("rollout.workers={min: 5, max: 4}", "min is 5 and max is 4: write the smaller one first"),
        ("rollout.workers={mn: 2, max: 4}", "rollout.workers.mn: no such setting .* 'min'"),
        ("rollout.workers=-1", "rollout.workers: .* greater than or equal to 0, got -1"),
        ("rollout.workers=two", "rollout.workers: .* a valid integer or a mapping, got 'two'"),
    ],
)
def test_bounds_that_are_none_are_refused(written: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load_config(CONFIG, [written])
