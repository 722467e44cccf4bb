"""The whole scheduler under the virtual clock: bounds, failures, hangs, cancellation, ledger."""

import asyncio
import math
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms.batch_processing import BatchProcessing
from agentrl.algorithms.config import BatchProcessingConfig
from agentrl.algorithms.reinforce import Reinforce
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.engines.router import Router
from agentrl.errors import (
    ConfigError,
    EngineDeadError,
    FilterBudgetError,
    MetricNameError,
    RetriesExhaustedError,
    RewardError,
    StallError,
    TrainingError,
)
from agentrl.flow import EventLog, Retries, deadline, now, run_virtual
from agentrl.hosting.pool import EnvPool
from agentrl.ledger.ledger import Ledger
from agentrl.plugins import NoSettings
from agentrl.rollout.accounts import SchedulerStatus
from agentrl.rollout.budget import Budget
from agentrl.rollout.config import Deadlines, RolloutConfig
from agentrl.rollout.disagreement import Disagreement
from agentrl.rollout.engine_policy import EnginePolicy
from agentrl.rollout.episode import EnvEpisodeRunner
from agentrl.rollout.rule_registry import installed_rules
from agentrl.rollout.scheduler import Rollouts
from agentrl.rollout.watchdog import watch
from agentrl.settings.sampling import SamplingParams
from agentrl.tasks.seeded import SeededTasks
from agentrl.testing import ScriptedEngine
from agentrl.testing.tokenizer import ByteTokenizer
from agentrl.trajectory import Group, Score, Task, Terminated, Trajectory, staleness
from agentrl.weights.config import WeightUpdate
from tests.ledger.ledger_queries import trained_tasks, why_failed

DEADLINES = Deadlines(reset=50, step=50, generate=1000, reward=50, episode=5000, stall=6000)


class SlowEnv:
    """Three to six turns of heavy-tailed length; `trouble(seed, attempts so far)` says what goes
    wrong.
    """

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
    engine: ScriptedEngine | Router | None = None
    train_seconds: float = 5.0
    tasks: SeededTasks | None = None
    runner: Any = None
    ledger: Ledger = field(default_factory=lambda: Ledger(":memory:"))
    batches: list[list[Group]] = field(default_factory=list)
    events: EventLog = field(default_factory=EventLog)
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    underway: list[SchedulerStatus] = field(default_factory=list)
    untrained: list[list[tuple[Trajectory, Score]]] = field(default_factory=list)
    fails_at: int | None = None
    """The step whose training fails."""
    left: list[tuple[Trajectory, Score]] = field(default_factory=list)
    """What was played in the step in which it ended."""
    teaches: Callable[[Group], bool] = lambda group: group.has_signal
    places: Callable[[], int] = lambda: 0
    changing: Callable[[int], Awaitable[None]] | None = None
    """Called when a batch is there, before it is trained on."""
    first: int = 0
    """The number of the first task."""
    known: Disagreement | None = None
    """What earlier trees have shown."""

    def run(self) -> "World":
        SlowEnv.attempts.clear()
        run_virtual(self._main)
        return self

    async def _main(self) -> None:
        config, renderer = self.config, TemplateRenderer(ByteTokenizer())
        engine = self.engine or ScriptedEngine.replying(
            lambda request: b"go", max_batch=64, seconds_per_token=lambda request: 0.02
        )
        host = EnvPool({"slow": self.env}, config.deadlines)
        policy = EnginePolicy(
            engine,
            SamplingParams(max_tokens=64, temperature=1.0, stop_token_ids=renderer.stop_token_ids),
            config.deadlines.generate,
        )
        runner = EnvEpisodeRunner(policy, renderer, host, config.budget, config.deadlines.episode)
        rollouts = Rollouts(
            config,
            tasks=self.tasks or SeededTasks(NoSettings(), "slow", self.seed),
            runner=self.runner or runner,
            reward=self.reward,
            engine=engine,
            ledger=self.ledger,
            seed=self.seed,
            groups=self.steps * config.groups_per_step,
            events=self.events,
            keep_untrained=2,
            teaches=self.teaches,
            places=self.places,
            next_number=self.first,
            disagreement=self.known,
        )
        async with engine, rollouts:
            await self._train(rollouts, engine)
            self.metrics = rollouts.metrics()
        await host.close()
        self.seconds = now()

    async def _train(self, rollouts: Rollouts, engine: Any) -> None:
        try:
            for step in range(self.steps):
                self.batches.append(await rollouts.next_batch())
                self.underway.append(rollouts.status())
                if step == self.fails_at:
                    raise TrainingError("the loss is not finite")
                self.untrained.append(rollouts.take_untrained())
                if self.changing is not None:
                    await self.changing(step)
                await asyncio.sleep(self.train_seconds)
                async with rollouts.new_weights(step + 1):
                    await engine.update_weights({}, step + 1)
        except (Exception, asyncio.CancelledError):
            self.left = rollouts.take_all()
            raise


def config(**settings) -> RolloutConfig:
    return RolloutConfig(
        **{"groups_per_step": 4, "group_size": 3, "deadlines": DEADLINES, **settings}
    )


@given(max_staleness=st.sampled_from([0, 1, 2, 4]), seed=st.integers(0, 10**6))
@settings(max_examples=12, deadline=None)
def test_staleness_never_exceeds_the_bound_nothing_is_dropped_and_all_fates_are_known(
    max_staleness, seed
):
    world = World(config(max_staleness=max_staleness), steps=10, seed=seed).run()
    ages = [staleness(group, step) for step, batch in enumerate(world.batches) for group in batch]
    assert max(ages) <= max_staleness
    assert trained_tasks(world.ledger) == [f"train-{i:06d}" for i in range(40)]
    assert world.ledger.task_fates().settled
    assert world.ledger.episode_fates().settled
    assert world.ledger.episode_fates().trained == 120


def test_asynchrony_is_faster_and_older_and_synchrony_is_exact():
    runs = {k: World(config(max_staleness=k), steps=20).run() for k in (0, 1, 4)}
    ages = {
        k: fmean(
            staleness(group, step) for step, batch in enumerate(world.batches) for group in batch
        )
        for k, world in runs.items()
    }
    assert ages[0] == 0
    assert ages[0] < ages[1] < ages[4]
    assert runs[0].seconds > runs[1].seconds > runs[4].seconds


def test_the_same_seed_gives_the_same_events_and_another_seed_others():
    digests = [
        World(config(max_staleness=2), steps=8, seed=seed).run().events.digest()
        for seed in (1, 1, 2)
    ]
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
    assert all(
        isinstance(t.status, Terminated) for b in world.batches for g in b for t in g.trajectories
    )
    why, count = why_failed(world.ledger)[0]
    assert count == 20
    assert "KeyError: 'the lake is gone'" in why
    assert "test_scheduler.py" in why
    assert "in step" in why


def test_a_hung_env_costs_one_slot_for_one_deadline():
    class Env(SlowEnv):
        trouble = staticmethod(lambda seed, attempts: "hang" if sum(attempts.values()) == 5 else "")

    clean, hung = (World(config(), steps=6, env=env).run() for env in (SlowEnv, Env))
    assert hung.ledger.episode_fates().failed == 1
    assert hung.ledger.task_fates().trained == 24
    assert hung.seconds <= clean.seconds + DEADLINES.step + 100
    assert "did not answer within its deadline of 50 s" in why_failed(hung.ledger)[0][0]


def killed_by(tasks):
    """An engine that dies, with all that it works on, of requests of these tasks."""
    return ScriptedEngine.replying(
        lambda request: b"go",
        seconds_per_token=lambda request: 0.2,
        dies=lambda request: request.id.split("/")[0] in tasks,
    )


@pytest.mark.parametrize(
    "lethal", [{"train-000002"}, {"train-000000", "train-000006", "train-000007"}]
)
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_tasks_that_engines_die_of_are_set_aside_and_the_run_goes_on(lethal, max_staleness):
    restarted = []

    def again(number):
        restarted.append(number)
        return killed_by(lethal)

    router = Router([killed_by(lethal), killed_by(lethal)], factory=again)
    world = World(config(max_staleness=max_staleness), steps=4, engine=router).run()
    assert 2 * len(lethal) <= len(restarted) <= 5 * len(lethal)
    trained = [f"train-{number:06d}" for number in range(16 + len(lethal))]
    assert trained_tasks(world.ledger) == [name for name in trained if name not in lethal]
    assert world.ledger.task_fates().settled
    assert world.ledger.task_fates().failed == len(lethal)
    assert world.ledger.episode_fates().settled
    reasons = why_failed(world.ledger)
    assert {count for _, count in reasons} == {1}  # none is played again
    assert len(reasons) == len(lethal)
    for why, _ in reasons:
        assert re.match(
            r"engine: engines died \d times while they worked on request train-\d+/\d/0/0", why
        )
    assert all(
        score.value > 0 for batch in world.batches for group in batch for score in group.scores
    )


@pytest.mark.parametrize("seconds", [45.0, 400.0])
def test_a_restart_that_takes_longer_than_an_answer_fails_no_episode_and_hides_no_lethal_request(
    seconds,
):
    lethal = {"train-000001"}
    restarted = []

    class Slow:
        """An engine that takes minutes to load."""

        def __init__(self, engine):
            self.engine = engine

        def __getattr__(self, name):
            return getattr(self.engine, name)

        async def __aenter__(self):
            await asyncio.sleep(seconds)
            await self.engine.__aenter__()
            return self

        async def __aexit__(self, *exc):
            await self.engine.__aexit__(*exc)

    def again(number):
        restarted.append(number)
        return Slow(killed_by(lethal))

    deadlines = Deadlines(reset=30, step=50, generate=50, reward=50, episode=300, stall=6000)
    world = World(
        config(deadlines=deadlines), steps=3, engine=Router([killed_by(lethal)], factory=again)
    ).run()
    assert [count for _, count in why_failed(world.ledger)] == [1]
    assert "set aside" in why_failed(world.ledger)[0][0]
    assert world.ledger.task_fates().failed == 1
    assert world.ledger.task_fates().trained == 12
    assert len(restarted) <= 4


def test_an_engine_that_always_dies_ends_the_run_and_is_not_started_for_ever():
    every = {f"train-{number:06d}" for number in range(1000)}
    restarted = []

    def again(number):
        restarted.append(number)
        return killed_by(every)

    router = Router([killed_by(every)], factory=again)
    with pytest.raises(
        EngineDeadError, match=r"engine 0 keeps dying: it was restarted 8 times in a row"
    ):
        World(config(), steps=4, engine=router).run()
    assert len(restarted) == 8


def test_a_task_that_always_fails_is_replaced_and_counted():
    doomed = {SeededTasks(NoSettings(), "slow", 0).task(index).seed for index in (2, 7)}

    class Env(SlowEnv):
        trouble = staticmethod(lambda seed, attempts: "crash" if seed in doomed else "")

    world = World(config(retries=Retries(environment=1), max_staleness=1), steps=5, env=Env).run()
    assert world.ledger.task_fates().failed == 2
    assert trained_tasks(world.ledger) == [f"train-{i:06d}" for i in range(22) if i not in (2, 7)]
    assert world.ledger.task_fates().settled
    assert world.ledger.episode_fates().settled


def test_too_many_failed_tasks_end_the_run_with_the_reason():
    class Env(SlowEnv):
        trouble = staticmethod(lambda seed, attempts: "crash")

    class AllAtOnce(SlowEnv):
        async def step(self, action):
            raise KeyError("the lake is gone")

    with pytest.raises(RetriesExhaustedError, match="the lake is gone"):
        World(
            config(retries=Retries(environment=0), max_failed_tasks=1), steps=5, env=AllAtOnce
        ).run()
    with pytest.raises(RetriesExhaustedError, match="the lake is gone") as caught:
        World(config(retries=Retries(environment=0), max_failed_tasks=3), steps=5, env=Env).run()
    assert "4 tasks failed permanently" in str(caught.value)


def test_a_broken_reward_is_asked_again_about_the_same_trajectory_and_no_score_is_invented():
    asked: Counter[str] = Counter()

    def twice(trajectory):
        asked[trajectory.id] += 1
        return asked[trajectory.id] <= 2

    world = World(config(), steps=3, reward=Sum(twice)).run()
    fates = world.ledger.episode_fates()
    assert (fates.trained, fates.failed) == (36, 0)
    assert set(asked.values()) == {3}
    scores = [score.value for batch in world.batches for group in batch for score in group.scores]
    assert min(scores) > 0


def test_a_slow_reward_holds_no_slot_of_an_episode():
    """With four slots and 40 s a score: held through the score, 48 episodes of about 8 s would take
    48 / 4 * 48 s.
    """

    class Slow(Sum):
        async def score(self, trajectory):
            await asyncio.sleep(40)
            return await super().score(trajectory)

    few = {"max_live_episodes": 4, "min_live_episodes": 4, "groups_per_step": 16}
    quick, slow = (World(config(**few), steps=1, reward=reward).run() for reward in (Sum(), Slow()))
    assert slow.seconds < quick.seconds + 41


def test_a_reward_that_stays_broken_is_asked_as_often_as_its_budget_says_and_fails_its_task():
    asked: Counter[str] = Counter()

    def always(trajectory):
        asked[trajectory.id] += 1
        return "/1/" in trajectory.id

    world = World(
        config(retries=Retries(reward=3), max_failed_tasks=2), steps=2, reward=Sum(always)
    )
    with pytest.raises(RetriesExhaustedError, match="the judge is down"):
        world.run()
    broken = {name: times for name, times in asked.items() if "/1/" in name}
    assert all(name.endswith("/1/0") for name in broken), (
        "an episode was played again for its reward's sake"
    )
    assert max(broken.values()) == 4
    assert "reward: Sum: the judge is down" in why_failed(world.ledger)[0][0]


def test_a_dead_engine_ends_the_run_and_an_engine_that_hangs_costs_a_deadline():
    asked: list[str] = []

    def hang_once(request):
        asked.append(request.id)
        return len(asked) == 7

    engine = ScriptedEngine.replying(lambda request: b"go", hang=hang_once)
    world = World(config(), steps=3, engine=engine).run()
    assert world.ledger.episode_fates().failed == 1
    assert world.ledger.task_fates().trained == 12
    assert (
        "engine: generate did not answer within its deadline of 1000 s"
        in why_failed(world.ledger)[0][0]
    )


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
        {SeededTasks(NoSettings(), "e", 3, split).task(i).seed for i in range(2000)}
        for split in ("train", "held-out")
    )
    assert not train & held_out
    assert len(train) > 1990


def test_leaving_in_the_middle_cancels_everything_that_plays():
    async def main() -> None:
        world = World(config(), steps=5)
        renderer = TemplateRenderer(ByteTokenizer())
        engine = ScriptedEngine.replying(
            lambda request: b"go", seconds_per_token=lambda request: 1.0
        )
        host = EnvPool({"slow": SlowEnv}, DEADLINES)
        runner = EnvEpisodeRunner(
            EnginePolicy(
                engine,
                SamplingParams(
                    max_tokens=64, temperature=1.0, stop_token_ids=renderer.stop_token_ids
                ),
                100,
            ),
            renderer,
            host,
            Budget(),
            100,
        )
        async with engine:
            async with Rollouts(
                world.config,
                tasks=SeededTasks(NoSettings(), "slow", 0),
                runner=runner,
                reward=Sum(),
                engine=engine,
                ledger=world.ledger,
                seed=0,
                groups=20,
            ):
                await asyncio.sleep(2)
                assert engine.stats().running > 0
            assert engine.stats().running == engine.stats().waiting == 0
        assert len(asyncio.all_tasks()) == 1
        # They are open: the next launch takes them up again.
        assert [number for number, _ in world.ledger.rewind(0)] == [0, 1, 2, 3]

    run_virtual(main)


def test_extra_members_make_stragglers_harmless_and_their_places_are_used_again():
    class Env(SlowEnv):
        trouble = staticmethod(lambda seed, attempts: "hang" if attempts[seed] == 2 else "")

    alone = World(config(max_live_episodes=15), steps=6, env=Env).run()
    spared = World(config(max_live_episodes=15, extra_members=1), steps=6, env=Env).run()
    assert spared.seconds < alone.seconds / 2
    fates = spared.ledger.episode_fates()
    assert (fates.trained, fates.cancelled, fates.failed) == (72, 24, 0)
    assert fates.settled
    assert {len(group.trajectories) for batch in spared.batches for group in batch} == {3}


def test_a_loser_is_cancelled_within_a_second_and_leaves_the_engine():
    async def watch(engine: ScriptedEngine, seen: list[int]) -> None:
        while True:
            await asyncio.sleep(0.5)
            seen.append(engine.stats().running)

    class Instant(SlowEnv):
        async def step(self, action):
            return "on", 1.0, True, False, {}

    slow_one = ScriptedEngine.replying(
        lambda request: b"go",
        seconds_per_token=lambda request: 100.0 if "/3/" in request.id else 0.1,
    )
    world = World(
        config(groups_per_step=1, group_size=3, extra_members=1),
        steps=1,
        env=Instant,
        engine=slow_one,
    )
    world.train_seconds = 0
    world.run()
    assert world.seconds < 1
    assert slow_one.stats().running == 0


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_groups_without_variance_are_replaced_and_the_source_learns_of_all(max_staleness):
    class Source(SeededTasks):
        seen: ClassVar[list] = []

        def observe(self, index, task, rewards_G):
            self.seen.append((index, set(rewards_G)))

    class Varied(Sum):
        async def score(self, trajectory):
            member = int(trajectory.id.split("/")[1])
            return Score(float(member if trajectory.task.seed % 8 < 4 else 1.0))

    Source.seen.clear()
    settings = config(filter_zero_variance=True, max_staleness=max_staleness)
    world = World(
        settings,
        steps=4,
        reward=Varied(),
        tasks=Source(NoSettings(), "slow", 0),
        train_seconds=20.0,
    ).run()
    fates = world.ledger.task_fates()
    assert fates.trained == 16
    assert fates.filtered > 3
    assert fates.settled
    assert world.ledger.episode_fates().settled
    assert all(len(set(group.rewards_G)) > 1 for batch in world.batches for group in batch)
    told = [(number, set(rewards)) for number, _, rewards in world.ledger.outcomes()]
    assert told[: len(Source.seen)] == Source.seen, "a resumed run would tell it something else"
    assert len(Source.seen) >= fates.trained + 3


def test_what_is_filtered_is_what_the_algorithm_learns_nothing_from():
    class Seldom(Sum):
        async def score(self, trajectory):
            return Score(float(trajectory.task.seed % 8 < 4))  # the same for all members

    teaches = BatchProcessing(BatchProcessingConfig(), algorithm=Reinforce()).teaches
    world = World(
        config(filter_zero_variance=True), steps=3, reward=Seldom(), teaches=teaches
    ).run()
    assert {reward for batch in world.batches for group in batch for reward in group.rewards_G} == {
        1.0
    }
    assert world.ledger.task_fates().filtered > 0


def test_some_episodes_that_were_filtered_or_failed_are_kept_with_what_was_played():
    class Different(Sum):
        async def score(self, trajectory):
            return Score(
                float(int(trajectory.task.id[-1]) % 2 and int(trajectory.id.split("/")[1]))
            )

    filtered = World(config(filter_zero_variance=True), steps=3, reward=Different()).run()
    kept = [pair for step in filtered.untrained for pair in step]
    assert kept
    assert all(len(step) <= 2 for step in filtered.untrained)
    trained = {
        trajectory.id
        for batch in filtered.batches
        for group in batch
        for trajectory in group.trajectories
    }
    assert not trained & {trajectory.id for trajectory, _ in kept}
    assert all(trajectory.turns and score.value == 0 for trajectory, score in kept)

    broken = World(
        config(), steps=2, reward=Sum(lambda trajectory: trajectory.id.endswith("3/1/0"))
    ).run()
    kept = [pair for step in broken.untrained for pair in step]
    assert {trajectory.id.split("/", 1)[1] for trajectory, _ in kept} == {"1/0"}
    assert all(
        math.isnan(score.value) and "the judge is down" in str(score.status) for _, score in kept
    )


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_run_that_ends_in_a_step_gives_all_episodes_of_it_and_no_other(max_staleness):
    world = World(config(max_staleness=max_staleness), steps=4, fails_at=1)
    with pytest.raises(TrainingError):
        world.run()
    left = [trajectory.id for trajectory, _ in world.left]
    first, batch = (
        {one.id for group in groups for one in group.trajectories} for groups in world.batches
    )
    assert len(left) == len(set(left))
    assert batch <= set(left)
    assert not first & set(left)
    assert (set(left) > batch) == (max_staleness > 0)  # those of later steps, which had begun


def test_filtering_without_end_is_an_error_that_names_the_way_out():
    class Same(Sum):
        async def score(self, trajectory):
            return Score(0.0)

    world = World(
        config(filter_zero_variance=True, max_filtered_per_step=10), steps=4, reward=Same()
    )
    with pytest.raises(
        FilterBudgetError,
        match=r"11 groups were filtered for one batch.*too hard or too easy.*untrained/",
    ):
        world.run()
    assert len(world.left) >= 2
    assert {score.value for _, score in world.left} == {0.0}


@pytest.mark.parametrize("rule", sorted(installed_rules()))
def test_every_staleness_rule_trains_the_same_number_of_groups_and_settles_every_fate(rule):
    world = World(config(max_staleness=2, staleness_rule=rule), steps=12, train_seconds=1.0).run()
    fates = world.ledger.task_fates()
    assert fates.trained == 48
    assert fates.settled
    assert world.ledger.episode_fates().settled
    ages = [staleness(group, step) for step, batch in enumerate(world.batches) for group in batch]
    assert (fates.stale > 0) == world.config.rule.drops
    assert max(ages) <= 2 or not world.config.rule.bounded


@pytest.mark.slow
def test_dropping_what_is_late_trains_on_short_episodes_and_the_metric_says_so():
    def bias(rule):
        return (
            World(config(max_staleness=1, staleness_rule=rule), steps=40, train_seconds=1.0)
            .run()
            .metrics
        )

    assert bias("drop")["bias/seconds"] < 0.97
    assert bias("deadline_first")["bias/seconds"] == pytest.approx(1.0)


def test_a_group_has_a_deadline_of_its_own():
    class Env(SlowEnv):
        trouble = staticmethod(lambda seed, attempts: "hang" if attempts[seed] == 2 else "")

    deadlines = DEADLINES.model_copy(update={"group": 30.0})
    world = World(config(deadlines=deadlines, max_failed_tasks=2), steps=6, env=Env)
    with pytest.raises(
        RetriesExhaustedError, match="group did not answer within its deadline of 30 s"
    ):
        world.run()


def test_a_stall_ends_the_run_and_names_the_stage():
    class Silent:
        """A runner with no deadlines of its own."""

        async def play(self, episode, report):
            with deadline("engine", "generate", 10**6):
                await asyncio.Event().wait()

    world = World(config(groups_per_step=1, group_size=2), steps=1, runner=Silent())
    with pytest.raises(
        StallError,
        match=r"nothing has moved for 6000 s.*\n  2 in generate \(engine\), the first for",
    ):
        world.run()


def test_a_rescue_is_tried_before_a_stall_ends_the_run():
    tried = []

    async def main() -> None:
        with pytest.raises(StallError):
            await watch(
                100.0, lambda: 0, lambda: True, lambda: tried.append(now()) or len(tried) < 3
            )

    run_virtual(main)
    assert tried == [100.0, 200.0, 300.0]


def test_the_number_of_live_episodes_follows_the_engine():
    engine = ScriptedEngine.replying(
        lambda request: b"go", max_batch=16, seconds_per_token=lambda request: 5.0
    )
    world = World(config(groups_per_step=100, min_live_episodes=4), steps=2, engine=engine).run()
    assert 16 <= world.metrics["live_episodes/limit"] <= 64


@pytest.mark.parametrize(("update", "max_staleness"), [("keep", 0), ("abort_resume", 2)])
def test_live_episodes_follow_engines_that_come_and_go_and_nothing_is_lost_or_too_old(
    update: WeightUpdate, max_staleness: int
) -> None:
    stop = TemplateRenderer(ByteTokenizer()).stop_token_ids[0]

    def logits(tokens: Sequence[int]) -> list[float]:
        """Of "go", also where it was interrupted."""
        after = {ord("g"): ord("o"), ord("o"): stop}
        best = after.get(tokens[-1], ord("g"))
        return [1000.0 * (token == best) for token in range(max(256, stop + 1))]

    def engine() -> ScriptedEngine:
        return ScriptedEngine(
            logits, max_batch=200, max_context=10_000, seconds_per_token=lambda request: 0.5
        )

    router = Router([engine()], update=update, factory=lambda number: engine())
    serving: list[int] = []

    async def change(step: int) -> None:
        if step < 3:
            await router.add(step + 1, engine)
        elif step < 6:
            await router.remove()
        serving.append(router.worker_count().alive)

    world = World(
        config(groups_per_step=12, max_staleness=max_staleness),
        steps=9,
        engine=router,
        places=lambda: 200 * router.worker_count().alive,
        changing=change,
    ).run()
    assert serving == [2, 3, 4, 3, 2, 1, 1, 1, 1]
    # Those of the step after the change, in which episodes have ended.
    limits = [seen.slots_limit for seen in world.underway]
    for before, limit in zip([1, *serving], limits, strict=False):
        assert 200 * before <= limit <= 8 * 200 * before
    assert limits[3] >= 800 > limits[8]
    ages = [staleness(group, step) for step, batch in enumerate(world.batches) for group in batch]
    assert max(ages) <= max_staleness
    assert trained_tasks(world.ledger) == [f"train-{i:06d}" for i in range(108)]
    fates = world.ledger.episode_fates()
    assert (fates.trained, fates.failed) == (324, 0)
    assert fates.settled
    for batch in world.batches:
        for trajectory in (each for group in batch for each in group.trajectories):
            for turn in trajectory.turns:
                versions = turn.completion.policy_versions.tolist()
                assert versions == sorted(versions)


def test_a_display_sees_failures_by_layer_the_longest_groups_and_what_is_ready():
    class Env(SlowEnv):
        trouble = staticmethod(lambda seed, attempts: "crash" if attempts[seed] == 1 else "")

    reward = Sum(lambda trajectory: trajectory.id.endswith("/1/1"))
    world = World(
        config(max_staleness=1, max_failed_tasks=100), steps=4, env=Env, reward=reward
    ).run()
    last = world.underway[-1]
    failed = world.metrics["failed_tasks"] + world.ledger.episode_fates().failed
    assert failed > 0
    assert sum(last.failures.values()) <= world.ledger.episode_fates().failed
    assert last.failures["environment"] > 0
    for seen in world.underway:
        seconds = [group.seconds for group in seen.longest]
        assert seconds == sorted(seconds, reverse=True)
        assert all(group.env == "slow" and group.seconds >= 0 for group in seen.longest)
        assert 0 <= seen.slots <= seen.slots_limit
        assert seen.wanted == 4
    assert any(seen.longest for seen in world.underway)
    assert any(seen.ready for seen in world.underway)


class _Levels(SeededTasks):
    """A curriculum that reports a metric of the scheduler's."""

    def observe(self, index: int, task: Task, rewards_G: Sequence[float]) -> None:
        return

    def metrics(self) -> dict[str, float]:
        return {"failed_tasks": 0.5}


def test_a_curriculum_that_reports_a_metric_of_the_scheduler_is_refused():
    world = World(config(), steps=1, tasks=_Levels(NoSettings(), "slow", 0))
    with pytest.raises(MetricNameError, match=r"'failed_tasks'.* by the scheduler and by the curr"):
        world.run()
