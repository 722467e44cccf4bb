"""A member needs nothing of the controller but its assignment, and any process can be its home."""

import asyncio
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.errors import RewardError
from agentrl.flow import Retries, run_virtual
from agentrl.rollout.assignment import (
    Assignment,
    EpisodeLength,
    EpisodeOver,
    MemberReport,
    RewardRetried,
    TokensSampled,
    TurnsPlayed,
)
from agentrl.rollout.member import Member, MemberResult
from agentrl.scoring.pipeline import RewardPipeline
from agentrl.trajectory import SEGMENT, Failed, Score, Task, Terminated, Trajectory, Unscored
from tests.rollout import member_parts

ASSIGNMENT = Assignment(
    "train-000007/2/1",
    Task("countdown", 3, {"level": [1, 2]}, "train-000007"),
    seed=812,
    priority=5,
    member=2,
    attempt=1,
    admitted_version=4,
    reports_turns=True,
)


def sent(value):
    """The value as another process gets it."""
    return pickle.loads(pickle.dumps(value))


def without_times(result: MemberResult) -> MemberResult:
    """The same result, without what depends on how fast it was played."""
    trajectories = tuple(
        replace(
            t,
            seconds=0.0,
            started=0.0,
            turns=tuple(
                replace(turn, generate_seconds=0.0, env_seconds=0.0, asked=0.0) for turn in t.turns
            ),
        )
        for t in result.trajectories
    )
    return replace(
        result,
        trajectories=trajectories,
        scores=tuple(replace(score, scoring_spans=()) for score in result.scores),
    )


def test_an_assignment_and_a_result_are_the_same_on_the_other_side() -> None:
    result, reports = asyncio.run(member_parts.play(ASSIGNMENT))
    assert sent(ASSIGNMENT) == ASSIGNMENT
    assert sent(result) == result
    assert sent(reports) == reports
    lost = asyncio.run(
        member_parts.play(replace(ASSIGNMENT, task=Task("countdown", 3, {"says": "crash"})))
    )
    assert sent(lost) == lost


def test_a_member_in_another_process_plays_the_same_episode() -> None:
    there = subprocess.run(
        [sys.executable, "-m", "tests.rollout.member_parts"],
        input=pickle.dumps(ASSIGNMENT),
        stdout=subprocess.PIPE,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    result, reports = pickle.loads(there.stdout)
    here, reported = asyncio.run(member_parts.play(ASSIGNMENT))
    assert without_times(result) == without_times(here)
    assert [type(report) for report in reports] == [type(report) for report in reported]
    (trajectory,) = result.trajectories
    assert (trajectory.id, trajectory.status, len(trajectory.turns)) == (
        ASSIGNMENT.id,
        Terminated(),
        3,
    )
    assert [score.value for score in result.scores] == [3.0]


def test_each_answer_and_each_turn_whose_outcome_is_known_is_reported() -> None:
    result, reports = asyncio.run(member_parts.play(ASSIGNMENT))
    tokens = [len(turn.completion.token_ids) for turn in result.trajectories[0].turns]
    assert [r.tokens for r in reports if isinstance(r, TokensSampled)] == tokens
    *segments, last = [r.segments for r in reports if isinstance(r, TurnsPlayed)]
    assert [len(of_agents[0].turns) for of_agents in segments] == [0, 1, 2]
    assert {of_agents[0].status for of_agents in segments} == {SEGMENT}
    assert last == ()  # the verdict on the whole is not known yet
    (trajectory,) = result.trajectories
    assert reports[-1] == EpisodeOver((EpisodeLength(trajectory.seconds, sum(tokens)),))


def test_turns_are_reported_only_where_they_are_asked_for() -> None:
    _, reports = asyncio.run(member_parts.play(replace(ASSIGNMENT, reports_turns=False)))
    assert not any(report.segments for report in reports if isinstance(report, TurnsPlayed))


def test_a_failure_is_a_result_and_keeps_what_was_played() -> None:
    task = Task("countdown", 3, {"says": "crash"}, "t")
    result, reports = asyncio.run(member_parts.play(replace(ASSIGNMENT, task=task)))
    assert isinstance(result.failure, Failed)
    assert result.failure.layer == "environment"
    assert "the rocket is gone" in result.failure.error
    assert len(result.trajectories[0].turns) == 1
    assert result.scores == result.scored == ()
    assert reports[-1] == EpisodeOver()


class Plays:
    """A runner of one trajectory."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    async def play(self, assignment: Assignment, report) -> tuple[Trajectory, ...]:
        await asyncio.sleep(self.seconds)
        return (Trajectory(assignment.id, assignment.task, (), Terminated()),)


class FailsTwice:
    """A reward that succeeds when it is asked for the third time."""

    def __init__(self) -> None:
        self.asked = 0

    async def score(self, trajectory: Trajectory) -> Score:
        self.asked += 1
        await asyncio.sleep(10.0)
        if self.asked < 3:
            raise RewardError("the judge is down")
        return Score(1.0)


def test_an_episode_is_over_before_it_is_scored_and_retries_of_the_reward_are_reported() -> None:
    reports: list[MemberReport] = []
    pipeline = RewardPipeline.of(FailsTwice(), 60.0, Retries())
    result = run_virtual(lambda: Member(Plays(), pipeline).play(ASSIGNMENT, reports.append))
    assert reports == [
        EpisodeOver((EpisodeLength(0.0, 0),)),
        RewardRetried(ASSIGNMENT.id),
        RewardRetried(ASSIGNMENT.id),
    ]
    assert [score.value for score in result.scores] == [1.0]


def test_a_member_that_is_cancelled_reports_that_its_episode_is_over() -> None:
    reports: list[MemberReport] = []

    async def main() -> None:
        async with asyncio.timeout(5):
            await Member(Plays(seconds=100.0)).play(ASSIGNMENT, reports.append)

    with pytest.raises(TimeoutError):
        run_virtual(main)
    assert reports == [EpisodeOver()]


def test_a_member_without_a_reward_scores_nothing() -> None:
    result = run_virtual(lambda: Member(Plays()).play(ASSIGNMENT))
    assert [score.status for score in result.scores] == [Unscored()]
