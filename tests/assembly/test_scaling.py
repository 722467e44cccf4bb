"""The places of engines that are added to a run and removed from it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from agentrl.assembly.placed import PlacedCluster
from agentrl.assembly.scaling import EngineScaling
from agentrl.cluster.workers import EngineFactory
from agentrl.config import load_config
from agentrl.config.run_config import RunConfig
from agentrl.engines.router import Router
from agentrl.errors import ConfigError, EngineDeadError, EngineError
from agentrl.flow import run_virtual
from agentrl.testing import ScriptedEngine


class Mortal(ScriptedEngine):
    """An engine that does not start if its place is `bad`."""

    bad = False

    async def __aenter__(self) -> Self:
        if self.bad:
            raise EngineDeadError("no memory is left")
        return await super().__aenter__()

    def die(self) -> None:
        """Its process is gone."""
        self._closed = "its process is gone"

    async def probe(self) -> None:
        """Say whether it lives."""
        self._check_running()


@dataclass
class Places:
    """A cluster with room for so many more engines."""

    room: int
    taken: dict[int, Mortal] = field(default_factory=dict)
    bad: bool = False

    @asynccontextmanager
    async def another_engine(
        self, chosen: Any, model: Path, number: int
    ) -> AsyncIterator[EngineFactory]:
        if len(self.taken) == self.room:
            raise ConfigError("0 GPUs are free")

        def make() -> Mortal:
            engine = self.taken[number] = Mortal(lambda tokens: [1.0])
            engine.bad = self.bad
            return engine

        make()
        try:
            yield EngineFactory(make)
        finally:
            del self.taken[number]


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """That of any run."""
    path = tmp_path / "run.yaml"
    path.write_text("env: guess_number\nmodel: tiny\n")
    return load_config(path).config


def placed(config: RunConfig, cluster: Any, plan: Any = None) -> PlacedCluster:
    return PlacedCluster(config, cluster, plan)


def router_of(count: int) -> Router:
    engines = [Mortal(lambda tokens: [1.0]) for _ in range(count)]
    return Router(engines, factory=lambda number: Mortal(lambda tokens: [1.0]), lease=3.0)


async def ignore(number: int, why: EngineDeadError) -> None:
    raise AssertionError(f"engine {number} is lost: {why}")


def test_places_are_held_while_their_engines_serve_and_given_back(config: RunConfig) -> None:
    cluster = Places(room=2)

    async def main() -> None:
        async with EngineScaling(placed(config, cluster), Path()) as scaling:
            async with router_of(2) as router:
                scaling.begin(router)
                assert [await scaling.add(router, ignore) for _ in range(2)] == [2, 3]
                with pytest.raises(ConfigError, match="0 GPUs are free"):
                    await scaling.add(router, ignore)
                assert await scaling.remove(router) == 3
                assert list(cluster.taken) == [2]
                cluster.bad = True
                with pytest.raises(EngineError, match="no memory is left"):
                    await scaling.add(router, ignore)
                assert list(cluster.taken) == [2]
                cluster.bad = False
                assert await scaling.add(router, ignore) == 3
                # One that is planned makes room for another of its number.
                assert [await scaling.remove(router) for _ in range(3)] == [3, 2, 1]
                assert not cluster.taken
                assert await scaling.add(router, ignore) == 1
            assert list(cluster.taken) == [1]  # until its engine is closed, with the router
        assert not cluster.taken

    run_virtual(main)


def test_the_place_of_an_engine_that_is_lost_is_given_back_and_its_loss_is_told(
    config: RunConfig,
) -> None:
    cluster, lost = Places(room=1), []

    async def note(number: int, why: EngineDeadError) -> None:
        lost.append((number, str(why)))

    async def main() -> None:
        async with (
            EngineScaling(placed(config, cluster), Path()) as scaling,
            router_of(1) as router,
        ):
            scaling.begin(router)
            await scaling.add(router, note)
            cluster.bad = True
            cluster.taken[1].die()
            await asyncio.sleep(60)
            assert router.worker_count().count == 1
            assert not cluster.taken
            cluster.bad = False
            assert await scaling.add(router, ignore) == 1

    run_virtual(main)
    ((number, why),) = lost
    assert number == 1
    assert "no memory is left (3 times in a row)" in why


def test_no_engine_is_added_where_engines_and_trainer_take_turns(config: RunConfig) -> None:
    turns = SimpleNamespace(devices=SimpleNamespace(time_shared=True))

    async def main() -> None:
        async with (
            EngineScaling(placed(config, Places(room=1), turns), Path()) as scaling,
            router_of(2) as router,
        ):
            scaling.begin(router)
            with pytest.raises(EngineError, match=r"take turns on their devices.*disaggregated"):
                await scaling.add(router, ignore)
            assert await scaling.remove(router) == 1

    run_virtual(main)
