"""Live episodes fill all replicas of the engine within the first step."""

import pytest

from agentrl.rollout.config import RolloutConfig
from agentrl.simulate.config import SimulatedEngineConfig, SimulatedEnvsConfig, SimulationConfig
from agentrl.simulate.latency import NO_TIME, Constant, Latency, Lognormal
from agentrl.simulate.world import Report, World


def first_step(
    replicas: int, max_batch: int, groups: int, reset: Latency = NO_TIME, **bounds: int
) -> tuple[Report, int]:
    """A step of so many groups of eight episodes, each with one answer of 2.6 s, and the most
    requests that ran at once in it.
    """
    env = SimulatedEnvsConfig(turns=Constant(value=1), reset_seconds=reset)
    engine = SimulatedEngineConfig(slots=max_batch, answer_tokens=Constant(value=500))
    simulation = SimulationConfig(engine=engine, engines=replicas, env=env)
    rollout = RolloutConfig.model_validate({"groups_per_step": groups, **bounds})
    report = World(rollout, simulation, steps=1).run()
    return report, max(moment.running for moment in report.timeline)


@pytest.mark.parametrize(("replicas", "max_batch"), [(8, 128), (64, 16)])
def test_every_replica_is_full_within_the_first_step(replicas: int, max_batch: int) -> None:
    _, running = first_step(replicas, max_batch, groups=144)
    assert running == replicas * max_batch


def test_replicas_fill_within_a_step_where_two_thirds_of_an_episode_are_the_environments() -> None:
    reset = Lognormal(median=5.0, sigma=0.3, cap=20.0)
    report, running = first_step(8, 16, groups=80, reset=reset)
    assert running == 8 * 16
    assert report.metrics["live_episodes/limit"] <= 8 * 8 * 16


def test_the_bounds_of_the_settings_win() -> None:
    _, most = first_step(8, 32, groups=16, max_live_episodes=64)
    assert most == 64
    _, least = first_step(8, 32, groups=4, min_live_episodes=16, max_live_episodes=16)
    assert least == 16


@pytest.mark.parametrize(
    ("settings", "places", "bounds"),
    [
        ({}, 0, (128, 1024)),
        ({}, 128, (128, 1024)),
        ({}, 64 * 256, (16384, 131072)),
        ({"max_live_episodes": 500}, 1024, (500, 500)),
        ({"min_live_episodes": 10}, 1024, (10, 80)),
        ({"min_live_episodes": 10, "max_live_episodes": 20}, 1024, (10, 20)),
    ],
)
def test_live_episodes_start_from_what_all_engines_serve_at_once(
    settings: dict[str, int], places: int, bounds: tuple[int, int]
) -> None:
    config = RolloutConfig.model_validate(settings)
    assert config.live_episodes(places) == bounds
    assert config.with_places(places).live_episodes() == bounds
