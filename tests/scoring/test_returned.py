"""What rewards return, and in which shapes they come: read, or refused by name."""

import asyncio
import functools
import json
import logging
import math
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from agentrl.config import load_config
from agentrl.errors import ConfigError, RewardError
from agentrl.flow import Retries
from agentrl.scoring.build import build_pipeline
from agentrl.scoring.part import RewardPart
from agentrl.scoring.pipeline import RewardPipeline
from agentrl.scoring.returned import as_score, as_scores, own_metrics, turn_rewards
from agentrl.scoring.rule_pool import RulePool
from agentrl.testing.rewards import trajectory
from agentrl.trajectory import Failed, Score, Scored
from tests.tiers import evenly, only

PLAYED = trajectory("hello")


@pytest.mark.parametrize(
    "value",
    [
        0.5,
        np.float32(0.5),
        np.float64(0.5),
        np.array(0.5),
        Decimal("0.5"),
        Fraction(1, 2),
        Score(np.float32(0.5)),
    ],
)
def test_numbers_of_every_library_are_scores(value):
    score = as_score(value)
    assert (type(score.value), score.value) == (float, 0.5)


@pytest.mark.parametrize(
    ("value", "read"), [(True, 1.0), (np.True_, 1.0), (np.False_, 0.0), (np.int64(3), 3.0)]
)
def test_truth_values_and_integers_are_numbers(value, read):
    assert as_score(value).value == read


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (None, "the reward returned None; return a Score or a number"),
        ("0.5", "returned '0.5'"),
        ({"a": 1.0}, r"\(a dict\): its parts go into Score\(value, parts\)"),
        ((1.0, {}), r"\(a tuple\): a score has one value"),
        ([1.0], r"\(a list\)"),
        (np.array([1.0, 2.0]), "a ndarray"),
        ((one for one in [1.0]), "a generator"),
        (1 + 2j, r"\(a complex\)"),
        (10**400, "returned inf"),
        (math.nan, "returned NaN"),
        (Decimal("NaN"), "returned NaN"),
        (Score(None), "Score with the value None"),
        (Score("1"), "Score with the value '1'"),
        (Score(1.0, {"a": None}), "the part 'a', None"),
        (Score(1.0, {"a": "x"}), "the part 'a', 'x'"),
        (Score(1.0, {"a": math.inf}), "inf for the part 'a'"),
        (Score(1.0, {1: 2.0}), "for its parts; write a dict by name"),
        (Score(1.0, [1.0]), "for its parts; write a dict by name"),
        (Score(1.0, turns=(1.0, None)), "for a turn None"),
        (Score(1.0, turns=(1.0, 2.0)), "with 2 turns for an episode of 1"),
        (Score(1.0, turns="ab"), "'ab' for its turns"),
        (Score(1.0, success="no"), "the success 'no'"),
    ],
)
def test_what_is_no_score_is_refused_by_name(value, why):
    with pytest.raises(RewardError, match=why):
        as_score(value, 1)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"e/0": 1.0, "e/1": 0.0}, r"a dict\); return a list with one Score or number for each"),
        ({0: 1.0, 1: 0.0}.values(), "a dict_values"),
        ((score for score in [1.0, 0.0]), "a generator"),
        ({1.0, 0.0}, "a set"),
        (None, "None"),
        ("10", "'10'"),
        (1.0, r"\(a float\)"),
        (np.zeros((2, 2)), "a ndarray"),
        ([1.0], "1 scores for 2 trajectories"),
        ([1.0, None], "the reward returned None"),
    ],
)
def test_scores_of_a_group_are_a_list_or_are_refused_by_name(value, why):
    with pytest.raises(RewardError, match=why):
        as_scores(value, [1, 1])


def test_scores_of_a_group_may_be_an_array():
    assert [score.value for score in as_scores(np.array([1.0, 0.25], np.float32), [1, 1])] == [
        1.0,
        0.25,
    ]
    assert [score.value for score in as_scores((True, Score(2.0)), [1, 1])] == [1.0, 2.0]


def test_turns_and_metrics_are_read_or_refused():
    assert turn_rewards(np.array([1, 2])) == (1.0, 2.0)
    for wrong in (None, {"a": 1}, (one for one in ())):
        with pytest.raises(RewardError, match="for its turns"):
            turn_rewards(wrong)
    assert own_metrics({"a": np.float32(1), "b": None, "c": math.nan}) == {"a": 1.0}
    with pytest.raises(RewardError, match="for its metrics"):
        own_metrics([1.0])


def test_a_group_reward_that_returns_a_dict_is_a_failure_that_says_so():
    class Ranks:
        def score_group(self, trajectories):
            return {each.id: 1.0 for each in trajectories}

    pipeline = RewardPipeline([RewardPart(Ranks(), "ranks")], deadline=10.0)
    (score,) = asyncio.run(pipeline.score_group([PLAYED], [Score(0.0)]))
    assert isinstance(score.status, Failed)
    assert "score_group returned" in score.status.error
    assert "a dict" in score.status.error


# Shapes


def words(played, scale: float = 1.0, *, most: int = 20) -> float:
    """The number of words, at most so many."""
    return scale * min(most, len(played.messages[-1].content.split()))


async def words_async(played, *, most: int = 20) -> float:
    return words(played, most=most)


@dataclass
class Counting:
    """A callable instance without a hash."""

    scale: float

    def __call__(self, played, *, most: int = 20) -> float:
        return words(played, self.scale, most=most)

    def method(self, played) -> float:
        return words(played, self.scale)


class CountingAsync:
    async def __call__(self, played) -> float:
        return words(played)


class Instance:
    """An instance that scores."""

    entered = False

    async def __aenter__(self):
        self.entered = True
        return self

    async def __aexit__(self, *exc):
        pass

    def score(self, played) -> float:
        assert self.entered
        return 1.0


TWICE = functools.partial(words, scale=2.0)
BOTH = functools.partial(functools.partial(words, scale=2.0), most=1)
ASYNC = functools.partial(words_async, most=1)
COUNTING = Counting(3.0)
PARTIAL_COUNTING = functools.partial(COUNTING, most=1)
METHOD = COUNTING.method
COUNTING_ASYNC = CountingAsync()
PARTIAL_ASYNC = functools.partial(COUNTING_ASYNC)
INSTANCE = Instance()
LAMBDA = lambda played: words(played, 1.0)  # noqa: E731
LAMBDA_ASYNC = lambda played: words_async(played, most=9)  # noqa: E731


def scored(path: Path, reward: dict[str, object]) -> Score:
    """What the reward of a run's config says of three words."""

    async def main() -> Score:
        file = path / "run.yaml"
        file.write_text(json.dumps({"env": "frozen_lake", "steps": 3, "reward": reward}))
        section = load_config(file, ()).config.reward
        async with build_pipeline(
            section, RulePool(), deadline=30.0, retries=Retries(reward=0)
        ) as pipeline:
            return await pipeline.score(trajectory("one two three"))

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "settings", "value"),
    [
        ("words", {"most": 2}, 2.0),
        ("TWICE", {}, 6.0),
        ("TWICE", {"most": 2}, 4.0),
        ("BOTH", {}, 2.0),
        ("ASYNC", {}, 1.0),
        ("ASYNC", {"most": 2}, 2.0),
        ("COUNTING", {}, 9.0),
        ("COUNTING", {"most": 1}, 3.0),
        ("PARTIAL_COUNTING", {}, 3.0),
        ("METHOD", {}, 9.0),
        ("COUNTING_ASYNC", {}, 3.0),
        ("PARTIAL_ASYNC", {}, 3.0),
        ("INSTANCE", {}, 1.0),
        ("LAMBDA", {}, 3.0),
        ("LAMBDA_ASYNC", {}, 3.0),
    ],
)
@pytest.mark.parametrize("isolation", only(["inline", "thread"], "inline"))
def test_rewards_may_be_partials_callable_instances_and_methods(
    name, settings, value, isolation, tmp_path
):
    score = scored(tmp_path, {"name": f"{__name__}:{name}", "isolation": isolation, **settings})
    assert score.status == Scored()
    assert score.value == value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"), evenly([("TWICE", 6.0), ("COUNTING", 9.0), ("METHOD", 9.0)], 1)
)
def test_partials_and_callable_instances_run_in_a_process(name, value, tmp_path):
    assert scored(tmp_path, {"name": f"{__name__}:{name}", "isolation": "process"}).value == value


def test_what_cannot_be_sent_to_a_process_is_refused_before_the_run(tmp_path):
    with pytest.raises(
        ConfigError, match=r"the reward 'LAMBDA' cannot run in a process.*isolation: thread"
    ):
        scored(tmp_path, {"name": f"{__name__}:LAMBDA", "isolation": "process"})


# Weight 0


class Broken:
    """Fails as its text says."""

    def __init__(self, error: object) -> None:
        self.error = error

    def score(self, played):
        if isinstance(self.error, BaseException):
            raise self.error
        return self.error

    def score_turns(self, played):
        return (0.0,)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("no answer"),
        RewardError("down"),
        KeyError("x"),
        math.nan,
        None,
        Score.failed("why"),
    ],
)
def test_a_part_of_weight_0_that_fails_is_told_and_changes_no_score(error, caplog):
    parts = [RewardPart(lambda played: 1.0, "one"), RewardPart(Broken(error), "watch", 0.0)]
    pipeline = RewardPipeline(parts, deadline=10.0)

    async def main() -> list[Score]:
        return [await pipeline.score(PLAYED) for _ in range(3)]

    with caplog.at_level(logging.WARNING):
        found = asyncio.run(main())
    assert [(score.value, dict(score.parts), score.status) for score in found] == [
        (1.0, {"one": 1.0}, Scored())
    ] * 3
    assert (
        len(
            [
                record
                for record in caplog.records
                if "the reward watch, of weight 0" in record.message
            ]
        )
        == 1
    )
    assert pipeline.metrics() == {"scoring/watch/failed": 3.0}
    assert pipeline.metrics() == {"scoring/watch/failed": 0.0}


def test_a_part_of_weight_0_that_a_constraint_needs_must_not_fail():
    parts = [
        RewardPart(lambda played: 1.0, "one"),
        RewardPart(Broken(KeyError("x")), "cost", 0.0, needed=True),
    ]
    score = asyncio.run(RewardPipeline(parts, deadline=10.0).score(PLAYED))
    assert isinstance(score.status, Failed)


def test_a_group_part_of_weight_0_that_fails_changes_no_score():
    class Ranks:
        def score_group(self, trajectories):
            raise KeyError("x")

    parts = [RewardPart(lambda played: 1.0, "one"), RewardPart(Ranks(), "ranks", 0.0)]
    pipeline = RewardPipeline(parts, deadline=10.0)
    base = Score(1.0, {"one": 1.0})
    assert asyncio.run(pipeline.score_group([PLAYED] * 2, [base] * 2)) == [base] * 2
    assert pipeline.metrics()["scoring/ranks/failed"] == 2.0
