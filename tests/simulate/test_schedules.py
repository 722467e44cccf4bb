"""The production scheduler on thousands of random schedules: bounded, unbiased, nothing lost."""

import resource
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.flow import Retries
from agentrl.rollout.config import Deadlines, RolloutConfig
from agentrl.rollout.rule_registry import installed_rules
from agentrl.simulate.config import SimulatedEngineConfig, SimulatedEnvsConfig, SimulationConfig
from agentrl.simulate.env import EpisodePlan
from agentrl.simulate.latency import Constant, Lognormal, Normal, Pareto
from agentrl.simulate.world import Report, World
from tests.properties import examples

OTHER_RULES = sorted(installed_rules().keys() - {"deadline_first", "segment"})
PATIENT = Deadlines(reset=40, step=40, generate=10_000, episode=20_000, group=100_000, stall=50_000)


def random_world(seed: int, **changes: object) -> World:
    """A small run with everything drawn: bound, sizes, tails up to lognormal sigma 1.4, crashes,
    hangs, slow ones.
    """
    rng = Random(seed)
    steps_seconds = rng.choice(
        [
            Lognormal(median=1.0, sigma=rng.uniform(0.2, 1.4), cap=30),
            Pareto(minimum=0.3, alpha=rng.uniform(1.1, 3.0), cap=30),
            Normal(mean=2.0, sd=1.0, floor=0.1),
        ]
    )
    rollout = {
        "groups_per_step": rng.randint(1, 4),
        "group_size": rng.randint(1, 4),
        "max_staleness": rng.randint(0, 4),
        "budget": {"turns": 4},
        "max_live_episodes": rng.choice([2, 8, 64]),
        "min_live_episodes": 2,
        "max_failed_tasks": 0,
        "retries": Retries(environment=30, engine=30),
        "deadlines": PATIENT,
        **changes,
    }
    engine = SimulatedEngineConfig(
        slots=rng.choice([1, 4, 16]),
        seconds_per_token=0.1,
        slowdown=rng.choice([0.0, 1.0]),
        knee=4,
        answer_tokens=Lognormal(median=5, sigma=rng.choice([0.2, 0.6, 1.0, 1.4]), cap=60),
        kv_on_update=rng.choice(["keep", "recompute", "reuse"]),
    )
    env = SimulatedEnvsConfig(
        turns=Lognormal(median=2, sigma=0.4, cap=4),
        step_seconds=steps_seconds,
        crash=rng.choice([0.0, 0.1]),
        hung=rng.choice([0.0, 0.05]),
        slow_drip=rng.choice([0.0, 0.05]),
    )
    trainer = Lognormal(median=rng.choice([0.1, 3.0, 20.0]), sigma=0.3)
    simulation = SimulationConfig(engine=engine, env=env, train_seconds=trainer)
    update = rng.choice(["keep", "abort_resume", "drain"])
    config = RolloutConfig.model_validate(rollout)
    return World(config, simulation, steps=rng.randint(4, 8), seed=seed, weight_update=update)


def check(world: World, report: Report) -> None:
    """What must hold of every schedule."""
    config = world.rollout
    assert report.largest_staleness <= config.max_staleness
    tasks, episodes = report.task_fates, report.episode_fates
    assert tasks.settled
    assert episodes.settled
    assert tasks.trained == tasks.total == world.steps * config.groups_per_step, (
        "something was dropped"
    )
    assert episodes.trained == tasks.trained * config.group_size
    assert episodes.trained + episodes.failed == episodes.total
    assert 0.97 <= report.metrics["bias/seconds"] <= 1.03
    assert 0.97 <= report.metrics["bias/tokens"] <= 1.03
    assert report.leaked_envs == report.leaked_slots == report.leaked_requests == 0


@given(seed=st.integers(0, 2**40))
@examples(75)  # ten thousand below
def test_a_random_schedule_keeps_the_bound_and_drops_nothing(seed):
    world = random_world(seed)
    check(world, world.run())


def check_seeds(seeds: range) -> int:
    """Check the worlds of these seeds; how many there were."""
    for seed in seeds:
        world = random_world(seed)
        try:
            check(world, world.run())
        except Exception as error:
            raise AssertionError(f"random_world({seed}): {error}") from error
    return len(seeds)


@pytest.mark.long
def test_a_hundred_random_schedules_keep_the_bound_and_drop_nothing():
    assert check_seeds(range(100)) == 100


@pytest.mark.long
def test_ten_thousand_random_schedules_keep_the_bound_and_drop_nothing():
    parts = [range(start, start + 500) for start in range(0, 10_000, 500)]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        assert sum(pool.map(check_seeds, parts)) == 10_000


@pytest.mark.slow
@given(
    seed=st.integers(0, 2**40),
    rule=st.sampled_from(OTHER_RULES),
)
@examples(60)
def test_other_rules_lose_nothing_they_do_not_name(seed, rule):
    world = random_world(seed, staleness_rule=rule)
    report = world.run()
    assert report.task_fates.settled
    assert report.episode_fates.settled
    assert report.task_fates.trained == world.steps * world.rollout.groups_per_step
    assert report.task_fates.trained + report.task_fates.stale == report.task_fates.total
    assert world.rollout.rule.drops or not report.task_fates.stale
    assert not world.rollout.rule.bounded or report.largest_staleness <= world.rollout.max_staleness
    assert report.leaked_slots == report.leaked_requests == 0


def many_short_episodes(episodes: int, seed: int = 0) -> World:
    """Single-turn episodes with heavy tails, drawn from a population of 4,096."""
    rng, latency = Random(seed), Lognormal(median=0.5, sigma=1.0, cap=10)
    population = [
        EpisodePlan(0.0, (latency.sample(rng),), float(rng.random() < 0.5)) for _ in range(1 << 12)
    ]
    rollout = RolloutConfig(
        groups_per_step=64, max_staleness=1, max_live_episodes=1024, min_live_episodes=256
    )
    simulation = SimulationConfig(
        engine=SimulatedEngineConfig(
            slots=256, answer_tokens=Lognormal(median=64, sigma=0.6, cap=512)
        ),
        train_seconds=Constant(value=1.0),
    )
    steps = episodes // (rollout.groups_per_step * rollout.group_size)
    return World(
        rollout,
        simulation,
        steps,
        seed,
        plan_of=lambda task_seed, member: population[(task_seed + 7919 * member) % len(population)],
    )


@pytest.mark.slow
def test_the_same_seed_gives_the_same_events_and_the_same_everything():
    first, again, other = (many_short_episodes(1024, seed).run() for seed in (1, 1, 2))
    assert first.event_hash == again.event_hash != other.event_hash
    assert (first.seconds, first.tokens, first.timeline) == (
        again.seconds,
        again.tokens,
        again.timeline,
    )


@pytest.mark.long
def test_memory_is_flat_over_three_hundred_thousand_episodes(tmp_path):
    def peak_after(episodes: int, name: str) -> int:
        spans = SimulationConfig(
            episode_seconds=Lognormal(median=5.0, sigma=1.0, cap=100),
            train_seconds=Constant(value=1.0),
        )
        rollout = RolloutConfig(
            groups_per_step=32, max_staleness=1, max_live_episodes=2048, min_live_episodes=512
        )
        report = World(rollout, spans, episodes // 256, ledger=tmp_path / name).run()
        assert report.task_fates.trained == report.task_fates.total
        assert report.largest_staleness <= 1
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

    after_few = peak_after(30_000, "few")
    assert peak_after(300_000, "many") - after_few < 15, "MiB more for ten times the episodes"


def gauss(steps: int, **env: float) -> World:
    """Environments of ten turns, N(10, 5) seconds each, with an instant engine and a trainer of 30
    s a step.
    """
    rollout = RolloutConfig(
        groups_per_step=8,
        group_size=4,
        max_staleness=8,
        max_failed_tasks=0,
        retries=Retries(environment=8),
        deadlines=PATIENT,
    )
    simulation = SimulationConfig(
        engine=SimulatedEngineConfig(seconds_per_token=0, prefill_seconds_per_token=0),
        env=SimulatedEnvsConfig(
            turns=Constant(value=10), step_seconds=Normal(mean=10, sd=5, floor=0.1), **env
        ),
    )
    return World(rollout, simulation, steps)


@pytest.mark.parametrize(
    "steps", [pytest.param(10, marks=pytest.mark.slow), pytest.param(1000, marks=pytest.mark.long)]
)
def test_a_few_hung_and_slow_environments_never_stall_a_thousand_steps(steps):
    clean, troubled = gauss(steps).run(), gauss(steps, hung=0.001, fail_slow=0.01).run()
    assert troubled.steps == steps
    assert troubled.episode_fates.failed > 0.3 * steps
    assert clean.seconds / troubled.seconds >= 0.95
    assert troubled.largest_staleness <= 8
    assert troubled.leaked_envs == troubled.leaked_slots == 0


@pytest.mark.parametrize(
    ("max_staleness", "steps"),
    [
        pytest.param(1, 3, marks=pytest.mark.long),
        pytest.param(1, 24, marks=pytest.mark.long),
        pytest.param(2, 24, marks=pytest.mark.long),
    ],
)
def test_a_fifth_of_all_environments_failing_costs_little_and_leaks_nothing(max_staleness, steps):
    def long_decode(**env: float) -> World:
        rollout = RolloutConfig(
            groups_per_step=32,
            max_staleness=max_staleness,
            max_failed_tasks=0,
            retries=Retries(environment=12),
            deadlines=PATIENT.model_copy(update={"step": 10.0}),
            sampling={"max_tokens": 500},
        )
        simulation = SimulationConfig(
            engine=SimulatedEngineConfig(
                slots=64,
                slowdown=0.5,
                knee=32,
                answer_tokens=Lognormal(median=160, sigma=0.6, cap=500),
            ),
            env=SimulatedEnvsConfig(
                turns=Constant(value=16), step_seconds=Lognormal(median=1.0, sigma=0.5), **env
            ),
            train_seconds=Constant(value=170.0),
        )
        return World(rollout, simulation, steps)

    clean, troubled = long_decode().run(), long_decode(hung=0.1, crash=0.05, slow_drip=0.05).run()
    assert clean.seconds / troubled.seconds >= 0.85
    assert troubled.task_fates.trained == troubled.task_fates.total == steps * 32
    assert troubled.episode_fates.settled
    assert troubled.leaked_envs == troubled.leaked_slots == troubled.leaked_requests == 0


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [pytest.param(1.0, marks=pytest.mark.long), 1.4])
def test_the_slots_are_kept_full_under_heavy_tails(sigma):
    rollout = RolloutConfig(
        groups_per_step=512, group_size=8, deadlines=PATIENT, sampling={"max_tokens": 10_000}
    )
    lengths = Lognormal(median=100, sigma=sigma, cap=1000)
    engine = SimulatedEngineConfig(slots=16, seconds_per_token=0.01, answer_tokens=lengths)
    simulation = SimulationConfig(
        engine=engine,
        env=SimulatedEnvsConfig(turns=Constant(value=1)),
        train_seconds=Constant(value=0.0),
    )
    report = World(rollout, simulation, steps=1).run()
    lower_bound = report.tokens * engine.seconds_per_token / engine.slots
    assert lower_bound / report.seconds >= 0.97
    assert report.slot_utilisation >= 0.97
