"""Engines that are added to a router and removed from it while it serves."""

import asyncio
import math
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Self

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.cluster.worker_registry import WorkerCount
from agentrl.engines.router import Router
from agentrl.errors import EngineDeadError, EngineError, WeightsError
from agentrl.flow import Flow, now, run_virtual
from agentrl.protocols import GenerateRequest
from agentrl.settings.sampling import SamplingParams
from agentrl.testing import ScriptedEngine
from agentrl.tokens.arrays import ints
from agentrl.trajectory import Completion
from agentrl.weights.config import WeightUpdate
from agentrl.weights.shipment import DirectShipment
from tests.properties import examples


def request(name: str, *, session: str = "", tokens: int = 10) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, stop_token_ids=(999,))
    return GenerateRequest(name, ints((1, 2)), sampling, seed=7, session=session)


class Counting(ScriptedEngine):
    """Its token at each position is the number of tokens before it: a lost or repeated one shows.
    One a second. It takes `start_seconds` to start, and `update_seconds` to take weights, in which
    it samples nothing new.
    """

    def __init__(self, start_seconds: float = 0.0, update_seconds: float = 0.0) -> None:
        super().__init__(
            lambda tokens: [10.0 * (i == len(tokens)) for i in range(200)],
            seconds_per_token=lambda request: 1.0,
        )
        self.start_seconds, self.update_seconds = start_seconds, update_seconds
        self.served_at: list[int] = []
        """The version at the beginning of each request."""
        self.is_open = False

    async def __aenter__(self) -> Self:
        await asyncio.sleep(self.start_seconds)
        await super().__aenter__()
        self.is_open = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.is_open = False
        await super().__aexit__(*exc)

    async def generate(self, request: GenerateRequest) -> Completion:
        self.served_at.append(self.policy_version)
        return await super().generate(request)

    async def update_weights(self, weights: Any, version: int) -> None:
        await asyncio.sleep(self.update_seconds)
        await super().update_weights(weights, version)

    async def stage_weights(self, weights: Any, version: int) -> None:
        await asyncio.sleep(self.update_seconds)

    async def sleep(self) -> None:
        """Nothing is released: requests go on."""

    async def wake(self) -> None:
        """It is awake."""

    def die(self) -> None:
        """Its process is gone."""
        self._closed = "its process is gone"
        self._end_all(lambda: EngineDeadError("its process is gone"))


@pytest.mark.parametrize("update", ["keep", "abort_resume", "drain"])
def test_a_removed_engine_s_turns_go_on_elsewhere_and_no_token_is_lost_or_sampled_twice(
    update: WeightUpdate,
) -> None:
    engines = [Counting(), Counting()]

    async def main() -> None:
        async with Router(engines, update=update, factory=lambda n: Counting()) as router:
            async with Flow("turns") as flow:
                turns = [
                    flow.start(router.generate(request(str(n), session=str(n))), name=str(n))
                    for n in range(4)
                ]
                await asyncio.sleep(3.5)
                assert [engine.stats().running for engine in engines] == [2, 2]
                assert await router.remove() == 1
                # With `drain`, turns are not interrupted: their ends are waited for.
                assert now() == pytest.approx(10.0 if update == "drain" else 3.5)
                assert not engines[1].is_open
                assert router.worker_count() == WorkerCount("engine", 1, 1)
            assert [turn.result().token_ids.tolist() for turn in turns] == [[*range(2, 12)]] * 4
            assert all(turn.result().finish_reason == "length" for turn in turns)
            assert router.stats().generated_tokens == 40  # the removed engine's among them
            later = await router.generate(request("later", session="3"))
            assert len(later.token_ids) == 10
            assert len(engines[1].requests) == 2

    run_virtual(main)


def test_an_engine_that_is_leaving_gets_no_requests() -> None:
    engines = [Counting(), Counting()]

    async def main() -> None:
        async with Router(engines, update="drain", factory=lambda n: Counting()) as router:
            async with Flow("turns") as flow:
                for name in ("a", "b"):
                    flow.start(router.generate(request(name, session=name)), name=name)
                await asyncio.sleep(1)
                removing = flow.start(router.remove(), name="remove")
                await asyncio.sleep(1)
                assert not removing.done()
                for name in ("a", "b", "c"):  # of which one has had its turn on the leaving engine
                    asked = request(f"{name}/2", session=name)
                    flow.start(router.generate(asked), name=asked.id)
            assert [len(engine.requests) for engine in engines] == [4, 1]

    run_virtual(main)


def test_an_added_engine_serves_the_newest_weights_before_it_gets_requests() -> None:
    added = Counting(start_seconds=3.0, update_seconds=4.0)

    async def main() -> None:
        async with Router([Counting()], factory=lambda n: Counting()) as router:
            await router.update_weights({}, 1)
            async with Flow("changes") as flow:
                adding = flow.start(router.add(1, lambda: added), name="add")
                await asyncio.sleep(4)
                await router.update_weights({}, 2)  # while it takes version 1
                turns = [
                    flow.start(router.generate(request(str(n), tokens=30)), name=str(n))
                    for n in range(8)
                ]
                await adding
                assert now() == pytest.approx(3 + 4 + 4)
                assert added.policy_version == 2
                assert router.worker_count() == WorkerCount("engine", 2, 2)
                # Those that come now find it less busy.
                turns += [
                    flow.start(router.generate(request(str(n))), name=str(n)) for n in range(8, 12)
                ]
            assert all(set(turn.result().policy_versions) == {2} for turn in turns)
        assert added.served_at == [2] * 4

    run_virtual(main)


def test_weights_whose_files_go_while_an_engine_loads_them_are_those_of_the_next_version() -> None:
    class Reading(Counting):
        async def update_weights(self, weights: Any, version: int) -> None:
            await asyncio.sleep(2)
            if router_version[0] > version:
                raise WeightsError(f"the files of version {version} are gone")
            await super().update_weights(weights, version)

    router_version = [0]
    added = Reading()

    async def main() -> None:
        async with Router([Counting()], factory=lambda n: Counting()) as router:
            await router.update_weights({}, 1)
            async with Flow("add") as flow:
                adding = flow.start(router.add(1, lambda: added), name="add")
                await asyncio.sleep(1)
                await router.update_weights({}, 2)
                router_version[0] = 2
                await adding
            assert added.policy_version == 2
            # If nothing newer has come, that is an error.
            router_version[0] = 3
            with pytest.raises(EngineError, match="could not load version 2"):
                await router.add(2, Reading)
            assert router.worker_count() == WorkerCount("engine", 2, 2)

    run_virtual(main)


def test_an_engine_is_not_added_with_weights_that_the_trainer_changes() -> None:
    async def main() -> None:
        async with Router([Counting()], factory=lambda n: Counting()) as router:
            weights = {"w": torch.zeros(2)}
            await router.update_weights(DirectShipment(weights), 1)
            weights["w"].add_(1)  # the trainer's next step
            with pytest.raises(EngineError, match=r"weights\.transport=direct"):
                await router.add(1, Counting)

    run_virtual(main)


def test_the_last_engine_stays() -> None:
    async def main() -> None:
        async with Router([Counting(), Counting()], factory=lambda n: Counting()) as router:
            await router.remove()
            with pytest.raises(EngineError, match="engine 0 is the last one"):
                await router.remove()
            assert len((await router.generate(request("a"))).token_ids) == 10

    run_virtual(main)


def test_an_engine_that_is_removed_while_it_starts_is_not_waited_for() -> None:
    added = Counting(start_seconds=100.0)

    async def main() -> None:
        async with Router([Counting()], factory=lambda n: Counting()) as router:
            async with Flow("changes") as flow:
                adding = flow.start(_error_of(router.add(1, lambda: added)), name="add")
                await asyncio.sleep(5)
                assert router.worker_count() == WorkerCount("engine", 1, 2)
                assert await router.remove() == 1
                assert now() == 5
            assert "removed before it served" in str(adding.result())
            assert router.worker_count() == WorkerCount("engine", 1, 1)
            assert not added.is_open

    run_virtual(main)


def test_an_engine_that_is_removed_while_it_restarts_is_not_restarted() -> None:
    engines = [Counting(), Counting()]

    async def main() -> None:
        async with Router(
            engines, factory=lambda n: Counting(start_seconds=100.0), lease=math.inf
        ) as router:
            engines[0].die()
            async with Flow("turn") as flow:  # it finds the death
                turn = flow.start(router.generate(request("a")), name="a")
                await asyncio.sleep(1)
                assert await router.remove() == 0  # that which does not serve
            assert turn.result().token_ids.tolist() == [*range(2, 12)]
            assert router.worker_count() == WorkerCount("engine", 1, 1, restarts=1)

    run_virtual(main)


@pytest.mark.parametrize("fault", ["dies", "hangs"])
def test_an_engine_that_dies_or_hangs_while_it_is_removed_costs_no_request(fault: str) -> None:
    class Failing(Counting):
        async def interrupt(self) -> None:
            if fault == "hangs":
                await asyncio.sleep(math.inf)
            self.die()
            raise EngineDeadError("its process is gone")

    made: list[int] = []

    async def main() -> None:
        router = Router(
            [Counting(), Failing()],
            factory=lambda n: made.append(n) or Counting(),  # type: ignore[func-returns-value]
            update_seconds=5.0,
        )
        async with router:
            async with Flow("turns") as flow:
                turns = [
                    flow.start(router.generate(request(str(n))), name=str(n)) for n in range(4)
                ]
                await asyncio.sleep(3.5)
                assert await router.remove() == 1
            assert [turn.result().token_ids.tolist() for turn in turns] == [[*range(2, 12)]] * 4
            assert router.worker_count() == WorkerCount("engine", 1, 1)
        assert not made  # it is not replaced

    run_virtual(main)


def test_an_engine_that_was_added_and_cannot_be_restarted_is_lost_and_the_others_carry_on() -> None:
    lost: list[str] = []
    first = Counting()
    made = [first]

    def make() -> Counting:
        if made:
            return made.pop()
        raise EngineDeadError("its machine is gone")

    async def note(why: EngineDeadError) -> None:
        lost.append(str(why))

    async def main() -> None:
        async with Router([Counting()], factory=lambda n: Counting()) as router:
            await router.add(1, make, lost=note)
            first.die()
            async with Flow("turns") as flow:
                turns = [
                    flow.start(router.generate(request(str(n), tokens=40)), name=str(n))
                    for n in range(4)
                ]
            assert all(len(turn.result().token_ids) == 40 for turn in turns)
            assert router.worker_count() == WorkerCount("engine", 1, 1, restarts=1)
        assert len(lost) == 1
        assert "its machine is gone (3 times in a row)" in lost[0]

    run_virtual(main)


def test_an_engine_that_does_not_start_is_not_added_and_says_why() -> None:
    class Broken(Counting):
        def __init__(self, error: Exception) -> None:
            super().__init__()
            self.error = error

        async def __aenter__(self) -> Self:
            raise self.error

    async def main() -> None:
        async with Router([Counting()], factory=lambda n: Counting()) as router:
            for error, said in [
                (EngineError("no memory is left"), "could not be started: no memory is left"),
                (RuntimeError("CUDA error"), "RuntimeError: CUDA error"),
            ]:
                with pytest.raises(EngineError, match=said):
                    await router.add(1, partial(Broken, error))
                assert router.worker_count() == WorkerCount("engine", 1, 1)
            with pytest.raises(EngineError, match="takes only 5 tokens, and the others 2048"):
                await router.add(1, lambda: ScriptedEngine(lambda tokens: [1.0], max_context=5))
            await router.add(1, Counting)  # the number is free again

    run_virtual(main)


def test_while_the_router_sleeps_engines_are_neither_added_nor_removed() -> None:
    async def main() -> None:
        async with (
            Router([Counting(), Counting()], factory=lambda n: Counting()) as router,
            Flow("changes") as flow,
        ):
            for change in (lambda: router.add(2, Counting), router.remove):
                await router.sleep()
                changing = flow.start(change(), name="change")
                await asyncio.sleep(50)
                assert not changing.done()
                await router.wake()
                await changing
            assert router.worker_count() == WorkerCount("engine", 2, 2)

    run_virtual(main)


def test_a_sleep_waits_for_an_engine_that_is_leaving() -> None:
    class Closing(Counting):
        async def __aexit__(self, *exc: object) -> None:
            await asyncio.sleep(8)
            await super().__aexit__(*exc)

    async def main() -> None:
        async with (
            Router([Counting(), Closing()], factory=lambda n: Counting()) as router,
            Flow("removal") as flow,
        ):
            flow.start(router.remove(), name="remove")
            await asyncio.sleep(1)
            await router.sleep()
            assert now() == 8
            await router.wake()

    run_virtual(main)


async def _error_of(work: Any) -> Exception | None:
    try:
        await work
    except Exception as error:
        return error
    return None


@dataclass
class Life:
    """A router under random additions, removals, deaths and updates, while turns run."""

    seed: int
    update: WeightUpdate
    made: list[Counting] = field(default_factory=list)
    version: int = 0
    number: int = 2
    has_died: bool = False

    def engine(self) -> Counting:
        rng = Random(f"{self.seed}/{len(self.made)}")
        self.made.append(Counting(rng.choice([0.0, 3.0]), rng.choice([0.0, 0.7])))
        return self.made[-1]

    async def change(self, router: Router, flow: Flow, rng: Random) -> None:
        """Begin one change, and wait for a while."""
        what = rng.choice(["add", "remove", "die", "update", "update"])
        if what == "add":
            flow.start(_error_of(router.add(self.number, self.engine)), name="add")
            self.number += 1
        elif what == "remove":
            flow.start(_error_of(router.remove()), name="remove")
        elif what == "die" and not self.has_died:  # a request that two die of is set aside
            self.has_died = True
            rng.choice([engine for engine in self.made if engine.is_open]).die()
        else:
            self.version += 1
            await router.stage_weights({}, self.version)
            await router.update_weights({}, self.version)
        await asyncio.sleep(rng.choice([0.0, 0.4, 3.0]))


@given(seed=st.integers(0, 10**6), update=st.sampled_from(["keep", "abort_resume", "drain"]))
@examples(300)
def test_whatever_is_added_removed_and_dies_each_turn_is_answered_once_with_its_versions(
    seed: int, update: WeightUpdate
) -> None:
    life = Life(seed, update)

    async def main() -> None:
        rng = Random(seed)
        async with Router(
            [life.engine(), life.engine()],
            update=update,
            factory=lambda n: life.engine(),
            lease=2.0,
        ) as router:
            async with Flow("life") as flow:
                turns = []
                for change in range(12):
                    for each in range(rng.randrange(5)):
                        name, session = f"{change}/{each}", str(rng.randrange(6))
                        asked = request(name, session=session, tokens=rng.choice([1, 5, 20]))
                        turns.append((asked, flow.start(router.generate(asked), name=name)))
                    await life.change(router, flow, rng)
                life.version += 1
                await router.update_weights({}, life.version)
            for asked, turn in turns:
                completion = turn.result()
                most = asked.sampling.max_tokens
                assert completion.token_ids.tolist() == [*range(2, 2 + most)]
                versions = completion.policy_versions.tolist()
                assert versions == sorted(versions)
                assert versions[-1] <= life.version
            # All that serve have the newest weights, and none of the others is left open.
            await asyncio.sleep(100)
            count = router.worker_count()
            assert count.alive == count.count >= 1
            serving = [engine for engine in life.made if engine.is_open]
            assert len(serving) == count.count
            assert {engine.policy_version for engine in serving} == {life.version}
            assert router.stats().running == router.stats().waiting == 0
        assert not any(engine.is_open for engine in life.made)

    run_virtual(main)
