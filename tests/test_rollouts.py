"""The scheduler, whole, under the virtual clock: bounds, failures, hangs, cancellation, the ledger."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import ConfigError, RetriesExhaustedError, RewardError
from agentrl.flow import EventLog, now, run_virtual
from agentrl.rollout.env_host import Deadlines, EnvHost
from agentrl.rollout.episode import EnginePolicy, Player, Sampling
from agentrl.rollout.ledger import Ledger
from agentrl.rollout.renderer import TemplateRenderer
from agentrl.rollout.scheduler import RolloutConfig, Rollouts, staleness
from agentrl.rollout.tasks import SeededTasks
from agentrl.testing import ScriptedEngine
from agentrl.testing.tokenizer import ByteTokenizer
from agentrl.trajectory import Group, Score, Terminated, Trajectory

DEADLINES = Deadlines(reset=50, step=50, generate=1000, reward=50, episode=5000)


class SlowEnv:
    """Three to six turns of heavy-tailed length; `trouble(seed, attempts so far)` says what goes wrong."""

    trouble: Callable[[int, Counter], str] = staticmethod(lambda seed, attempts: "")
    attempts: ClassVar[Counter] = Counter()

    async def reset(self, *, seed, options):
        self.attempts[seed] += 1
        self.rng = random.Random(f"{seed}/{self.attempts[seed]}")
        self.left = self.rng.randint(3, 6)
        self.bad = self.trouble(seed, self.attempts)
        return "begin", {}

    async def step(self, action):
        assert action == "go"
        await asyncio.sleep(min(self.rng.lognormvariate(0, 1.0), 40))
        if self.bad == "hang":
            await asyncio.Event().wait()
        if self.bad == "crash":
            raise KeyError("the lake is gone")
        self.left -= 1
        return "on", 0.5, self.left == 0, False, {}

    async def close(self):
        pass


class Sum:
    """A reward that may break."""

    def __init__(self, fails: Callable[[Trajectory], bool] = lambda trajectory: False) -> None:
        self.fails = fails

    async def score(self, trajectory):
        if self.fails(trajectory):
            raise RewardError("the judge is down")
        return Score(trajectory.env_return, {"env": trajectory.env_return})


@dataclass
class World:
    """A run without a trainer: what it trained on, and how it ended."""

    config: RolloutConfig
    steps: int
    env: type = SlowEnv
    reward: Sum = field(default_factory=Sum)
    seed: int = 0
    engine: ScriptedEngine | None = None
    train_seconds: float = 5.0
    ledger: Ledger = field(default_factory=lambda: Ledger(":memory:"))
    batches: list[list[Group]] = field(default_factory=list)
    events: EventLog = field(default_factory=EventLog)
    seconds: float = 0.0

    def run(self) -> "World":
        SlowEnv.attempts.clear()
        run_virtual(self._main)
        return self

    async def _main(self) -> None:
        config, renderer = self.config, TemplateRenderer(ByteTokenizer())
        engine = self.engine or ScriptedEngine.replying(
            lambda request: b"go", max_batch=64, seconds_per_token=lambda request: 0.02
        )
        host = EnvHost({"slow": self.env}, config.deadlines)
        policy = EnginePolicy(engine, Sampling(), renderer.stop_token_ids, config.deadlines.generate)
        player = Player(policy, renderer, host, config.max_turns, config.deadlines.episode)
        rollouts = Rollouts(
            config,
            tasks=SeededTasks("slow", self.seed),
            player=player,
            reward=self.reward,
            ledger=self.ledger,
            seed=self.seed,
            groups=self.steps * config.groups_per_step,
            events=self.events,
        )
        async with engine, rollouts:
            for step in range(self.steps):
                self.batches.append(await rollouts.next_batch())
                await asyncio.sleep(self.train_seconds)
                await engine.update_weights({}, step + 1)
                rollouts.weights_live(step + 1)
        await host.close()
        self.seconds = now()


def config(**settings) -> RolloutConfig:
    return RolloutConfig(**{"groups_per_step": 4, "group_size": 3, "deadlines": DEADLINES, **settings})


@given(max_staleness=st.sampled_from([0, 1, 2, 4]), seed=st.integers(0, 10**6))
@settings(max_examples=12, deadline=None)
def test_staleness_never_exceeds_the_bound_nothing_is_dropped_and_all_fates_are_known(max_staleness, seed):
    world = World(config(max_staleness=max_staleness), steps=10, seed=seed).run()
    ages = [staleness(group, step) for step, batch in enumerate(world.batches) for group in batch]
    assert max(ages) <= max_staleness
    assert world.ledger.trained_tasks() == [f"train-{i:06d}" for i in range(40)]
    assert world.ledger.task_fates().settled
    assert world.ledger.episode_fates().settled
    assert world.ledger.episode_fates().trained == 120


def test_asynchrony_is_faster_and_older_and_synchrony_is_exact():
    runs = {k: World(config(max_staleness=k), steps=20).run() for k in (0, 1, 4)}
    ages = {
        k: fmean(staleness(group, step) for step, batch in enumerate(world.batches) for group in batch)
        for k, world in runs.items()
    }
    assert ages[0] == 0
    assert ages[0] < ages[1] < ages[4]
    assert runs[0].seconds > runs[1].seconds > runs[4].seconds


def test_the_same_seed_gives_the_same_events_and_another_seed_others():
    digests = [World(config(max_staleness=2), steps=8, seed=seed).run().events.digest() for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]


def crash_once(seed, attempts):
    return "crash" if attempts[seed] == 1 else ""


def test_a_crash_is_played_again_and_never_becomes_a_reward():
    class Env(SlowEnv):
        trouble = staticmethod(crash_once)

    world = World(config(), steps=5, env=Env).run()
    fates = world.ledger.episode_fates()
    assert (fates.trained, fates.failed) == (60, 20)
    assert world.ledger.task_fates().trained == 20
    assert all(isinstance(t.status, Terminated) for b in world.batches for g in b for t in g.trajectories)
    why, count = world.ledger.why_failed()[0]
    assert count == 20
    assert "KeyError: 'the lake is gone'" in why
    assert "test_rollouts.py" in why
    assert "in step" in why


def test_a_hung_env_costs_one_slot_for_one_deadline():
    class Env(SlowEnv):
        trouble = staticmethod(lambda seed, attempts: "hang" if sum(attempts.values()) == 5 else "")

    clean, hung = (World(config(), steps=6, env=env).run() for env in (SlowEnv, Env))
    assert hung.ledger.episode_fates().failed == 1
    assert hung.ledger.task_fates().trained == 24
    assert hung.seconds <= clean.seconds + DEADLINES.step + 100
    assert "did not answer within its deadline of 50 s" in hung.ledger.why_failed()[0][0]


def test_a_task_that_always_fails_is_replaced_and_counted():
    doomed = {SeededTasks("slow", 0).task(index).seed for index in (2, 7)}

    class Env(SlowEnv):
        trouble = staticmethod(lambda seed, attempts: "crash" if seed in doomed else "")

    world = World(config(retries=1, max_staleness=1), steps=5, env=Env).run()
    assert world.ledger.task_fates().failed == 2
    assert world.ledger.trained_tasks() == [f"train-{i:06d}" for i in range(22) if i not in (2, 7)]
    assert world.ledger.task_fates().settled
    assert world.ledger.episode_fates().settled


def test_too_many_failed_tasks_end_the_run_with_the_reason():
    class Env(SlowEnv):
        trouble = staticmethod(lambda seed, attempts: "crash")

    class AllAtOnce(SlowEnv):
        async def step(self, action):
            raise KeyError("the lake is gone")

    with pytest.raises(RetriesExhaustedError, match="the lake is gone"):
        World(config(retries=0, max_failed_tasks=1), steps=5, env=AllAtOnce).run()
    with pytest.raises(RetriesExhaustedError, match="the lake is gone") as caught:
        World(config(retries=0, max_failed_tasks=3), steps=5, env=Env).run()
    assert "4 tasks failed for good" in str(caught.value)


def test_a_broken_reward_is_retried_and_no_score_is_invented():
    broken: list[str] = []

    def first_time(trajectory):
        fails = trajectory.id.endswith("/0/0")
        broken.extend([trajectory.id] * fails)
        return fails

    world = World(config(), steps=3, reward=Sum(first_time)).run()
    assert len(broken) == 12 == world.ledger.episode_fates().failed
    scores = [score.value for batch in world.batches for group in batch for score in group.scores]
    assert min(scores) > 0
    assert "reward: the judge is down" in world.ledger.why_failed()[0][0]


def test_a_dead_engine_ends_the_run_and_an_engine_that_hangs_costs_a_deadline():
    asked: list[str] = []

    def hang_once(request):
        asked.append(request.id)
        return len(asked) == 7

    engine = ScriptedEngine.replying(lambda request: b"go", hang=hang_once)
    world = World(config(), steps=3, engine=engine).run()
    assert world.ledger.episode_fates().failed == 1
    assert world.ledger.task_fates().trained == 12
    assert "engine: generate did not answer within its deadline of 1000 s" in world.ledger.why_failed()[0][0]


def test_wrong_options_end_the_run_at_once_with_their_own_error():
    class Env(SlowEnv):
        async def reset(self, *, seed, options):
            raise ConfigError("options: 'sise': did you mean 'size'?")

    with pytest.raises(ConfigError, match="did you mean 'size'"):
        World(config(), steps=1, env=Env).run()


def test_members_of_a_group_share_the_start_and_not_the_sampling():
    engine = ScriptedEngine.replying(lambda request: b"go")
    world = World(config(groups_per_step=1), steps=2, engine=engine).run()
    for batch in world.batches:
        assert len({t.task.seed for group in batch for t in group.trajectories}) == 1
    seeds = [request.seed for request in engine.requests]
    assert len(set(seeds)) == len(seeds)


def test_training_and_held_out_seeds_never_meet():
    train, held_out = (
        {SeededTasks("e", 3, split).task(i).seed for i in range(2000)} for split in ("train", "held-out")
    )
    assert not train & held_out
    assert len(train) > 1990


def test_leaving_in_the_middle_cancels_everything_that_plays():
    async def main() -> None:
        world = World(config(), steps=5)
        renderer = TemplateRenderer(ByteTokenizer())
        engine = ScriptedEngine.replying(lambda request: b"go", seconds_per_token=lambda request: 1.0)
        host = EnvHost({"slow": SlowEnv}, DEADLINES)
        player = Player(EnginePolicy(engine, Sampling(), renderer.stop_token_ids, 100), renderer, host, 16, 100)
        async with engine:
            async with Rollouts(
                world.config,
                tasks=SeededTasks("slow", 0),
                player=player,
                reward=Sum(),
                ledger=world.ledger,
                seed=0,
                groups=20,
            ):
                await asyncio.sleep(2)
                assert engine.stats().running > 0
            assert engine.stats().running == engine.stats().waiting == 0
        assert len(asyncio.all_tasks()) == 1
        # They are open: the next launch takes them up again.
        assert world.ledger.rewind(0) == [0, 1, 2, 3]

    run_virtual(main)
