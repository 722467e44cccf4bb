"""What a run that goes on says of itself: its workers, and what waits for what."""

import asyncio
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.cluster.worker_registry import WorkerCount, register_workers
from agentrl.flow import Flow, deadline, waiting_for
from agentrl.observe.live_status import (
    FILE,
    LiveState,
    LiveStatus,
    read_live_state,
    write_live_state,
)
from agentrl.rollout.accounts import OpenGroup, SchedulerStatus
from tests.processes import PATIENCE_SECONDS

PLAYED = SchedulerStatus(
    7, 8, 12, 64, {"environment": 3}, [OpenGroup("train-000003", "lake", 4.5)], 2
)


async def said(run: Path, holds: Callable[[LiveState], bool]) -> LiveState:
    """The first state for which this holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (state := read_live_state(run)) is None or not holds(state):  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # another thread writes it
    return state


def test_a_live_run_says_who_is_alive_and_what_waits_for_what(tmp_path: Path) -> None:
    async def waiting(released: asyncio.Event) -> None:
        with deadline("environment", "episode", 600), deadline("engine", "generate", 60):
            await released.wait()

    async def main() -> None:
        released = asyncio.Event()
        with (
            register_workers(lambda: WorkerCount("oracle", 1, 2, 3)),
            LiveStatus(tmp_path, every=0.01) as live,
        ):
            starting = await said(tmp_path, lambda state: True)
            assert (starting.pid, starting.waits, starting.underway) == (os.getpid(), (), None)
            assert WorkerCount("oracle", 1, 2, 3) in starting.workers
            live.begin_phase()
            live.watch(lambda: PLAYED)
            async with Flow("test") as flow:
                for number in range(3):
                    flow.start(waiting(released), name=str(number))
                with waiting_for("all servers are full"):
                    state = await said(
                        tmp_path,
                        lambda state: bool(state.waits and state.notices and state.underway),
                    )
                released.set()
            [wait] = state.waits  # and not the episodes, inside of which the calls wait
            assert (wait.layer, wait.phase, wait.count) == ("engine", "generate", 3)
            assert state.notices == ("all servers are full: 1 episode waits",)
            assert state.underway == PLAYED
            later = await said(tmp_path, lambda state: not state.waits)
            assert later.at >= state.at

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == []


def test_a_run_goes_on_when_its_state_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), LiveStatus(tmp_path / "missing", every=0.01) as live:
        assert live._thread.join(PATIENCE_SECONDS)
    assert "live.json cannot be written" in caplog.text


@pytest.mark.parametrize(
    "text", ["", "[1]", '{"pid": 1', '{"pid": "x", "at": 0}', '{"pid": 1, "at": 0, "workers": [3]}']
)
def test_a_state_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    assert read_live_state(tmp_path) is None
    (tmp_path / FILE).write_text(text)
    assert read_live_state(tmp_path) is None
    write_live_state(tmp_path / FILE, LiveState(1, 2.0, underway=PLAYED))
    assert read_live_state(tmp_path) == LiveState(1, 2.0, underway=PLAYED)
    assert json.loads((tmp_path / FILE).read_text())["underway"]["longest"] == [
        ["train-000003", "lake", 4.5]
    ]
