"""Tasks that begin in the middle of recorded episodes: what they give, where they begin, and what a
replay that differs becomes.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.assembly.players import env_host
from agentrl.config import load_config
from agentrl.config.run_config import RunConfig
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.envs.search import strong_player as searcher
from agentrl.envs.text_maze import strong_player as walker
from agentrl.errors import ConfigError
from agentrl.observe.trajectories import write_trajectories
from agentrl.protocols import Curriculum, ScriptedPlayer, TaskSourceOffers
from agentrl.recipes.preview import openings
from agentrl.rollout.assignment import Assignment
from agentrl.rollout.episode import EnvEpisodeRunner, ScriptedPolicy
from agentrl.tasks.backplay import Backplay
from agentrl.trajectory import Failed, Score, Task, Terminated, Trajectory, Truncated

HERE = "tests.tasks.test_backplay"


class Sums:
    """Pays each answer, and ends after so many as the option says."""

    isolation = "inline"
    changed = 0

    def reset(self, *, seed, options):
        assert options.keys() <= {"turns"}
        self.drawn, self.left = seed, options["turns"]
        return f"begin with {seed}", {}

    def step(self, action):
        self.left -= 1
        self.drawn = (self.drawn * 31 + self.changed) % 101
        return f"now {self.drawn}", float(action), self.left == 0, False, {}

    def close(self):
        pass


def config_of(folder: Path, model: Path, env: str, turns: int = 40) -> RunConfig:
    path = folder / "config.yaml"
    path.write_text(f"env: {env}\nmodel: {model}\nrollout: {{budget: {{turns: {turns}}}}}")
    return load_config(path).config


def play(config: RunConfig, model: Path, task: Task, player: ScriptedPlayer) -> Trajectory:
    renderer = TemplateRenderer.of_model(model)

    async def main() -> Trajectory:
        async with env_host(config) as envs:
            policy = ScriptedPolicy(player, renderer)
            runner = EnvEpisodeRunner(policy, renderer, envs, config.rollout.budget, 60)
            return (await runner.play(Assignment(f"{task.id}/0/0", task, 0)))[0]

    return asyncio.run(main())


def saying(*answers: str) -> ScriptedPlayer:
    left = iter(answers)
    return lambda env, rng: next(left)


def sums(seed: int, turns: int) -> Task:
    return Task(f"{HERE}:Sums", seed, {"turns": turns}, f"train-{seed:06d}")


def save(folder: Path, *episodes: Trajectory) -> Path:
    rows = [(one, Score(one.env_return)) for one in episodes]
    write_trajectories(folder / "trajectories" / "step_000000.parquet", rows)
    return folder


def backplay(folder: Path, env: str, split: str = "train", **settings: Any) -> Backplay:
    chosen = {"held_out": 0.0, "review": 0.0, **settings}
    return Backplay(Backplay.Config(path=folder, **chosen), env, 0, split)


def tokens_until(episode: Trajectory, turn: int) -> list[int]:
    """What the engine saw before the answer of a turn."""
    parts = [[*one.prompt_ids, *one.completion.token_ids] for one in episode.turns[:turn]]
    return [*np.concatenate(parts).tolist(), *episode.turns[turn].prompt_ids.tolist()]


@pytest.mark.parametrize(
    ("env", "player"),
    [(f"{HERE}:Sums", None), ("text_maze", walker), ("search", searcher)],
)
def test_an_episode_goes_on_as_the_recorded_one_and_trains_on_its_own_turns_alone(
    env: str, player: Any, tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = config_of(tmp_path, tiny_model_dir, env)
    task = Task(env, 5, {}, "train-000000") if player else sums(5, 4)
    whole = play(config, tiny_model_dir, task, player or saying("1", "2", "3", "4"))
    assert isinstance(whole.status, Terminated)
    turns = len(whole.turns)
    source = backplay(save(tmp_path, whole), env, "held-out", held_out=1.0, held_out_left=2)
    begun = source.task(0)
    now = play(config, tiny_model_dir, begun, player or saying("3", "4"))
    assert [one.content for one in now.messages] == [one.content for one in whole.messages]
    assert [one.role for one in now.messages] == [one.role for one in whole.messages]
    assert [one.is_answer for one in now.messages].count(True) == len(now.turns) == 2
    assert now.turns[0].prompt_ids.tolist() == tokens_until(whole, turns - 2)
    assert (now.env_return, now.success) == (whole.env_return, whole.success)
    assert now.turns[0].state == whole.turns[-2].state
    (opening,) = asyncio.run(openings(config, [begun]))
    assert opening.messages == now.messages[: len(opening.messages)]
    assert len(opening.messages) == len(now.messages) - 4, "two answers, and their replies"
    # An episode that began in the middle is a recording of the whole, too.
    again = backplay(save(tmp_path / "again", now), env, "held-out", held_out=1.0)
    assert again.task(0).options == task.options
    assert again.fingerprint == source.fingerprint


def test_a_replay_that_differs_fails_for_good_and_names_the_turn(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, tiny_model_dir, f"{HERE}:Sums", turns=3)
    whole = play(config, tiny_model_dir, sums(5, 3), saying("1", "2", "3"))
    task = backplay(save(tmp_path, whole), f"{HERE}:Sums").task(0)
    monkeypatch.setattr(Sums, "changed", 1)
    changed = play(config, tiny_model_dir, task, saying())
    assert isinstance(changed.status, Failed)
    assert (changed.status.layer, changed.status.final, changed.turns) == ("environment", True, ())
    assert (
        "the answer of turn 0, given again, was answered by 'now 55', and 'now 54' was recorded"
        in changed.status.error
    )
    monkeypatch.setattr(Sums, "changed", 0)
    short = replace(task, options={**task.options, "turns": 2})
    ended = play(config, tiny_model_dir, short, saying())
    assert "the answer of turn 1, given again, ended the episode" in str(ended.status)
    unreadable = replace(task, options={"turns": 2, "begin": ["up"]})
    with pytest.raises(ConfigError, match=r"'begin' of a task has the entry 'up': write \{answer"):
        play(config, tiny_model_dir, unreadable, saying())


def test_turns_that_are_given_count_in_the_budget_and_the_first_is_always_played(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = config_of(tmp_path, tiny_model_dir, f"{HERE}:Sums", turns=3)
    options = {"turns": 9, "begin": [{"answer": "1"}]}
    played = play(config, tiny_model_dir, Task(f"{HERE}:Sums", 5, options, "x"), saying(*"1111"))
    assert (len(played.turns), played.status) == (2, Truncated("turns"))
    options = {"turns": 9, "begin": [{"answer": "1"}] * 5}
    played = play(config, tiny_model_dir, Task(f"{HERE}:Sums", 5, options, "x"), saying(*"1111"))
    assert (len(played.turns), played.env_return) == (1, 6)


@pytest.fixture
def recordings(tmp_path: Path, tiny_model_dir: Path) -> Path:
    config = config_of(tmp_path, tiny_model_dir, f"{HERE}:Sums")
    episodes = [
        play(config, tiny_model_dir, sums(seed, turns), saying(*["1"] * turns))
        for seed, turns in [(3, 2), (4, 3), (5, 4)]
    ]
    lost = play(config, tiny_model_dir, sums(6, 2), saying("0", "0"))
    return save(tmp_path, *episodes, lost)


def left(task: Task) -> int:
    return int(task.options["turns"]) - len(task.options.get("begin", ()))


def train(source: Backplay, outcome: Callable[[Task], list[float]], first: int, count: int) -> Any:
    played = []
    for index in range(first, first + count):
        task = source.task(index)
        played.append((task, outcome(task)))
        source.observe(index, *played[-1])
    return played


def test_tasks_begin_earlier_as_the_policy_succeeds_and_not_before(recordings: Path) -> None:
    source = backplay(recordings, f"{HERE}:Sums", groups=4, success_at=1.0)
    assert isinstance(source, Curriculum)
    assert TaskSourceOffers.of(source).fingerprint == source.fingerprint
    assert len(source) == 3
    played = train(source, lambda task: [float(left(task) <= 2), 0.0], 0, 100)
    assert {task.seed for task, _ in played} == {3, 4, 5}, "the one that failed is left out"
    assert [left(task) for task, _ in played[:4]] == [1] * 4
    assert {left(task) for task, _ in played[4:8]} == {2}
    assert max(left(task) for task, _ in played) == 3, "half succeed at 2, and none at 3"
    assert source.metrics() == {"curriculum/turns_left": 3.0, "curriculum/success": 0.0}
    later = train(source, lambda task: [1.0, 1.0], 100, 100)
    assert all("begin" not in task.options for task, _ in later[50:])


def test_some_tasks_begin_nearer_to_the_end_than_they_could(recordings: Path) -> None:
    source = backplay(recordings, f"{HERE}:Sums", groups=1, review=0.5)
    played = train(source, lambda task: [1.0], 0, 200)[50:]
    nearer = [task for task, _ in played if "begin" in task.options]
    assert 0.2 < len(nearer) / len(played) < 0.5
    assert {left(task) for task in nearer} == {1, 2, 3}


@pytest.mark.parametrize("stopped_at", [3, 20])
def test_a_replay_of_the_outcomes_goes_on_with_the_same_tasks(
    recordings: Path, stopped_at: int
) -> None:
    def make() -> Backplay:
        return backplay(recordings, f"{HERE}:Sums", groups=2, review=0.3)

    def outcome(task: Task) -> list[float]:
        return [1.0, float(left(task) % 2)]

    whole = train(make(), outcome, 0, 40)
    resumed = make()
    for index, (task, rewards_G) in enumerate(whole[:stopped_at]):
        resumed.observe(index, task, rewards_G)
    assert train(resumed, outcome, stopped_at, 40 - stopped_at) == whole[stopped_at:]


def test_held_out_recordings_are_not_trained_on(recordings: Path) -> None:
    def seeds(split: str) -> set[int]:
        source = backplay(recordings, f"{HERE}:Sums", split, held_out=0.4)
        return {source.task(index).seed for index in range(40)}

    assert seeds("train") | seeds("held-out") == {3, 4, 5}
    assert (len(seeds("train")), len(seeds("held-out"))) == (1, 2)


def test_recordings_that_no_task_can_begin_in_are_refused_by_reason(
    recordings: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"4 were played in '.*:Sums' and not in 'sokoban'"):
        backplay(recordings, "sokoban")
    with pytest.raises(ConfigError, match="4 have no score of 7 or more"):
        backplay(recordings, f"{HERE}:Sums", success_at=7)
    with pytest.raises(ConfigError, match="has no folder trajectories/"):
        backplay(tmp_path / "none", f"{HERE}:Sums")
    with pytest.raises(ConfigError, match="leaves none for the held-out tasks: raise it"):
        backplay(recordings, f"{HERE}:Sums", "held-out")
    with pytest.raises(ConfigError, match="agent:aider is a program"):
        backplay(recordings, "agent:aider")
