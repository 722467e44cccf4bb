"""Live episodes follow the KV caches of the engines while answers grow longer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from agentrl.protocols import EngineStats, GenerateRequest
from agentrl.rollout.config import RolloutConfig
from agentrl.simulate import world
from agentrl.simulate.config import SimulatedEngineConfig, SimulatedEnvsConfig, SimulationConfig
from agentrl.simulate.engine import SimulatedEngine
from agentrl.simulate.latency import Constant, Lognormal
from agentrl.simulate.world import Report, World


def growing_answers() -> Callable[[GenerateRequest], int]:
    """Answers that become twice as long within about two steps."""
    asked = 0

    def length_of(request: GenerateRequest) -> int:
        nonlocal asked
        asked += 1
        mean = 60 + asked // 25
        return mean // 2 + request.seed % mean

    return length_of


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch, *, tells: bool) -> Iterator[list[SimulatedEngine]]:
    """The engines that are made inside the block. `tells`: what their KV caches hold."""
    engines: list[SimulatedEngine] = []

    class Watched(SimulatedEngine):
        def __init__(self, *settings: object) -> None:
            super().__init__(*settings)  # type: ignore[arg-type]
            engines.append(self)

        def stats(self) -> EngineStats:
            stats = super().stats()
            return stats if tells else replace(stats, kv_tokens=0)

    with monkeypatch.context() as patched:
        patched.setattr(world, "SimulatedEngine", Watched)
        yield engines


def play(monkeypatch: pytest.MonkeyPatch, *, tells: bool) -> tuple[Report, list[EngineStats]]:
    """Three steps of episodes of some ten turns, on two engines whose KV caches hold the contexts
    of about 35 at a time.
    """
    engine = SimulatedEngineConfig(
        slots=128, kv_tokens=50_000, max_context=16_384, prefill_seconds_per_token=0.0005
    )
    env = SimulatedEnvsConfig(
        turns=Lognormal(median=10, sigma=0.5, cap=40),
        step_seconds=Lognormal(median=3, sigma=0.8, cap=20),
    )
    simulation = SimulationConfig(
        engine=engine,
        engines=2,
        env=env,
        prompt_tokens=800,
        observation_tokens=200,
        train_seconds=Constant(value=20),
    )
    rollout = RolloutConfig.model_validate(
        {
            "groups_per_step": 8,
            "max_staleness": 1,
            "budget": {"turns": 64},
            "sampling": {"max_tokens": 4096},
        }
    )
    with watched(monkeypatch, tells=tells) as engines:
        report = World(rollout, simulation, steps=3, length_of=growing_answers()).run()
    return report, [engine.stats() for engine in engines]


def test_no_context_is_computed_twice_though_answers_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    report, stats = play(monkeypatch, tells=True)
    _, thrashing = play(monkeypatch, tells=False)
    preempted = sum(one.preemptions for one in stats)
    assert 10 * preempted < sum(one.preemptions for one in thrashing)
    computed = sum(one.prefilled_tokens for one in stats)
    assert computed < sum(one.prefilled_tokens for one in thrashing) / 3
    # A few of the youngest made room, and were played again.
    fates = report.episode_fates
    assert (fates.trained, fates.open) == (3 * 8 * 8, 0)
    assert fates.cancelled < fates.trained / 4
    assert (report.leaked_slots, report.leaked_requests, report.leaked_envs) == (0, 0, 0)
    assert report.largest_staleness <= 1
