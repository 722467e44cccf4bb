"""Notices are shown while they hold, and logged when they hold for long."""

import asyncio
import io
import logging

import pytest
from rich.console import Console

from agentrl.flow import run_virtual, wait_reasons, waiting_for
from agentrl.observe.progress import ProgressDisplay

METRICS = {
    "seconds": 2.0,
    "reward": 0.5,
    "success": 0.5,
    "turns": 3.0,
    "tokens_per_second": 100.0,
    "staleness/mean": 0.0,
    "staleness/max": 0.0,
}


async def wait(text: str, seconds: float, pause: float = 0.0, times: int = 1) -> None:
    for _ in range(times):
        with waiting_for(text):
            await asyncio.sleep(seconds)
        await asyncio.sleep(pause)


def test_a_notice_counts_those_who_wait_and_ends_with_the_last() -> None:
    async def main() -> list[list[str]]:
        seen = []
        async with asyncio.TaskGroup() as group:
            group.create_task(wait("the server is full", 2))
            group.create_task(wait("the server is full", 4))
            for _ in range(3):
                await asyncio.sleep(1.5)
                seen.append([str(each) for each in wait_reasons()])
        return seen

    assert run_virtual(main) == [
        ["the server is full: 2 episodes wait"],
        ["the server is full: 1 episode waits"],
        [],
    ]


def test_what_is_waited_for_again_and_again_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        await wait("a long wait", 1.0, pause=0.5, times=40)
        await wait("short waits", 1.0, pause=60.0, times=20)

    with caplog.at_level(logging.WARNING):
        run_virtual(main)
    (record,) = caplog.records
    assert record.message == "a long wait: 1 episode waits, for 10 s so far"


def test_the_display_says_what_is_waited_for() -> None:
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=True, width=100)

    async def main() -> None:
        with (
            ProgressDisplay(console, 3) as display,
            waiting_for("all servers are full (http://games:8800)"),
        ):
            display.step(0, METRICS)

    asyncio.run(main())
    assert "waiting: all servers are full (http://games:8800): 1 episode waits" in drawn.getvalue()
