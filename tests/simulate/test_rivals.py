"""The models of other schedulers in benchmarks/rivals.py: exact where that is known, and true to
what they model.
"""

import asyncio
import importlib.util
import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agentrl.flow import now, run_virtual
from agentrl.protocols import GenerateRequest
from agentrl.settings.sampling import SamplingParams
from agentrl.simulate.config import SimulatedEngineConfig
from agentrl.simulate.engine import SimulatedEngine
from agentrl.simulate.latency import Constant, Lognormal, Normal, Uniform


def load() -> ModuleType:
    """benchmarks/ is no package."""
    spec = importlib.util.spec_from_file_location(
        "rivals", Path(__file__).parents[2] / "benchmarks/rivals.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rivals"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


pytestmark = pytest.mark.long  # of a benchmark, and of nothing that is installed
rivals = load()
close = pytest.approx


def workload(**changes: Any) -> Any:
    """Two groups of two, one second per token."""
    made = rivals.Workload(
        "test", groups_per_step=2, group_size=2, steps=3, seconds_per_token=1.0, train_seconds=10.0
    )
    return replace(made, **changes)


BUSY = workload(
    steps=12,
    groups_per_step=4,
    group_size=4,
    num_turns=3,
    tokens=Lognormal(median=20, sigma=1.0, cap=200),
    env_seconds=Uniform(low=0, high=20),
    slots=8,
    slowdown=0.5,
    knee=4,
    train_seconds=100.0,
)


def every_rule(bound: int) -> dict[str, Any]:
    return {**rivals.rivals(bound), "ready queue": lambda w: rivals.ring(w, strict=False)}


def test_an_episode_is_a_function_of_seed_task_and_member() -> None:
    first = [[BUSY.turns(task, member) for member in range(4)] for task in range(50)]
    rivals._turns.cache_clear()
    again = [
        [BUSY.turns(task, member) for member in reversed(range(4))] for task in reversed(range(50))
    ]
    assert [group[::-1] for group in again[::-1]] == first
    assert len({turns for group in first for turns in group}) == 200
    assert replace(BUSY, seed=1).turns(0, 0) != first[0][0]
    assert replace(BUSY, steps=99, slots=1, train_seconds=1.0).turns(0, 0) == first[0][0]


def test_the_floor_obeys_the_law_of_the_simulated_engine() -> None:
    w = replace(BUSY, num_turns=4)
    floor = rivals.Floor(w)
    names = {}
    for task in range(30):
        names[episode := rivals.Episode(w.turns(task, 0))] = task
        floor.play(episode)
    modelled = {}
    for _ in range(30):
        ended = floor.next()
        modelled[names[ended]] = floor.now
    lengths: dict[str, int] = {}

    async def play(engine: SimulatedEngine, task: int) -> float:
        for turn, (tokens, env_seconds) in enumerate(w.turns(task, 0)):
            name = f"{task}/{turn}"
            lengths[name] = tokens
            await engine.generate(GenerateRequest(name, (1,), SamplingParams(max_tokens=1000)))
            await asyncio.sleep(env_seconds)
        return now()

    async def main() -> dict[int, float]:
        config = SimulatedEngineConfig(
            slots=w.slots, seconds_per_token=1.0, slowdown=w.slowdown, knee=w.knee
        )
        engine = SimulatedEngine(config, length_of=lambda request: lengths[request.id])
        async with engine, asyncio.TaskGroup() as tasks:
            started = {task: tasks.create_task(play(engine, task)) for task in range(30)}
        assert engine.slot_seconds == close(floor.slot_seconds)
        return {task: each.result() for task, each in started.items()}

    assert min(tokens for turns in names for tokens, _ in turns.turns) > 0
    assert run_virtual(main) == close(modelled)


def test_a_cancelled_episode_gives_its_slot_to_the_next_at_once() -> None:
    floor = rivals.Floor(workload(slots=1))
    first, waiting, last = (rivals.Episode(((10, 0.0),)) for _ in range(3))
    for episode in (first, waiting, last):
        floor.play(episode)
    floor.alarm(4.0, "cancel")
    assert floor.next() == "cancel"
    floor.cancel(waiting)
    floor.cancel(first)
    assert floor.next() is last
    assert (floor.now, floor.slot_seconds) == (close(14.0), close(14.0))
    assert floor.next() is None


def test_simple_cases_by_hand() -> None:
    w = workload(num_turns=2, tokens=Constant(value=5), env_seconds=Constant(value=3.0), slots=4)
    # Two turns of 5 + 3, then the trainer's 10.
    assert rivals.synchronous(w).seconds_per_step == close(26.0)
    assert rivals.lockstep(w).seconds_per_step == close(26.0)
    assert rivals.workers(w, 2).seconds_per_step == close(42.0)
    assert rivals.workers(w, 1).seconds_per_step == close(74.0)
    # Four environments at one worker: the first answer comes at 5, then it steps for 3 seconds
    # eight times.
    assert rivals.ring(w, 4).seconds_per_step == close(5 + 8 * 3 + 10)
    one_slot = replace(w, slots=1)
    assert rivals.synchronous(one_slot).seconds_per_step == close(4 * 2 * 5 + 3 + 10)
    assert rivals.synchronous(one_slot).slot_utilisation == close(40 / 53)
    # With one step of asynchrony the trainer and the engine, 16 s each, go on at once.
    ahead = replace(w, steps=30, train_seconds=16.0)
    for rule in (rivals.Gate, rivals.Drop, rivals.Wait):
        assert rivals.asynchronous(rule, 1)(ahead).seconds_per_step == close(16.0, rel=0.05)


def test_all_rules_are_synchronous_without_asynchrony() -> None:
    expected = rivals.synchronous(BUSY)
    for rule in (rivals.Gate, rivals.Drop, rivals.Wait, rivals.Drain):
        found = rivals.asynchronous(rule, 0)(BUSY)
        assert found.duration_ratio == close(expected.duration_ratio)  # its sum is in another order
        assert (
            replace(found, rule=expected.rule, duration_ratio=expected.duration_ratio) == expected
        )
    assert expected.largest_staleness == 0
    # A team per group, each environment once for each group: the same too.
    assert rivals.group_queue()(BUSY).seconds_per_step == close(expected.seconds_per_step)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_nobody_who_trains_on_all_tasks_beats_the_lower_bound(bound: int) -> None:
    for w in (BUSY, replace(BUSY, slots=1000, slowdown=0.0), replace(BUSY, train_seconds=1.0)):
        least = rivals.lower_bound(w)
        assert rivals.lower_bound(w, bound) >= least
        for rule in ("synchronous", "lockstep", "workers", "ring", "ready queue"):
            total = every_rule(bound)[rule](w).seconds_per_step * w.steps
            assert total >= rivals.lower_bound(w, 0)
        for name in ("wait", "drain"):
            assert every_rule(bound)[name](w).seconds_per_step * w.steps >= rivals.lower_bound(
                w, bound
            )


def test_the_lower_bound_is_reached_where_nothing_varies() -> None:
    w = workload(tokens=Constant(value=10), slots=4, steps=20)
    assert (
        rivals.lower_bound(w, 0)
        == close(rivals.synchronous(w).seconds_per_step * 20)
        == close(400.0)
    )
    assert (
        rivals.lower_bound(w)
        == close(rivals.asynchronous(rivals.Wait, 1)(w).seconds_per_step * 20)
        == close(210.0)
    )


@pytest.mark.parametrize("bound", [1, 2])
def test_who_keeps_the_bound_and_who_favours_short_episodes(bound: int) -> None:
    w = replace(
        workload(tokens=Lognormal(median=100, sigma=1.4), slots=16, steps=150, train_seconds=120.0),
        groups_per_step=4,
    )
    found = {name: rule(w) for name, rule in every_rule(bound).items()}
    for name in ("wait", "drain", "drop"):
        assert found[name].largest_staleness <= bound
    assert found["gate"].largest_staleness > bound
    assert found["drop"].discarded > 0.05
    assert found["drop"].duration_ratio < found["wait"].duration_ratio - 0.05
    for name in ("synchronous", "wait", "drain", "gate", "workers", "ring", "lockstep"):
        assert found[name].discarded == 0.0
    assert found["synchronous"].duration_ratio == close(found["wait"].duration_ratio, abs=0.02)
    assert found["wait"].seconds_per_step <= found["synchronous"].seconds_per_step
    assert found["gate"].seconds_per_step <= found["wait"].seconds_per_step


def test_a_hung_environment_stalls_all_but_those_that_drop_it() -> None:
    w = workload(env_seconds=Constant(value=1.0), hung=0.05, steps=40)
    stalled = {name: rule(w).stalled_after for name, rule in every_rule(1).items()}
    assert stalled.pop("drop") is None
    del stalled["group queue, redundant"]  # it may be lucky
    assert all(after is not None for after in stalled.values())


@pytest.mark.parametrize(
    ("queue", "gauss", "fail_slow", "thrown_away"),
    [
        ({}, 175, 678, 0.0),
        ({"extra_members": 1}, 161, 248, None),
        ({"extra_members": 1, "extra_groups": 4}, 154, 193, 0.21),
        ({"extra_members": 4, "extra_groups": 4}, 142, 149, 0.41),
        ({"ahead": 1}, 110, 351, None),
    ],
)
def test_the_group_queue_comes_near_the_figures_known_of_it(
    queue: dict[str, int], gauss: float, fail_slow: float, thrown_away: float | None
) -> None:
    for name, known, tolerance in (("gauss", gauss, 0.03), ("fail-slow", fail_slow, 0.2)):
        found = [
            rivals.group_queue(**queue)(replace(rivals.SETTINGS[name](seed), steps=25))
            for seed in range(2)
        ]
        assert statistics.fmean(result.seconds_per_step for result in found) == close(
            known, rel=tolerance
        )
        if name == "gauss" and thrown_away is not None:
            assert found[0].discarded == close(thrown_away, abs=0.06)


def test_the_asynchronous_rules_give_the_figures_they_were_fitted_to() -> None:
    workloads = [rivals.SETTINGS["lognormal-1.0 tight"](seed) for seed in range(3)]
    synchronous = statistics.fmean(rivals.synchronous(w).seconds_per_step for w in workloads)

    def speed_up(rule: Any, bound: int) -> float:
        found = [rivals.asynchronous(rule, bound)(w).seconds_per_step for w in workloads]
        return synchronous / statistics.fmean(found)

    known = {
        rivals.Gate: (2.4, 3.9, 4.7),
        rivals.Wait: (1.8, 2.7, 4.3),
        rivals.Drop: (2.1, 3.4, 4.3),
    }
    for rule, figures in known.items():
        for bound, figure in zip((1, 2, 4), figures, strict=True):
            assert speed_up(rule, bound) == close(figure, rel=0.12)
    assert speed_up(rivals.Drain, 4) < 1.35


def test_a_strict_ring_wastes_the_core_that_a_ready_queue_keeps_busy() -> None:
    sigma = math.sqrt(math.log(2))  # the coefficient of variation is 1, the mean 5 s
    w = rivals.Workload(
        "ring",
        steps=1,
        groups_per_step=100,
        group_size=1,
        num_turns=200,
        train_seconds=0.0,
        tokens=Lognormal(median=250 / math.sqrt(2), sigma=sigma),
        env_seconds=Constant(value=0.05),
    )
    busy = 100 * 200 * 0.05
    assert busy / rivals.ring(w, 100).seconds_per_step == close(0.20, abs=0.02)
    # Its last episodes play alone.
    assert busy / rivals.ring(w, 100, strict=False).seconds_per_step > 0.75


def test_lockstep_loses_more_the_more_turns_vary() -> None:
    def lost(sd: float) -> float:
        w = replace(
            rivals.SETTINGS["env-var-1"](0), env_seconds=Normal(mean=10, sd=sd, floor=0.1), steps=3
        )
        return float(rivals.lockstep(w).seconds_per_step / rivals.synchronous(w).seconds_per_step)

    assert 1.1 < lost(1.0) < lost(5.0) < lost(10.0)
    assert lost(10.0) > 1.8


@pytest.mark.parametrize("name", list(rivals.SETTINGS))
def test_every_rule_plays_every_setting(name: str) -> None:
    w = replace(rivals.SETTINGS[name](0), steps=2)
    for rule, play in every_rule(1).items():
        result = play(w)
        if name == "hung" and result.stalled_after is not None:
            continue
        assert result.stalled_after is None, rule
        assert 0 < result.seconds_per_step < math.inf
        assert result.episodes_per_second == close(
            w.groups_per_step * w.group_size / result.seconds_per_step
        )
        assert 0 <= result.discarded < 0.7
