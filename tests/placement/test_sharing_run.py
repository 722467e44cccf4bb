"""How a run begins and goes on where engine and trainer take turns on their devices."""

from types import SimpleNamespace
from typing import Any, Self, cast

import pytest

from agentrl.assembly import PlacedCluster
from agentrl.assembly import device_sharing as sharing
from agentrl.engines.router import Router
from agentrl.errors import TimeShareError
from agentrl.flow import run_virtual
from agentrl.placement.time_share import NoSharing
from agentrl.testing import ScriptedEngine


class Sleepy(ScriptedEngine):
    """An engine that says when it sleeps and wakes."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(lambda tokens: [1.0])
        self.log = log

    async def sleep(self) -> None:
        self.log.append("engine sleeps")

    async def wake(self) -> None:
        self.log.append("engine wakes")


class SleepyTrainer:
    """A trainer that does."""

    def __init__(self, log: list[str], free: int) -> None:
        self.log = log
        self._free = free

    async def __aenter__(self) -> Self:
        self.log.append("trainer begins")
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.log.append("trainer ends")

    async def sleep(self) -> None:
        self.log.append("trainer sleeps")

    async def wake(self) -> None:
        self.log.append("trainer wakes")

    async def free(self) -> int:
        return self._free

    def take_turns(self, turn: Any) -> None:
        self.log.append("trainer takes turns")


def placed(time_shared: bool) -> PlacedCluster:
    """A plan of two roles of 100 and 200 bytes."""
    awake = {"engine": SimpleNamespace(to_wake=100), "trainer": SimpleNamespace(to_wake=200)}
    plan = SimpleNamespace(
        devices=SimpleNamespace(time_shared=time_shared), loads=(SimpleNamespace(awake=awake),)
    )
    config = SimpleNamespace(placement=SimpleNamespace(switch_seconds=60.0))
    return PlacedCluster(cast(Any, config), cast(Any, None), cast(Any, plan))


def test_where_there_is_room_for_one_only_one_is_ever_awake() -> None:
    log: list[str] = []

    async def main() -> None:
        trainer = cast(Any, SleepyTrainer(log, 250))
        async with (
            Router([Sleepy(log)]) as engine,
            sharing(placed(time_shared=True), [engine], [trainer]) as share,
        ):
            log.append("generating")
            async with share.training():
                log.append("training")
            log.append("generating")

    run_virtual(main)
    to_training, to_generating = (
        ["engine sleeps", "trainer wakes"],
        ["trainer sleeps", "engine wakes"],
    )
    assert log == [
        *("trainer takes turns", "engine sleeps", "trainer begins", "trainer sleeps"),
        *("engine wakes", "generating"),
        *(*to_training, "training", *to_generating, "generating", "trainer ends"),
    ]


def test_what_does_not_fit_does_not_wake() -> None:
    async def main() -> None:
        trainer = cast(Any, SleepyTrainer([], 150))
        async with (
            Router([Sleepy([])]) as engine,
            sharing(placed(time_shared=True), [engine], [trainer]) as share,
        ):
            await share.training().__aenter__()

    with pytest.raises(TimeShareError, match=r"the trainer needs .* to wake"):
        run_virtual(main)


def test_where_there_is_room_for_both_nobody_sleeps() -> None:
    log: list[str] = []

    async def main() -> None:
        trainer = cast(Any, SleepyTrainer(log, 250))
        async with (
            Router([Sleepy(log)]) as engine,
            sharing(placed(time_shared=False), [engine], [trainer]) as share,
        ):
            assert isinstance(share, NoSharing)
            async with share.training():
                log.append("training")

    run_virtual(main)
    assert log == ["trainer begins", "training", "trainer ends"]
