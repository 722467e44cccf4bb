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

    async def wake_weights(self) -> None:
        self.log.append("engine wakes its weights")

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

    async def free_step_memory(self) -> None:
        self.log.append("trainer frees memory")

    async def free(self) -> int:
        return self._free

    def take_turns(self, turn: Any) -> None:
        self.log.append("trainer takes turns")


def placed(time_shared: bool, *, tight: Any = None, update: str = "keep") -> PlacedCluster:
    """A plan of two roles of 100 and 200 bytes. `tight`: the load of a device on which the engine's
    weights have no room beside the trainer.
    """
    awake = {
        "engine": SimpleNamespace(to_wake=100, parts={"weights": 40}),
        "trainer": SimpleNamespace(to_wake=200),
    }
    plan = SimpleNamespace(
        devices=SimpleNamespace(time_shared=time_shared),
        loads=(SimpleNamespace(awake=awake),),
        tight=tight,
    )
    config = SimpleNamespace(
        placement=SimpleNamespace(switch_seconds=60.0), weights=SimpleNamespace(update=update)
    )
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


@pytest.mark.parametrize(
    ("tight", "update", "why_not"),
    [
        (None, "keep", None),
        (
            SimpleNamespace(device=3, transfer=81 << 30, limit=77 << 30),
            "keep",
            "with the engine's weights beside it, device 3 would hold 81.0 GiB of 77.0 usable",
        ),
        (None, "drain", "the turns that weights.update=drain waits for"),
    ],
    ids=["room", "no room", "drain"],
)
def test_the_order_of_an_update_follows_from_the_plan_and_the_log_says_why(
    tight: Any, update: str, why_not: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    log: list[str] = []

    async def main() -> None:
        trainer = cast(Any, SleepyTrainer(log, 250))
        async with (
            Router([Sleepy(log)]) as engine,
            sharing(placed(time_shared=True, tight=tight, update=update), [engine], [trainer]) as s,
        ):
            log.clear()
            async with s.training(), s.updating():
                log.append("new weights")

    run_virtual(main)
    begin, wakes = ["engine sleeps", "trainer wakes"], ["trainer sleeps", "engine wakes"]
    beside = ["trainer frees memory", "engine wakes its weights"]
    if why_not is None:
        assert log == [*begin, *beside, "new weights", *wakes, "trainer ends"]
        assert not caplog.records
    else:
        assert log == [*begin, *wakes, "new weights", "trainer ends"]
        assert why_not in caplog.text


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
