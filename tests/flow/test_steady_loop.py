"""A loop whose clock leaves out its gaps: deadlines and leases are what they were before a pause of
the controller.
"""

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from itertools import count
from typing import Any, cast

import pytest

from agentrl.engines.router import Router
from agentrl.errors import EngineDeadError
from agentrl.flow import (
    SteadyLoop,
    busy_seconds,
    elapsed,
    expect_long_callback,
    freeze_gc,
    loop_metrics,
    now,
    run_steadily,
    steady_loop,
)
from agentrl.protocols import GenerateRequest
from agentrl.settings.sampling import SamplingParams
from agentrl.testing import ScriptedEngine


class Machine:
    """The machine's clock; a pause is over at once."""

    def __init__(self) -> None:
        self._paused = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._paused

    def pause(self, seconds: float) -> None:
        self._paused += seconds


def run(machine: Machine, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=partial(SteadyLoop, machine)) as runner:
        runner.run(main())


def test_a_loop_is_busy_while_callbacks_run_and_not_while_it_waits() -> None:
    machine = Machine()

    async def main() -> None:
        await asyncio.sleep(0)
        before = busy_seconds()
        machine.pause(1000)
        await asyncio.sleep(0.05)
        assert 1000 <= busy_seconds() - before < 1000.05

    run(machine, main)


def test_a_gap_is_not_counted_by_the_clock_but_measured_and_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine = Machine()

    async def main() -> None:
        await asyncio.sleep(0)
        began, measured = now(), elapsed()
        machine.pause(1000)
        await asyncio.sleep(0.01)
        assert now() - began < 500
        assert elapsed() - measured >= 1000
        assert 1000 <= loop_metrics()["loop/longest_gap_seconds"] < 1500
        assert loop_metrics()["loop/longest_gap_seconds"] < 500

    with caplog.at_level(logging.WARNING, "agentrl.flow"):
        run(machine, main)
    assert (
        sum("the event loop was blocked for 10" in record.message for record in caplog.records) == 1
    )


def test_what_blocks_the_loop_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steady_loop, "_REPORTED_SECONDS", 0.0)

    async def main() -> None:
        await asyncio.sleep(0)
        watch = cast(SteadyLoop, asyncio.get_running_loop())._gaps.watch
        for _ in range(6000):
            if watch._where:  # it has looked
                break
            time.sleep(0.01)  # noqa: ASYNC251
        time.sleep(steady_loop.GAP_SECONDS)  # noqa: ASYNC251
        await asyncio.sleep(0)

    with caplog.at_level(logging.WARNING, "agentrl.flow"):
        run(Machine(), main)
    assert any(
        "test_steady_loop.py" in record.message and "main" in record.message
        for record in caplog.records
    )


def test_what_computes_by_design_is_counted_apart_and_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine = Machine()

    async def main() -> None:
        await asyncio.sleep(0)
        expect_long_callback()
        machine.pause(1000)
        await asyncio.sleep(0)
        metrics = loop_metrics()
        assert metrics["loop/longest_engine_seconds"] >= 1000
        assert metrics["loop/longest_gap_seconds"] < 500

    with caplog.at_level(logging.WARNING, "agentrl.flow"):
        run(machine, main)
    assert not any("blocked for 10" in record.message for record in caplog.records)


def test_an_answer_that_came_in_a_gap_is_in_time() -> None:
    machine = Machine()

    async def main() -> None:
        answer = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.05, answer.set_result, "here")
        async with asyncio.timeout(60):
            machine.pause(600)
            assert await answer == "here"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await asyncio.Event().wait()

    run(machine, main)


class Probed(ScriptedEngine):
    """An engine that can be asked for a sign of life, and gives none from when it is dead."""

    dead = False
    asked: Callable[[], None] = staticmethod(lambda: None)
    """Called while it, and all engines that were asked before it, have not answered yet."""

    async def probe(self) -> None:
        self.asked()
        await asyncio.sleep(0.001)
        if self.dead:
            await asyncio.Event().wait()


def probed() -> Probed:
    return Probed(lambda tokens: [0.0, 1.0, 0.0], max_batch=4)


def test_no_engine_is_replaced_for_the_controllers_own_pause() -> None:
    machine, again = Machine(), list[int]()

    def replaced(number: int) -> Probed:
        again.append(number)
        return probed()

    async def main() -> None:
        engines, pauses, enough = [probed() for _ in range(64)], count(1), asyncio.Event()

        def pause() -> None:
            machine.pause(45.0)
            if next(pauses) == 2:
                enough.set()

        engines[-1].asked = pause
        async with Router(engines, factory=replaced, lease=3.0) as router:
            async with asyncio.timeout(300):
                await enough.wait()
            await asyncio.sleep(0.1)
            await router.generate(GenerateRequest("after", [1], SamplingParams(max_tokens=2)))

    run(machine, main)
    assert again == []


def test_an_engine_that_died_in_the_pause_is_replaced_after_it() -> None:
    machine, again = Machine(), list[int]()
    engines = [probed(), probed()]

    async def main() -> None:
        replaced = asyncio.Event()

        def factory(number: int) -> Probed:
            again.append(number)
            replaced.set()
            return probed()

        async with Router(engines, factory=factory, lease=1.5) as router:
            await asyncio.sleep(0.01)
            engines[1].dead = True
            machine.pause(20.0)
            async with asyncio.timeout(60):
                await replaced.wait()
            await router.generate(GenerateRequest("after", [1], SamplingParams(max_tokens=2)))

    run(machine, main)
    assert again == [1]
    with pytest.raises(EngineDeadError):
        asyncio.run(engines[1].generate(GenerateRequest("late", [1], SamplingParams(max_tokens=2))))


def test_what_lives_is_left_out_of_collections_of_garbage_until_the_loop_closes() -> None:
    async def is_spared() -> bool:
        lives: list[object] = []
        freeze_gc()
        # Which leaves out what is frozen.
        return not any(found is lives for found in gc.get_objects())

    gc.unfreeze()  # tests/conftest.py has frozen what was imported
    try:
        assert not asyncio.run(is_spared()), "another loop changes nothing"
        assert run_steadily(is_spared())
        assert gc.get_freeze_count() == 0
        gc.freeze()
        assert not run_steadily(is_spared()), "what others have frozen stays as it is"
        assert gc.get_freeze_count() > 0
    finally:
        gc.freeze()


def test_a_result_is_returned_without_being_formatted() -> None:
    formatted: list[object] = []

    class Large:
        def __repr__(self) -> str:
            formatted.append(self)  # an error would not be seen: `reprlib` catches it
            return "Large()"

    async def main() -> Large:
        return Large()

    assert isinstance(run_steadily(main()), Large)
    assert not formatted
