"""The process that records the episodes of rollout workers, and what happens when it dies."""

import asyncio
import os
import pickle
import signal
from pathlib import Path

import pytest
from pyarrow.parquet import read_table

from agentrl.observe.trajectories import episodes_of_step, write_trajectories
from agentrl.runs.recorder import metrics_of_step
from agentrl.runs.scribe import Scribe
from agentrl.tokens.arrays import floats, ints
from agentrl.tokens.sealed_turns import SealedTurns
from agentrl.trajectory import (
    Completion,
    Group,
    Message,
    Score,
    Task,
    Terminated,
    Trajectory,
    Turn,
)
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


def played() -> list[Group]:
    """Two groups, as they arrive from rollout workers."""
    groups = []
    for number in range(2):
        task = Task("room", number, {}, f"train-{number}")
        answer = Completion(ints((5, 6)), floats((-1, -2)), ints((0, 0)), "stop")
        turn = Turn(ints((1, 2)), answer, 1.0, {"seen": "a key"})
        said = (Message("user", "Look."), Message("assistant", "a key"))
        one = Trajectory(f"{task.id}/0/0", task, (turn,) * 3, Terminated(), said)
        arrived = pickle.loads(pickle.dumps(one.sealed()))
        groups.append(Group(task, (arrived,), (Score(3.0, {"environment": 3.0}),)))
    return groups


def is_open(group: Group) -> bool:
    turns = group.trajectories[0].turns
    assert isinstance(turns, SealedTurns)
    return "opened" in vars(turns.seal)


def test_a_scribe_writes_and_measures_what_the_controller_would(tmp_path):
    async def main() -> None:
        scribe = Scribe()
        groups = played()
        async with scribe.in_own_process(True):
            await begun(scribe)
            there = tmp_path / "there" / "trajectories" / "step.parquet"
            await scribe.call(write_trajectories, there, episodes_of_step(groups))
            measured = await scribe.call(metrics_of_step, groups, 0, 0, ["room"])
        assert not any(map(is_open, groups))
        here = tmp_path / "here" / "trajectories" / "step.parquet"
        write_trajectories(here, episodes_of_step(groups))
        assert read_table(there) == read_table(here)
        assert repr(measured) == repr(metrics_of_step(groups, 0, 0, ["room"]))

    asyncio.run(main())


def test_a_scribe_that_is_still_starting_ends_with_its_block():
    async def main() -> None:
        scribe = Scribe()
        async with scribe.in_own_process(True):
            await asyncio.sleep(0)
        assert await scribe.call(place) == place()

    asyncio.run(main())
