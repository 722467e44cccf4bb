"""Evaluation and demonstrations play each task once, and wait for unreachable servers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.config import RunConfig, load_config
from agentrl.flow import now, run_virtual
from agentrl.observe.evaluation import Evaluation
from agentrl.recipes.evaluate import evaluate, play_all
from agentrl.rollout.assignment import Assignment, Report
from agentrl.trajectory import Failed, Score, Task, Terminated, Trajectory


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text("env: guess_number\nmodel: tiny\nrollout: {max_live_episodes: 4}\n")
    return load_config(path).config


class Runner:
    """Plays at once, except during an outage; `broken` tasks fail for their own reason."""

    def __init__(self, outage: float, broken: tuple[str, ...] = ()) -> None:
        self.outage = outage
        self.broken = broken
        self.attempts = 0

    async def play(self, assignment: Assignment, report: Report) -> tuple[Trajectory, ...]:
        self.attempts += 1
        status = Terminated()
        if now() < self.outage:
            status = Failed("environment", "http://games:8800 cannot be reached", outage=True)
        elif assignment.task.id in self.broken:
            status = Failed("environment", "KeyError")
        return (Trajectory(assignment.id, assignment.task, (), status),)


def play(config: RunConfig, runner: Runner) -> tuple[list[Trajectory], float]:
    tasks = [Task("guess_number", seed, id=str(seed)) for seed in range(12)]

    async def main() -> tuple[list[Trajectory], float]:
        return await play_all(runner, tasks, config), now()

    return run_virtual(main)


@pytest.mark.parametrize("seconds", [1.0, 120.0, 500.0])
def test_an_outage_costs_an_evaluation_nothing_but_time(config: RunConfig, seconds: float) -> None:
    played, ended = play(config, Runner(seconds))
    assert [one.task.id for one in played] == [str(seed) for seed in range(12)]
    assert all(isinstance(one.status, Terminated) for one in played)
    assert seconds <= ended < seconds + 20


def test_an_episode_that_fails_for_another_reason_is_played_once(config: RunConfig) -> None:
    runner = Runner(0.0, broken=("3", "7"))
    played, _ = play(config, runner)
    assert [one.task.id for one in played if isinstance(one.status, Failed)] == ["3", "7"]
    assert runner.attempts == 12


def test_a_server_that_does_not_come_back_fails_the_episodes_after_the_patience(
    config: RunConfig,
) -> None:
    played, ended = play(config, Runner(1e9))
    assert all(isinstance(one.status, Failed) for one in played)
    assert 600 < ended < 700


def test_episodes_that_failed_or_could_not_be_scored_are_kept_with_the_reason(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reward:
        async def score(self, trajectory: Trajectory, failed: Any) -> Score:
            return Score.failed("no answer from the judge") if trajectory.id == "2" else Score(1.0)

    tasks = [Task("guess_number", seed, id=str(seed)) for seed in range(4)]
    monkeypatch.setattr("agentrl.recipes.evaluate.held_out_tasks", lambda *_: tasks)
    runner = Runner(0.0, broken=("1",))
    rollouts: Any = SimpleNamespace(
        config=config, reward=Reward(), evaluating=lambda how: runner, tokens=None
    )

    async def main() -> Evaluation:
        return await evaluate(rollouts)

    evaluation = run_virtual(main)
    assert [trajectory.id for trajectory, _ in evaluation.scored] == ["0", "3"]
    assert [(one.id, one.status) for one in evaluation.failed] == [
        ("1", Failed("environment", "KeyError")),
        ("2", Failed("reward", "no answer from the judge")),
    ]
