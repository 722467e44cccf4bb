"""Whether an episode succeeded: one question, `succeeded`, wherever something depends on it."""

import asyncio
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agentrl.algorithms.batch_processing import BatchProcessing
from agentrl.algorithms.config import BatchProcessingConfig
from agentrl.algorithms.sft import RejectionSampling
from agentrl.config import RunConfig, load_config
from agentrl.errors import ConfigError
from agentrl.gateway.outcome import AgentOutcome, outcome_of
from agentrl.observe.evaluation import Evaluation
from agentrl.observe.intervals import share_over_tasks, wilson_interval
from agentrl.observe.metrics import rollout_metrics
from agentrl.observe.reports import EpisodeResult, EvaluationReport, compare
from agentrl.recipes.demonstrations import judged
from agentrl.recipes.evaluate import check_best, report_of
from agentrl.rollout.results import Games
from agentrl.scoring.part import RewardPart
from agentrl.scoring.pipeline import total
from agentrl.trajectory import (
    UNSCORED,
    Completion,
    Group,
    Message,
    Score,
    Task,
    Terminated,
    Trajectory,
    Turn,
    succeeded,
)

TASK = Task("qa", 0, {"answer": "144"}, "qa/0")
SILENT: tuple[Mapping[str, Any], ...] = ({}, {"success": None})


def played(
    info: Mapping[str, Any], tokens: int = 2, said: str = "144", **fields: Any
) -> Trajectory:
    completion = Completion((5,) * tokens, (-1.0,) * tokens, (0,) * tokens, "stop")
    messages = (Message("user", "12 * 12?"), Message("assistant", said))
    return Trajectory(
        "x/0/0", TASK, (Turn((1,), completion, 1.0, info),), Terminated(), messages, **fields
    )


def group_of(scores: Sequence[Score], lengths: Sequence[int], info: Mapping[str, Any]) -> Group:
    return Group(TASK, tuple(played(info, length) for length in lengths), tuple(scores))


@pytest.mark.parametrize(
    ("info", "score", "verdict"),
    [
        ({"success": True}, Score(0.0, success=False), True),
        ({"success": False}, Score(1.0, success=True), False),
        *(
            (info, score, verdict)
            for info in SILENT
            for score, verdict in (
                (Score(0.3), True),
                (Score(0.0), False),
                (Score(-1.0), False),
                (Score(0.3, success=False), False),
                (Score(-1.0, success=True), True),
                (Score.failed("down"), None),
                (UNSCORED, None),
            )
        ),
    ],
)
def test_the_first_that_can_tell_decides_whether_an_episode_succeeded(
    info: Mapping[str, Any], score: Score, verdict: bool | None
) -> None:
    assert succeeded(played(info), score) is verdict


@pytest.mark.parametrize("info", SILENT)
def test_rejection_sampling_imitates_what_the_score_says_is_right(info: Mapping[str, Any]) -> None:
    group = group_of([Score(1.0), Score(1.0), Score(0.0), Score(0.0)], (2, 10, 2, 10), info)
    assert RejectionSampling().advantages(group) == [1.0, 1.0, 0.0, 0.0]
    told = group_of([Score(0.6, success=False), Score(0.1, success=True)], (2, 2), info)
    assert RejectionSampling().advantages(told) == [0.0, 1.0]


@pytest.mark.parametrize("info", SILENT)
def test_short_right_answers_get_the_bonus_of_the_length_penalty_by_the_score(
    info: Mapping[str, Any],
) -> None:
    group = group_of([Score(1.0), Score(1.0), Score(0.0), Score(0.0)], (2, 10, 2, 10), info)
    (changed,) = BatchProcessing(BatchProcessingConfig(length_penalty=1.0)).scores([group])
    assert changed.rewards_G == [1.5, 0.5, 0.0, -0.5]


def test_the_length_penalty_compares_an_agent_with_itself() -> None:
    scores, agents = [Score(1.0), Score(0.0)] * 2, ("a", "b", "b", "a")
    group = group_of(scores, (10, 200, 100, 12), {})
    named = tuple(
        replace(t, agent=agent) for t, agent in zip(group.trajectories, agents, strict=True)
    )
    group = replace(group, trajectories=named)
    (changed,) = BatchProcessing(BatchProcessingConfig(length_penalty=1.0)).scores([group])
    assert changed.rewards_G == [1.5, -0.5, 1.5, -0.5]


def test_a_penalty_does_not_turn_a_right_answer_into_a_wrong_one() -> None:
    group = group_of([Score(1.0), Score(1.0), Score(0.0)], (2, 10, 2), {})
    (changed,) = BatchProcessing(BatchProcessingConfig(length_penalty=4.0)).scores([group])
    assert changed.rewards_G == [3.0, -1.0, 0.0]
    assert RejectionSampling().advantages(changed) == [1.0, 1.0, 0.0]


def test_parts_with_a_verdict_decide_and_the_others_do_not() -> None:
    right, brief = RewardPart(None, "right", success_at=1.0), RewardPart(None, "brief", 0.1)
    assert total([right, brief], [Score(0.5), Score(1.0)]).success is False
    assert total([right, brief], [Score(1.0), Score(0.0)]).success is True
    assert total([brief], [Score(1.0)]).success is None
    safe = RewardPart(None, "safe", -1.0)
    one = total([right, safe], [Score(1.0), Score(1.0, success=False)])
    assert one.success is False
    ranked = RewardPart(None, "ranked", success_at=0.5)
    assert total([ranked], [Score(0.7)], one).success is False
    assert total([ranked], [Score(0.7)], total([], [])).success is True
    assert total([], []) == UNSCORED


def test_a_score_that_a_program_returns_keeps_its_verdict() -> None:
    assert outcome_of(Score(0.25, success=True), "run") == AgentOutcome(0.25, True)
    assert outcome_of(Score(0.25), "run") == AgentOutcome(0.25, None)


def test_what_is_unknown_is_no_failure_in_any_figure() -> None:
    silent, told = played({}), played({"success": True})
    unknown = Evaluation(((silent, UNSCORED),), ()).metrics()
    assert all(
        math.isnan(unknown[f"eval/{name}"])
        for name in ("success", "success_low", "success_high", "reward")
    )
    half = Evaluation(((silent, UNSCORED), (told, UNSCORED)), ()).metrics()
    assert half["eval/success"] == 1.0
    of_suite = Evaluation(((silent, UNSCORED),), (), "wide", samples=2).metrics()
    assert all(
        math.isnan(of_suite[f"eval/wide/{name}"])
        for name in ("success", "pass@1", "pass@2", "reward")
    )
    group = Group(TASK, (silent, told), (UNSCORED, UNSCORED))
    assert rollout_metrics([group], 0)["success"] == 1.0
    report = report_of(0, Evaluation(((silent, UNSCORED), (told, Score(0.5))), ()))
    assert [(one.success, one.score) for one in report.episodes] == [(None, None), (True, 0.5)]


def test_pass_at_k_is_of_the_answers_of_one_agent() -> None:
    def game(sample: int, agent: str) -> tuple[Trajectory, Score]:
        task = Task("duel", 0, {}, f"wide/0/{sample}")
        won = played({"success": agent == "first"})
        return replace(won, task=task, agent=agent), Score(1.0)

    games = [(game(sample, "first"), game(sample, "second")) for sample in range(2)]
    whole = Evaluation((*games[0], *games[1]), (), "wide", samples=2).metrics()
    assert (whole["eval/wide/pass@2"], whole["eval/wide/pass_tasks"]) == (0.5, 1.0)
    # Of one game, both agents' answers are known: these are not two answers.
    half = Evaluation(games[0], (games[1][0][0],), "wide", samples=2).metrics()
    assert half["eval/wide/pass_tasks"] == 0.0


def a_game(number: int, agent: str, *, won: bool) -> tuple[Trajectory, Score]:
    task = Task("duel", number, {}, f"duel-{number}")
    return replace(played({"success": won}), task=task, agent=agent), Score(won - 0.5)


def test_a_game_is_one_outcome_however_many_agents_it_has() -> None:
    together = [
        a_game(number, agent, won=number < 4) for number in range(8) for agent in ("one", "two")
    ]
    metrics = Evaluation(tuple(together), (), envs=("duel",)).metrics()
    low, high = wilson_interval(4, 8)
    assert (metrics["eval/success_low"], metrics["eval/success_high"]) == (low, high)
    assert metrics["eval/envs/duel/success_low"] == low
    assert metrics["eval/reward_error"] == pytest.approx(math.sqrt(2 / 7 / 8))


def test_nothing_is_left_to_chance_in_the_mean_of_games_with_one_winner_each() -> None:
    against = [
        a_game(number, agent, won=(agent == "one") == (number < 6))
        for number in range(8)
        for agent in ("one", "two")
    ]
    metrics = Evaluation(tuple(against), ()).metrics()
    expected = share_over_tasks([0.5] * 8)
    assert (metrics["eval/success_low"], metrics["eval/success_high"]) == (
        expected.low,
        expected.high,
    )
    assert (metrics["eval/success"], metrics["eval/reward_error"]) == (0.5, 0.0)


def test_a_program_without_a_verdict_succeeds_by_the_runs_reward() -> None:
    scores = [Score(1.0), Score(1.0), Score(0.0), Score(1.0)]
    metrics = rollout_metrics([group_of(scores, (2, 2, 2, 2), {"reward/own": 1.0})], 0)
    assert (metrics["reward"], metrics["success"]) == (0.75, 0.75)


def test_games_against_opponents_are_won_by_the_score() -> None:
    games = [played({"success": None}, agent="north", opponent=3) for _ in range(2)]
    found = Games.of_groups([Group(TASK, tuple(games), (Score(1.0), Score(-1.0)))]).metrics()
    assert found["opponents/3/north/success"] == 0.5
    assert found["opponents/share"] == 1.0


def test_two_reports_without_verdicts_are_compared_by_their_scores() -> None:
    def report(value: float) -> Mapping[str, EvaluationReport]:
        return {"a": EvaluationReport("a", 0, {}, (EpisodeResult("qa/0", None, value),))}

    (found,) = compare(report(0.25), report(0.75))
    assert (found.tasks, found.score.value) == (1, 0.5)
    assert math.isnan(found.first)
    assert math.isnan(found.success.value)


def config(tmp_path: Path, text: str) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_config(path).config


def test_demonstrations_are_judged_by_the_runs_reward_where_the_environment_is_silent(
    tmp_path: Path,
) -> None:
    loaded = config(tmp_path, "env: qa\nreward: {name: math, tag: answer}\n")
    said = [played({"success": None}, said=text) for text in ("<answer>144</answer>", "144")]
    assert asyncio.run(judged(loaded, [*said, played({"success": False})])) == [True, False, False]


class Ranked:
    """Only compares the members of a group."""

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        return [Score(1.0)] * len(trajectories)


def test_a_best_checkpoint_that_no_evaluation_can_find_is_refused(tmp_path: Path) -> None:
    text = (
        f"env: guess_number\nevaluation: {{every: 10}}\nreward: {{name: '{__name__}:Ranked'}}\n"
        "checkpoint: {best: eval/%s}\n"
    )
    with pytest.raises(
        ConfigError, match=r"checkpoint.best=eval/reward is never measured.*eval/success"
    ):
        config(tmp_path, text % "reward")
    assert config(tmp_path, text % "success").checkpoint.best == "eval/success"


@pytest.mark.parametrize(
    ("pairs", "step", "said"),
    [
        ([({}, UNSCORED)], 3, "is unknown"),
        (
            [({}, Score(0.4)), ({}, Score(0.9))],
            3,
            "cannot tell .* success_at .* checkpoint.best=eval/reward",
        ),
        ([({}, Score(0.0)), ({}, Score(0.9))], 3, ""),
        ([({"success": True}, Score(0.4)), ({"success": True}, Score(0.9))], 3, ""),
        ([({}, Score(1.0)), ({}, Score(1.0))], 3, ""),
    ],
)
def test_a_success_that_cannot_choose_a_checkpoint_is_told(
    tmp_path: Path, pairs: Sequence[tuple[Mapping[str, Any], Score]], step: int, said: str
) -> None:
    text = "env: guess_number\nevaluation: {every: 10}\ncheckpoint: {best: eval/success}\n"
    heard: list[str] = []
    run = SimpleNamespace(config=config(tmp_path, text), display=SimpleNamespace(say=heard.append))
    scored = tuple((played(info), score) for info, score in pairs)
    check_best(cast(Any, run), step, Evaluation(scored, ()))
    assert len(heard) == bool(said)
    assert not said or re.search(said, heard[0])


def test_a_run_whose_best_checkpoint_is_unknown_ends_before_it_trains(tmp_path: Path) -> None:
    run = SimpleNamespace(
        config=config(
            tmp_path, "env: qa\nevaluation: {every: 10}\ncheckpoint: {best: eval/success}\n"
        )
    )
    with pytest.raises(ConfigError, match=r"write checkpoint\.best=eval/reward"):
        check_best(cast(Any, run), 0, Evaluation(((played({}), UNSCORED),), ()))
