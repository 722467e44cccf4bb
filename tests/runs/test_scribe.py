"""The process that records the episodes of rollout workers, and what happens when it dies."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from agentrl.runs.scribe import Scribe
from tests.processes import PATIENCE_SECONDS


def place() -> tuple[int, int]:
    """The process that this runs in, and how much sooner the kernel kills it."""
    return os.getpid(), int(Path("/proc/self/oom_score_adj").read_text())


def die_elsewhere(controller: int) -> str:
    if os.getpid() != controller:
        os.kill(os.getpid(), signal.SIGKILL)
    return "recorded"


def refuse(why: str) -> None:
    raise OSError(why)


async def begun(scribe: Scribe) -> tuple[int, int]:
    """`place` in the scribe's own process."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (found := await scribe.call(place))[0] == os.getpid():  # noqa: ASYNC110  nothing signals it
            await asyncio.sleep(0.02)
    return found


def test_a_scribe_works_in_a_process_of_its_own_and_its_death_loses_no_record(caplog):
    async def main() -> None:
        scribe = Scribe()
        assert await scribe.call(place) == place()
        async with scribe.in_own_process(True):
            process, adjustment = await begun(scribe)
            assert adjustment >= place()[1]
            with pytest.raises(OSError, match="the disk is full"):
                await scribe.call(refuse, "the disk is full")
            assert (await scribe.call(place))[0] == process
            assert await scribe.call(die_elsewhere, os.getpid()) == "recorded"
            assert "the controller records the episodes itself from now on" in caplog.text
            assert await scribe.call(place) == place()
        async with scribe.in_own_process(False):
            assert await scribe.call(place) == place()

    asyncio.run(main())


def test_a_scribe_that_is_still_starting_ends_with_its_block():
    async def main() -> None:
        scribe = Scribe()
        async with scribe.in_own_process(True):
            await asyncio.sleep(0)
        assert await scribe.call(place) == place()

    asyncio.run(main())
