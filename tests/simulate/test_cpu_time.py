"""The CPU time of controller and workers in simulations, and what follows of it at scale."""

import asyncio
from typing import Any

import pytest

from agentrl.flow import Flow, now, run_virtual
from agentrl.rollout.budget import Budget
from agentrl.rollout.config import RolloutConfig
from agentrl.simulate.config import (
    SimulatedCpuConfig,
    SimulatedEngineConfig,
    SimulatedEnvsConfig,
    SimulationConfig,
)
from agentrl.simulate.cores import Cores
from agentrl.simulate.latency import Constant
from agentrl.simulate.world import Report, World

close = pytest.approx
TURNS = 4


def simulated(cpu: dict[str, float], *, workers: int = 0, live: int = 64, **env: Any) -> Report:
    """Two steps of `live` episodes of four turns, on an engine that answers at once."""
    rollout = RolloutConfig(
        groups_per_step=live // 8,
        group_size=8,
        workers=workers,
        min_live_episodes=live,
        max_live_episodes=live,
        budget=Budget(turns=TURNS),
    )
    simulation = SimulationConfig(
        engine=SimulatedEngineConfig(seconds_per_token=0.0, answer_tokens=Constant(value=1)),
        env=SimulatedEnvsConfig(turns=Constant(value=TURNS), **env),
        cpu=SimulatedCpuConfig(**cpu),
        train_seconds=Constant(value=0.0),
    )
    return World(rollout, simulation, 2).run()


def test_cores_compute_in_order_of_arrival_and_each_one_piece_at_a_time() -> None:
    ended: dict[str, float] = {}

    async def main() -> float:
        cores = Cores(2)

        async def piece(name: str, seconds: float) -> None:
            await cores.compute(seconds)
            ended[name] = now()

        async with asyncio.TaskGroup() as group:
            for name, seconds in (("a", 3.0), ("b", 1.0), ("c", 1.0), ("d", 5.0), ("none", 0.0)):
                group.create_task(piece(name, seconds))
        await asyncio.sleep(3.0)
        return cores.load()

    assert run_virtual(main) == close(10 / (2 * 10))
    assert ended == close({"none": 0.0, "b": 1.0, "c": 2.0, "a": 3.0, "d": 7.0})


def test_a_core_keeps_what_its_caller_has_left() -> None:
    async def main() -> tuple[float, float]:
        core = Cores(1)
        async with Flow("test") as flow:
            flow.start(core.compute(4.0), name="left")
            await asyncio.sleep(1.0)
            flow.cancel()
        load = core.load()
        await core.compute(1.0)
        return load, now()

    assert run_virtual(main) == close((1.0, 5.0))


def test_turns_of_the_controller_take_one_core() -> None:
    report = simulated({"turn_seconds": 0.01, "controller_episode_seconds": 0.02})
    # 64 episodes of 4 turns: 64 * (4 * 0.01 + 0.02) seconds.
    assert report.step_seconds == close([3.84, 3.84])
    assert report.controller_load == close(1.0)
    assert report.worker_load == 0.0


def test_workers_share_the_turns_and_the_controller_keeps_the_episodes() -> None:
    cpu = {
        "turn_seconds": 0.01,
        "controller_episode_seconds": 0.002,
        "controller_turn_seconds": 0.0001,
        "batch_episode_seconds": 0.001,
    }
    report = simulated(cpu, workers=4)
    # A worker has 16 episodes: 0.64 s; before and after it the controller has a little to do.
    for seconds in report.step_seconds:
        assert 0.64 + 0.064 < seconds < 0.64 + 64 * 0.0035
    work = 2 * 64 * (0.002 + TURNS * 0.0001 + 0.001)
    assert report.controller_load * report.seconds == close(work)
    assert report.worker_load * report.seconds == close(2 * 0.64)


def test_environments_wait_for_their_cores() -> None:
    second = Constant(value=1.0)
    assert simulated({}, step_seconds=second).step_seconds == close([4.0, 4.0])
    few = simulated({}, cores=16, step_seconds=second)
    assert few.step_seconds == close([16.0, 16.0])
    assert few.env_core_load == close(1.0)


def test_cpu_times_of_zero_change_no_event() -> None:
    second = Constant(value=1.0)
    without = simulated({}, step_seconds=second)
    with_workers = simulated({}, workers=8, step_seconds=second)
    assert without.event_hash == with_workers.event_hash


def test_steps_that_compute_long_keep_cores_busy_and_short_ones_wait_for_workers() -> None:
    """A small row of the table of docs/simulator.md (`benchmarks/at_scale.py`): a turn costs a
    worker a millisecond, so it plays a thousand a second.
    """
    cpu = {"turn_seconds": 0.001, "controller_episode_seconds": 0.0003}
    busy = {
        (seconds, workers): simulated(
            cpu, workers=workers, live=256, cores=256, step_seconds=Constant(value=seconds)
        ).env_core_load
        for seconds, workers in ((1.0, 0), (1.0, 8), (0.1, 0), (0.1, 8))
    }
    assert busy[1.0, 0] > 0.75
    assert busy[1.0, 8] > 0.95
    assert busy[0.1, 0] < 0.45, "256 cores ask for 2,560 turns a second of one that plays 1,000"
    assert busy[0.1, 8] > 0.7
