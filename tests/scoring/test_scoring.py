"""The seam of rewards: any shape, parts that are asked at once, and failures that stay failures."""

import asyncio
import cProfile
import math
import os
import pickle
import random
import re
import threading
import time
from collections import Counter
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from functools import partial
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError, ConformanceError, RewardError, WorkerDiedError
from agentrl.flow import Retries, now
from agentrl.observe.evaluation import Evaluation
from agentrl.observe.metrics import rollout_metrics
from agentrl.rewards.environment import EnvironmentReward
from agentrl.scoring.config import RulePoolConfig
from agentrl.scoring.part import RewardPart
from agentrl.scoring.pipeline import RewardPipeline, score_trajectory, total
from agentrl.scoring.rule_pool import RuleDiedError, RulePool
from agentrl.scoring.rule_workers import RuleWorkers
from agentrl.testing import check_reward
from agentrl.testing.rewards import trajectory
from agentrl.trajectory import Failed, Group, Score, Scored
from tests.rollout.test_scheduler import World, config

PLAYED = trajectory("hello")
numbers = st.floats(-1e6, 1e6)


def test_an_episode_of_arrays_is_scored_in_as_many_calls_whatever_its_turns():
    def calls_of(turns: int) -> int:
        (turn,) = PLAYED.turns
        played = replace(PLAYED, turns=(turn,) * turns).sealed()
        reward = EnvironmentReward(EnvironmentReward.Config())
        asyncio.run(score_trajectory(reward, played, 60.0))  # imports
        profile = cProfile.Profile()
        with profile:
            asyncio.run(score_trajectory(reward, played, 60.0))
        # How often the event loop looks for news is its own matter.
        return sum(
            entry.callcount
            for entry in profile.getstats()
            if f"{os.sep}agentrl{os.sep}" in getattr(entry.code, "co_filename", "")
        )

    assert calls_of(2) == calls_of(200) > 10


class Slow:
    """Takes ten seconds; the first `failures` questions fail."""

    def __init__(self, value: float, failures: int = 0) -> None:
        self.value = value
        self.failures = failures
        self.asked = 0

    async def score(self, trajectory):
        self.asked += 1
        await asyncio.sleep(10)
        if self.asked <= self.failures:
            raise RewardError("the judge is down")
        return Score(self.value, {"detail": 2 * self.value})


def length(played):
    return len(played.messages[-1].content)


async def length_async(played):
    return float(length(played))


def hangs(played):
    threading.Event().wait()


@given(st.lists(st.tuples(numbers, st.floats(-10, 10)), min_size=1, max_size=6))
def test_a_composite_is_the_weighted_sum_of_its_parts(drawn):
    parts = [RewardPart(None, f"part {number}", weight) for number, (_, weight) in enumerate(drawn)]
    score = total(parts, [Score(value) for value, _ in drawn])
    assert score.value == pytest.approx(
        math.fsum(value * weight for value, weight in drawn), rel=1e-9, abs=1e-6
    )
    assert score.parts == {f"part {number}": value for number, (value, _) in enumerate(drawn)}
    split = len(drawn) // 2
    singles = total(parts[:split], [Score(value) for value, _ in drawn[:split]])
    assert total(
        parts[split:], [Score(value) for value, _ in drawn[split:]], singles
    ).value == pytest.approx(score.value)


@given(st.lists(st.one_of(numbers, st.none()), min_size=1, max_size=6))
def test_a_failed_part_fails_the_score_and_never_enters_a_mean(drawn):
    parts = [RewardPart(None, str(number)) for number in range(len(drawn))]
    scores = [Score.failed("down") if value is None else Score(value) for value in drawn]
    whole = total(parts, scores)
    if None in drawn:
        assert isinstance(whole.status, Failed)
        assert whole.status.error == f"{drawn.index(None)}: down"
        assert math.isnan(whole.value)
        assert whole.parts == {}
        assert math.isnan(fmean([whole.value, 1.0])), "a failure in a mean has to show"
    else:
        assert isinstance(whole.status, Scored)
        assert math.isfinite(whole.value)


def test_parts_are_asked_at_once_and_only_the_failed_one_again(virtual):
    async def main():
        sound, broken = Slow(1.0), Slow(3.0, failures=2)
        parts = [
            RewardPart(sound, "sound"),
            RewardPart(broken, "broken", 0.5),
            RewardPart(length, "n", 0.1, "inline"),
        ]
        failed: list[str] = []
        reward = RewardPipeline(parts, deadline=50.0, retries=Retries(reward=2))
        score = await reward.score(PLAYED, failed.append)
        assert score.value == pytest.approx(1.0 + 1.5 + 0.5)
        assert score.parts == {
            "sound": 1,
            "sound/detail": 2,
            "broken": 3,
            "broken/detail": 6,
            "n": 5,
        }
        assert (sound.asked, broken.asked, failed) == (1, 3, [PLAYED.id] * 2)
        assert now() == pytest.approx(30 + 0.5 + 1.0)

    virtual(main)


def test_a_part_that_stays_failed_or_misses_its_deadline_fails_the_score_after_its_budget(virtual):
    async def main():
        broken = Slow(3.0, failures=9)
        parts = [RewardPart(Slow(1.0), "sound"), RewardPart(broken, "broken")]
        score = await RewardPipeline(parts, deadline=50.0, retries=Retries(reward=2)).score(PLAYED)
        assert score.status == Failed("reward", "broken: the judge is down")
        assert broken.asked == 3
        late = await score_trajectory(Slow(1.0), PLAYED, 5.0)
        assert "rollout.deadlines.reward" in late.status.error

    virtual(main)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (math.nan, "returned NaN"),
        (math.inf, "returned inf"),
        (Score(1.0, {"part": math.nan}), "returned NaN"),
        ("5", "returned '5'"),
        (None, "returned None"),
    ],
)
def test_what_is_no_score_is_a_failure(said, why):
    score = asyncio.run(score_trajectory(partial(lambda value, played: value, said), PLAYED, 5.0))
    assert why in score.status.error
    assert math.isnan(score.value)


@pytest.mark.parametrize(
    "isolation", ["inline", "thread", pytest.param("process", marks=pytest.mark.slow), None]
)
@pytest.mark.parametrize("reward", [length, length_async])
def test_a_function_is_a_reward_wherever_it_runs(reward, isolation):
    async def main():
        async with RewardPipeline(
            [RewardPart(reward, "n", isolation=isolation)], deadline=60.0
        ) as pipeline:
            return await pipeline.score(PLAYED)

    assert asyncio.run(main()) == Score(5.0, {"n": 5.0})


def divides(played):
    return 1 / 0


@pytest.mark.parametrize(
    "isolation", ["inline", "thread", pytest.param("process", marks=pytest.mark.slow)]
)
def test_the_failure_of_a_reward_names_the_line_that_raised_it(isolation):
    async def main():
        async with RewardPipeline(
            [RewardPart(divides, "n", isolation=isolation)], deadline=60.0
        ) as pipeline:
            return await pipeline.score(PLAYED)

    score = asyncio.run(main())
    assert "ZeroDivisionError: division by zero (" in score.status.error
    assert f"({__file__}:" in score.status.error
    assert score.status.error.endswith("in divides)")


async def _cancels(trajectory):
    raise asyncio.CancelledError


def _exits(trajectory):
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("reward", "isolation"), [(_exits, "inline"), (_exits, "thread"), (_cancels, None)]
)
def test_a_reward_that_exits_or_cancels_is_a_failed_score(reward, isolation):
    score = asyncio.run(
        RewardPipeline([RewardPart(reward, "it", isolation=isolation)], deadline=5).score(PLAYED)
    )
    assert isinstance(score.status, Failed)
    assert score.status.error.startswith(("it: SystemExit: 3 (", "it: CancelledError ("))


def test_a_hung_function_in_a_thread_costs_its_deadline_and_holds_nobody():
    started = time.monotonic()
    score = asyncio.run(score_trajectory(hangs, PLAYED, 0.2))
    assert isinstance(score.status, Failed)
    assert time.monotonic() - started < 5


def test_a_mistake_in_the_tasks_ends_the_run_instead_of_being_asked_again():
    def reads_gold(played):
        raise ConfigError("no option 'answer'")

    with pytest.raises(ConfigError, match="no option 'answer'"):
        asyncio.run(RewardPipeline.of(reads_gold, 5.0, Retries(reward=4)).score(PLAYED))


class Ranking:
    """Compares the members of a group; the first questions fail."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.asked: Counter[str] = Counter()

    async def score_group(self, trajectories):
        group = trajectories[0].task.id
        self.asked[group] += 1
        if self.asked[group] <= self.failures:
            raise RewardError("no ranking today")
        order = sorted(trajectories, key=lambda played: (len(played.turns), played.id))
        return [Score(float(order.index(played))) for played in trajectories]


def test_a_group_reward_is_asked_once_per_group_and_adds_to_what_the_members_have():
    ranking = Ranking()
    reward = RewardPipeline(
        [RewardPart(Slow(2.0), "slow"), RewardPart(ranking, "rank", 0.5)], deadline=50.0
    )
    world = World(config(), steps=3, reward=reward).run()
    groups = [group for batch in world.batches for group in batch]
    assert set(ranking.asked.values()) == {1}
    for group in groups:
        assert sorted(score.parts["rank"] for score in group.scores) == list(
            range(len(group.scores))
        )
        assert [score.value for score in group.scores] == [
            2.0 + 0.5 * score.parts["rank"] for score in group.scores
        ]


def test_a_failed_ranking_is_asked_again_without_playing_again_and_a_lasting_one_fails_its_task():
    ranking = Ranking(failures=2)
    world = World(config(retries=Retries(reward=3)), steps=2, reward=ranking).run()
    assert set(ranking.asked.values()) == {3}
    assert all(
        played.id.endswith("/0")
        for batch in world.batches
        for group in batch
        for played in group.trajectories
    )
    stubborn = World(
        config(retries=Retries(reward=1), max_failed_tasks=0), steps=1, reward=Ranking(failures=9)
    )
    with pytest.raises(Exception, match="the group could not be scored: Ranking: no ranking today"):
        stubborn.run()


def test_an_evaluation_without_groups_has_no_mean_of_what_compares_them():
    score = asyncio.run(score_trajectory(Ranking(), PLAYED, 5.0))
    metrics = Evaluation(((PLAYED, score),), ()).metrics()
    assert math.isnan(metrics["eval/reward"])
    assert metrics["eval/episodes"] == 1


def test_one_score_too_few_for_a_group_is_a_failure():
    class Short:
        async def score_group(self, trajectories):
            return [Score(1.0)]

    async def main():
        return await RewardPipeline.of(Short(), 5.0, Retries(reward=0)).score_group(
            [PLAYED, PLAYED], [Score(0.0)] * 2
        )

    assert all("1 scores for 2 trajectories" in score.status.error for score in asyncio.run(main()))


def test_rewards_are_entered_and_left_by_the_run_the_last_one_first():
    log: list[str] = []

    class Client:
        def __init__(self, name, fails=False):
            self.name, self.fails = name, fails

        async def __aenter__(self):
            log.append(f"enter {self.name}")
            if self.fails:
                raise ConfigError("no key")

        async def __aexit__(self, *exc):
            log.append(f"leave {self.name}")

        async def score(self, trajectory):
            return Score(1.0)

    async def main(*clients):
        async with RewardPipeline(
            [RewardPart(client, client.name) for client in clients], deadline=5.0
        ):
            log.append("run")

    asyncio.run(main(Client("a"), Client("b")))
    assert log == ["enter a", "enter b", "run", "leave b", "leave a"]
    log.clear()
    with pytest.raises(ConfigError):
        asyncio.run(main(Client("a"), Client("b", fails=True)))
    assert log == ["enter a", "enter b", "leave a"]


def test_parts_without_a_name_of_their_own_are_refused():
    with pytest.raises(ValueError, match="each with a name of its own"):
        RewardPipeline([RewardPart(length, "n"), RewardPart(length, "n")], deadline=5.0)


class Squared:
    """A rule, in a process."""

    def content(self, trajectory):
        return length(trajectory)

    def evaluate(self, content):
        if content == 3:
            os._exit(7)
        return float(content**2)


@pytest.mark.slow  # a process imports all of this module
def test_a_rule_runs_in_a_process_that_may_die_and_is_not_asked_twice_about_the_same_content():
    async def main():
        pool = RulePool(RulePoolConfig(workers=1, cache=2))
        async with RewardPipeline(
            [RewardPart(Squared(), "square")], pool, deadline=60.0
        ) as scoring:
            # Two contents are kept: 1, 2, then 4 drives 2 out.
            texts = [
                "a",
                "b",
                "cc",
                "a",
                "dddd",
                "a",
                "cc",
            ]
            values = [(await scoring.score(trajectory(text))).value for text in texts]
            assert values == [1, 1, 4, 1, 16, 1, 4]
            assert pool.hits == 3
            dead = await scoring.score(trajectory("eee"))
            assert "took its process down (exit status 7)" in dead.status.error
            assert (await scoring.score(trajectory("fffff"))).value == 25
            with pytest.raises(
                ConfigError, match=r"'local' cannot run in a process: .*, or isolation: thread"
            ):
                RewardPipeline(
                    [RewardPart(lambda played: 1.0, "local", isolation="process")], deadline=60.0
                )

    asyncio.run(main())


def test_every_part_has_a_curve_of_its_mean_and_spread():
    scores = tuple(Score(value, {"a": value, "b": 1.0}) for value in (0.0, 2.0))
    group = Group(PLAYED.task, (PLAYED, replace(PLAYED, id="task/1/0")), scores)
    metrics = rollout_metrics([group], step=0)
    assert (metrics["reward"], metrics["reward/a"], metrics["reward/b"]) == (1.0, 1.0, 1.0)
    assert (metrics["reward_std"], metrics["reward_std/a"], metrics["reward_std/b"]) == (
        1.0,
        1.0,
        0.0,
    )


class Broken:
    """A reward that breaks one clause of the contract."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.random = random.Random(0)

    def score(self, trajectory):
        match self.how:
            case "random":
                return self.random.random()
            case "nan":
                return math.nan
            case "key":
                raise KeyError("answer")
            case "number":
                return Score(0.0, {}, Failed("reward", "the judge is down"))
            case "dict":
                return {"quality": 0.5}
            case "message":
                raise RewardError("the reward returned by the server was empty")
            case "pops":
                trajectory.task.options.pop("kind", None)
            case "changes":
                trajectory.task.options["seen"] = True
        return 0.5

    def metrics(self):
        if self.how == "raises":
            raise ZeroDivisionError("no calls")
        return {"cost": math.nan if self.how == "no cost" else 0.0}


class Shared:
    """Keeps what it is asked in an attribute, and awaits in between."""

    async def score(self, trajectory):
        self.text = trajectory.messages[-1].content
        await asyncio.sleep(0.01)
        return Score(float(len(self.text)))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Broken("random"), r"\[pure\] two calls with the same trajectory"),
        (lambda: Broken("nan"), r"\[value\] the reward returned NaN"),
        (lambda: Broken("key"), r"\[failure\] task/0/0: it raised KeyError.*raise RewardError"),
        (
            lambda: Broken("number"),
            r"\[failure\] task/0/0: a failed score has the value 0; write Score.failed",
        ),
        (
            lambda: Broken("dict"),
            r"\[value\] the reward returned \{'quality': 0.5\}.*parts go into Score",
        ),
        (lambda: partial(Broken("dict").score), r"\[value\] the reward returned \{'quality'"),
        (lambda: lambda played: None, r"\[value\] the reward returned None"),
        (lambda: Broken("raises"), r"\[metrics\] metrics\(\) raised ZeroDivisionError: no calls"),
        (lambda: Broken("no cost"), r"\[metrics\] 'cost' is nan, and a metric is a finite number"),
        (lambda: Broken("pops"), r"\[pure\] it changed a trajectory"),
        (lambda: Broken("changes"), r"\[pure\] it changed a trajectory"),
        (Shared, r"\[concurrent\] calls at the same time returned"),
    ],
)
def test_check_reward_finds_what_breaks_the_contract(make, said):
    with pytest.raises(ConformanceError, match=said):
        check_reward(make, [trajectory("a", options={"kind": 1}), trajectory("bbb")], pure=True)


class WithSettings:
    """A reward that cannot be made without its settings."""

    def __init__(self, settings):
        self.settings = settings

    def score(self, trajectory):
        return 0.5


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((length, [PLAYED]), "without arguments, and .*length.*: write `lambda: reward`"),
        ((length_async, [PLAYED]), "without arguments, and .*write `lambda: reward`"),
        ((WithSettings, [PLAYED]), r"'settings'.*`lambda: Reward\(...\)` for a class"),
        ((WithSettings(1), [PLAYED]), "makes the reward, got .*WithSettings.*`lambda: reward`"),
        (("exact", [PLAYED]), "a class or a function that makes the reward, got 'exact'"),
        ((lambda: length, PLAYED), r"got a single one: write `\[trajectory\]`"),
        (
            (lambda: length, ["a reply"]),
            "list of trajectories, got 'a reply' for one; agentrl.test",
        ),
        ((lambda: length, None), "list of trajectories, got None for one"),
        ((lambda: length, []), "needs at least one trajectory"),
        ((lambda: length, iter(())), "needs at least one trajectory"),
    ],
)
def test_check_reward_says_what_to_write_for_other_arguments(given, said):
    with pytest.raises(ConformanceError, match=said):
        check_reward(*given)


@pytest.mark.parametrize("seconds", [0, -1.0, math.inf, math.nan])
def test_check_reward_refuses_a_deadline_that_is_none(seconds):
    with pytest.raises(ConformanceError, match="positive deadline, got seconds="):
        check_reward(lambda: length, [PLAYED], seconds=seconds)


def test_check_reward_takes_what_makes_a_reward_without_arguments():
    def with_default(reward=length):
        return reward

    for make in (with_default, partial(WithSettings, 1), Ranking):
        check_reward(make, (one for one in [PLAYED]))


def test_check_reward_finds_async_code_that_blocks_beyond_its_deadline():
    class Blocks:
        async def score(self, trajectory):
            time.sleep(0.2)  # noqa: ASYNC251 (what is to be found)
            return 0.5

    with pytest.raises(ConformanceError, match=r"\[deadline\] .*blocked the event loop beyond"):
        check_reward(Blocks, [trajectory("a")], seconds=0.1)


def test_check_reward_lets_sound_rewards_and_honest_failures_pass():
    def fails(played):
        raise RewardError("the judge is down")

    class Callable:
        def __call__(self, played):
            return np.float32(0.5)

    honest = Broken("message")  # its sentence begins as one about a wrong value does
    for reward in (length, length_async, fails, Ranking(), partial(length), Callable(), honest):
        check_reward(
            lambda reward=reward: reward,
            [trajectory("a"), trajectory("bbb", id="task/1/0")],
            pure=True,
        )


@pytest.mark.parametrize("value", [1e308, -1e308, math.inf, math.nan])
def test_a_reward_too_large_to_compute_with_is_a_failed_score_that_names_its_part(value):
    async def main():
        parts = [RewardPart(lambda played: 1.0, "sound"), RewardPart(lambda played: value, "wild")]
        score = await RewardPipeline(parts, deadline=5.0).score(PLAYED)
        assert re.search(r"^wild: the reward returned (NaN|-?inf|-?1e\+308)", score.status.error)
        paid = replace(PLAYED, turns=tuple(replace(turn, reward=value) for turn in PLAYED.turns))
        score = await RewardPipeline(
            [RewardPart(EnvironmentReward(EnvironmentReward.Config()), "environment")], deadline=5.0
        ).score(paid)
        assert isinstance(score.status, Failed)

    asyncio.run(main())


def test_a_sum_that_overflows_is_a_failed_score():
    parts = [RewardPart(None, name, 1e30) for name in ("one", "two")]
    score = total(parts, [Score(1e30), Score(1e30, turns=(1e30,))])
    assert isinstance(score.status, Failed)
    assert score.status.error.startswith(
        "one, two: the weighted sum of its parts is 2e+60, which is too large"
    )
    base = total(parts[:1], [Score(1.0)])
    assert isinstance(total(parts[1:], [Score(1e3)], base).status, Failed)


def test_content_that_processes_die_of_is_set_aside_as_a_failure_and_not_asked_about_again(virtual):
    asked = []

    class Dying(RulePool):
        async def ask(self, name, call):
            content = pickle.loads(call)[1]
            asked.append(content)
            if content == 3:
                raise RuleDiedError(f"{name} took its process down (exit status 7)")
            return float(content)

    async def main():
        pool = Dying(RulePoolConfig())
        part = RewardPart(Squared(), "square")
        retries = Retries(reward=8)
        async with RewardPipeline([part], pool, deadline=60.0, retries=retries) as scoring:
            for _ in range(3):
                score = await scoring.score(trajectory("eee"))
                assert math.isnan(score.value)
                assert score.status.final
                assert re.match(
                    r"square: the processes of rules died 2 times while they worked on",
                    score.status.error,
                )
            assert (await scoring.score(trajectory("ffff"))).value == 4
            assert scoring.metrics()["restarts/rules"] == 2

    virtual(main)
    assert asked == [3, 3, 4]


class FakeWorker:
    """A worker that dies when it is asked."""

    async def call(self, method, *args):
        raise WorkerDiedError("reward", 0, "killed")

    async def stop(self):
        pass


def test_rule_workers_that_die_again_and_again_end_the_run(virtual):
    starts = []

    async def start(role, make, rank):
        starts.append(rank)
        return FakeWorker()

    async def main():
        async with RuleWorkers(start, 1, restarts=3) as pool:
            for number in range(100):
                with suppress(RewardError):
                    await pool.run(math.sqrt, number)

    with pytest.raises(
        WorkerDiedError, match="it was restarted 3 times in a row without a verdict in between"
    ):
        virtual(main)
    assert len(starts) == 4


def test_a_pool_whose_processes_did_not_start_is_started_again_for_the_next_content(
    virtual, monkeypatch
):
    class Pool:
        def __init__(self, broken):
            self.broken = broken

        def schedule(self, function, args, timeout):
            if self.broken:
                raise BrokenProcessPool("All workers expired")
            answered = Future()
            answered.set_result(4.0)
            return answered

        def stop(self):
            pass

        def join(self):
            pass

    made = [Pool(broken=False), Pool(broken=True)]
    monkeypatch.setattr(RulePool, "_start", lambda pool: made.pop())

    async def main():
        pool = RulePool(RulePoolConfig(), ["lawbook"])
        with pytest.raises(RewardError, match="died in their start, in which they import lawbook"):
            await pool.run(math.sqrt, 16)
        assert await pool.run(math.sqrt, 16) == 4.0
        assert await pool.run(math.sqrt, 17) == 4.0

    virtual(main)
