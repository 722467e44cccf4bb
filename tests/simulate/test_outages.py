"""Outages of the environments' server, and crashes of all episodes at once: runs go on, and nothing
is dropped.
"""

import logging

import pytest

from agentrl.errors import RetriesExhaustedError
from agentrl.rollout.config import RolloutConfig
from agentrl.simulate.config import SimulatedEnvsConfig, SimulationConfig
from agentrl.simulate.latency import Constant, Uniform
from agentrl.simulate.world import Report, World
from tests.tiers import evenly_crossed

STEPS, GROUPS = 8, 8


def run(bound: int, outages: list[tuple[float, float]], **deadlines: float) -> Report:
    """Episodes of some 50 s, for some ten minutes. An outage of 0 s crashes all live episodes."""
    rollout = RolloutConfig.model_validate(
        {
            "groups_per_step": GROUPS,
            "group_size": 4,
            "max_staleness": bound,
            "max_failed_tasks": 0,
            "max_live_episodes": 128,
            "deadlines": deadlines,
        }
    )
    env = SimulatedEnvsConfig.model_validate(
        {
            "step_seconds": Uniform(low=2, high=10),
            "outages": [{"at": at, "seconds": long} for at, long in outages],
        }
    )
    simulation = SimulationConfig(env=env, train_seconds=Constant(value=20.0))
    return World(rollout, simulation, STEPS).run()


@pytest.mark.parametrize(("seconds", "bound"), evenly_crossed(4, [0, 1, 5, 20, 120], [0, 1, 4]))
def test_a_run_outlives_its_server_s_restarts_and_drops_nothing(seconds: float, bound: int) -> None:
    report = run(bound, [(30.0 + (150 + seconds) * n, seconds) for n in range(4)])
    assert report.task_fates.trained >= STEPS * GROUPS
    assert report.task_fates.failed == report.task_fates.stale == 0
    assert report.largest_staleness <= bound
    assert report.episode_fates.failed > 0, "no episode was hit"
    assert (report.leaked_envs, report.leaked_slots) == (0, 0)


def test_the_time_of_an_outage_is_in_no_deadline_of_a_group(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        report = run(0, [(30.0, 500.0)], group=200.0)
    assert report.task_fates.failed == 0
    assert report.seconds > 530
    (record,) = [
        record for record in caplog.records if "episodes wait for up to 600 s" in record.message
    ]
    assert "cannot be reached" in record.message


def test_a_server_that_does_not_come_back_ends_the_run_and_says_why() -> None:
    with pytest.raises(RetriesExhaustedError, match="the simulated server cannot be reached"):
        run(0, [(30.0, 1e6)])


def test_without_patience_an_outage_spends_the_retries() -> None:
    with pytest.raises(RetriesExhaustedError):
        run(0, [(30.0, 120.0)], outage=0.0)
