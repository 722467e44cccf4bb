"""Rollout workers that ask engines in other processes themselves (`EngineDoor`)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl.cluster.engine_door import EngineDoor
from agentrl.engines.router import Router
from agentrl.errors import EngineDeadError
from agentrl.flow import Flow
from agentrl.ledger.ledger import Ledger
from agentrl.net.interfaces import LOOPBACK
from agentrl.net.link import Door, RemoteDoor
from agentrl.protocols import GenerateRequest
from agentrl.rollout.workers.pool import RolloutWorkers, WorkerRunner
from agentrl.rollout.workers.remote_engine import RemoteEngine
from agentrl.settings.sampling import SamplingParams
from agentrl.testing import ScriptedEngine
from agentrl.testing.workers import InlineWorkers
from agentrl.tokens.arrays import ints
from agentrl.trajectory import Completion, Terminated
from agentrl.weights.config import WeightUpdate
from tests.processes import PATIENCE_SECONDS
from tests.rollout.test_workers import POLICY, episode, eventually, play, start_at, trained
from tests.rollout.worker_parts import ASKED, RENDERER, dice_parts, noted_parts, says


class DoorEngine(ScriptedEngine):
    """A scripted engine with a door, as an engine in another process has."""

    async def __aenter__(self) -> "DoorEngine":
        self.door = EngineDoor(self)
        return await super().__aenter__()

    async def __aexit__(self, *exc: object) -> None:
        await self.door.close()
        await super().__aexit__(*exc)

    @property
    def remote_door(self) -> RemoteDoor:
        return RemoteDoor(self.open_door, self.hold_door, self.door.drained, self.release_door)

    async def open_door(self) -> Door:
        return await self.door.open(LOOPBACK)

    async def hold_door(self) -> None:
        self.door.hold()

    async def release_door(self) -> None:
        self.door.release()

    async def probe(self) -> None:
        self._check_running()

    async def die(self) -> None:
        """End as the process of an engine does: its connections end with it."""
        self._closed = "it was killed"
        await self.door.close()
        self._end_all(lambda: EngineDeadError("it was killed"))


def counting(seconds: float = 0.0) -> DoorEngine:
    """Its token at each position is the number of tokens before it: what is lost shows."""
    return DoorEngine(
        lambda tokens: [10.0 * (i == len(tokens)) for i in range(100)],
        seconds_per_token=lambda request: seconds,
    )


def request(name: str, tokens: int = 10) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, stop_token_ids=(99,))
    return GenerateRequest(name, ints([1, 2]), sampling, seed=7, session=name)


class NotingRouter(Router):
    """A router that notes what it is asked."""

    asked: tuple[str, ...] = ()

    async def generate(self, request: GenerateRequest) -> Completion:
        self.asked += (request.id,)
        return await super().generate(request)


@asynccontextmanager
async def asked_by_a_worker(
    engines: list[DoorEngine], update: WeightUpdate = "keep", **options: Any
) -> AsyncIterator[tuple[NotingRouter, RemoteEngine]]:
    """A router over engines with doors, and what a worker that is connected to all knows of it."""
    router = NotingRouter(engines, update=update, lease=PATIENCE_SECONDS, **options)
    ASKED.clear()
    pool = RolloutWorkers(InlineWorkers(serve="play_for"), noted_parts, 1, silence=PATIENCE_SECONDS)
    async with asyncio.timeout(PATIENCE_SECONDS), router, pool:
        pool.engines.name_of(router, "policy")
        (remote,) = ASKED
        assert isinstance(remote, RemoteEngine)
        await eventually(lambda: len(remote.direct._usable) == len(engines))
        yield router, remote


@pytest.mark.parametrize("place", ["inline", pytest.param("ray", marks=pytest.mark.long)])
def test_workers_that_ask_engines_themselves_play_what_one_process_does(place, tmp_path):
    def engines() -> list[Any]:
        if place == "inline":
            return [DoorEngine.replying(says), DoorEngine.replying(says)]
        return ray_engines(2)

    async def batches(ledger: Ledger, workers: int) -> Any:
        async with NotingRouter(engines(), lease=PATIENCE_SECONDS) as router:
            if not workers:
                async with dice_parts(lambda name: router) as make_runner:
                    return await trained(make_runner(POLICY), router, ledger)
            start = start_at(place)
            pool = RolloutWorkers(start, dice_parts, workers, silence=PATIENCE_SECONDS)
            async with pool:
                pool.engines.name_of(router, "policy")

                def direct() -> int:
                    return sum(one.answers for one in router._replicas) - len(router.asked)

                while direct() <= 0:  # until a worker has connected
                    await play(pool, episode())
                before = direct()
                played = await trained(WorkerRunner(pool, POLICY, RENDERER), router, ledger)
                await eventually(lambda: direct() > before)
                return played

    ledgers = [Ledger(tmp_path / "alone.sqlite"), Ledger(tmp_path / "workers.sqlite")]
    expected = asyncio.run(batches(ledgers[0], 0))
    assert asyncio.run(batches(ledgers[1], 2)) == expected
    assert len(list(ledgers[0].outcomes())) == 12
    assert list(ledgers[0].outcomes()) == list(ledgers[1].outcomes())
    for ledger in ledgers:
        ledger.close()


def ray_engines(count: int) -> list[Any]:
    from agentrl.cluster.ray_engine import RayEngine
    from agentrl.cluster.ray_receivers import RayReceivers
    from agentrl.plugins import Component, NoSettings
    from tests.cluster.shared_ray import join_shared_ray
    from tests.rollout.worker_parts import make_scripted

    join_shared_ray()
    chosen = Component("scripted", make_scripted, NoSettings())
    options = {"num_cpus": 0.1}
    return [RayEngine(chosen, Path(), options, RayReceivers()) for _ in range(count)]


def test_a_conversation_stays_with_its_engine_and_the_router_is_not_asked():
    engines = [counting(), counting()]

    async def main() -> None:
        async with asked_by_a_worker(engines) as (router, remote):
            async with Flow("asking") as flow:
                for name in "abcd":
                    flow.start(remote.generate(request(name)), name=name)
            for name in "abcd":
                await remote.generate(request(name))
            assert router.asked == ()
            homes = [[one.session for one in engine.requests] for engine in engines]
            assert all(home.count(name) in (0, 2) for home in homes for name in "abcd")
            assert sorted(map(len, homes)) == [4, 4]
            await eventually(lambda: sum(one.answers for one in router._replicas) == 8)

    asyncio.run(main())


@pytest.mark.parametrize("update", ["keep", "abort_resume", "drain"])
def test_new_weights_meet_requests_past_the_router_as_they_meet_those_through_it(update):
    engines = [counting(0.01), counting(0.01)]

    async def main() -> list[Completion]:
        async with asked_by_a_worker(engines, update) as (router, remote):
            async with Flow("asking") as flow:
                early = [
                    flow.start(remote.generate(request(f"early {n}", 60)), name=str(n))
                    for n in range(4)
                ]
                await eventually(lambda: all(engine.stats().generated_tokens for engine in engines))
                updating = flow.start(router.update_weights({}, 1), name="update")
                await eventually(lambda: updating.done() or not router._open.is_set())
                late = flow.start(remote.generate(request("late", 20)), name="late")
            assert router.asked == ()
            assert all(engine.door._released.is_set() for engine in engines)
            return [asking.result() for asking in [*early, late]]

    *early, late = asyncio.run(main())
    for completion in early:
        assert completion.token_ids.tolist() == list(range(2, 62))
        versions = completion.policy_versions.tolist()
        assert versions == sorted(versions)
        assert set(versions) == ({0} if update == "drain" else {0, 1})
    assert late.token_ids.tolist() == list(range(2, 22))
    assert set(late.policy_versions.tolist()) == {1}  # it did not begin between the engines


@pytest.mark.parametrize("how", ["killed", "removed"])
def test_requests_of_an_engine_that_goes_are_answered_elsewhere(how):
    engines = [counting(0.01), counting(0.01)]
    made: list[DoorEngine] = []

    def another(number: int) -> DoorEngine:
        made.append(counting())
        return made[-1]

    async def main() -> None:
        async with asked_by_a_worker(engines, "abort_resume", factory=another) as (router, remote):
            async with Flow("asking") as flow:
                asking = [
                    flow.start(remote.generate(request(str(n), 40)), name=str(n)) for n in range(6)
                ]
                await eventually(lambda: all(engine.stats().generated_tokens for engine in engines))
                if how == "killed":
                    await engines[1].die()
                else:
                    assert await router.remove() == 1
            for one in asking:
                assert one.result().token_ids.tolist() == list(range(2, 42))
            # Of a dead engine, its three were asked again; of one that goes, no token is lost.
            lost = sum(engine.stats().generated_tokens for engine in [*engines, *made]) - 6 * 40
            assert (lost > 0) == (how == "killed")
            assert len(router.asked) == (3 if how == "killed" else 0)
            if how == "killed":
                await eventually(lambda: router.worker_count().alive == 2)
                assert router._direct._offered == ()  # until it has been calm for a while
                router._direct._calm_at = 0.0
                router._offer_doors()
                await eventually(lambda: len(remote.direct._usable) == 2)
                await remote.generate(request("again"))
                assert len(router.asked) == 3

    asyncio.run(main())


def test_an_engine_forgets_what_a_lost_worker_has_asked():
    engine = DoorEngine.replying(says, hang=lambda request: True)

    async def main() -> None:
        starter = InlineWorkers(serve="play_for")
        pool = RolloutWorkers(starter, dice_parts, 1, silence=PATIENCE_SECONDS)
        router = Router([engine], update="drain")
        async with asyncio.timeout(PATIENCE_SECONDS), router, pool:
            pool.engines.name_of(router, "policy")
            await eventually(lambda: len(router._direct._offered) == 1)
            async with Flow("playing") as flow:
                playing = flow.start(play(pool, episode()), name="episode")
                await eventually(lambda: engine.stats().running == 1)
                starter.started[0].kill()
            assert playing.result().status != Terminated()
            # Otherwise this would wait for the request for ever.
            await router.update_weights({}, 1)
            assert engine.stats().running == 0

    asyncio.run(main())
