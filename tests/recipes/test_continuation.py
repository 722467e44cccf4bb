"""A saved episode goes on from one of its turns in another way, or it is said why it cannot."""

import asyncio
import io
from itertools import count
from pathlib import Path

import pytest

from agentrl.assembly.players import env_host
from agentrl.config import load_config
from agentrl.config.run_config import RunConfig
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.errors import ConfigError
from agentrl.observe.trajectories import write_trajectories
from agentrl.recipes.continuation import Departure, continue_by_hand
from agentrl.rollout.assignment import Assignment
from agentrl.rollout.episode import EnvEpisodeRunner, ScriptedPolicy
from agentrl.trajectory import Message, Score, Task, Trajectory

HERE = "tests.recipes.test_continuation"


class Sums:
    """Shows a number drawn by the seed after each answer, and ends after the third; pays the last
    answer.
    """

    isolation = "inline"
    instances = count()
    changed = False
    turns = 3

    def reset(self, *, seed, options):
        self.drawn = seed + (next(self.instances) if self.changed else 0)
        self.left = self.turns
        return f"begin with {seed}", {}

    def step(self, action):
        self.left -= 1
        self.drawn = self.drawn * 31 % 101
        return f"now {self.drawn}", float(action), self.left == 0, False, {}

    def close(self):
        pass


def config_of(folder: Path, model: Path) -> RunConfig:
    path = folder / "config.yaml"
    path.write_text(f"env: {HERE}:Sums\nmodel: {model}\nseed: 0\nrollout: {{budget: {{turns: 6}}}}")
    return load_config(path).config


def recorded(config: RunConfig, model: Path, *answers: str) -> Trajectory:
    renderer, left = TemplateRenderer.of_model(model), iter(answers)

    async def main() -> Trajectory:
        async with env_host(config) as envs:
            policy = ScriptedPolicy(lambda env, rng: next(left), renderer)
            runner = EnvEpisodeRunner(policy, renderer, envs, config.rollout.budget, 60)
            task = Task(next(iter(config.envs)), 5, {}, "train-000000")
            return (await runner.play(Assignment("train-000000/0/0", task, 0)))[0]

    return asyncio.run(main())


@pytest.fixture
def saved(tmp_path, tiny_model_dir):
    config = config_of(tmp_path, tiny_model_dir)
    return config, recorded(config, tiny_model_dir, "1", "2", "3")


def played_on(config: RunConfig, model: Path, departure: Departure, *answers: str):
    shown: list[tuple[Message, bool]] = []
    left = iter(answers)
    result = asyncio.run(
        continue_by_hand(
            config,
            model,
            departure,
            lambda message, again: shown.append((message, again)),
            lambda: next(left),
        )
    )
    return result, shown


def test_the_turns_before_are_played_again_and_the_rest_is_another(saved, tiny_model_dir):
    config, before = saved
    result, shown = played_on(config, tiny_model_dir, Departure(before, 2), "7")
    (now,) = result.trajectories
    assert now.messages[:5] == before.messages[:5]
    assert [(m.content, again) for m, again in shown[-2:]] == [("now 58", True), ("7", False)]
    assert [turn.reward for turn in now.turns] == [1, 2, 7]
    for one, other in zip(now.turns[:2], before.turns[:2], strict=True):
        assert one.completion.token_ids.tolist() == other.completion.token_ids.tolist()
        assert one.prompt_ids.tolist() == other.prompt_ids.tolist()
    assert result.scores[0].value == 10


def test_what_is_not_as_it_was_recorded_is_refused_before_anybody_is_asked(
    saved, tiny_model_dir, monkeypatch
):
    config, before = saved
    monkeypatch.setattr(Sums, "changed", True)
    next(Sums.instances)
    with pytest.raises(
        ConfigError,
        match=r"after 1 of its answers were given again, message 2 is user 'now \d+', and user 'now"
        r" 54' was recorded. Either the environment is not deterministic",
    ):
        played_on(config, tiny_model_dir, Departure(before, 2))
    monkeypatch.setattr(Sums, "changed", False)
    monkeypatch.setattr(Sums, "turns", 1)
    with pytest.raises(ConfigError, match="the episode is terminated after 1 of its answers"):
        played_on(config, tiny_model_dir, Departure(before, 2))


def test_only_turns_that_were_played_can_be_gone_back_to(saved):
    with pytest.raises(ConfigError, match="has no turn 3: it has turns 0 to 2"):
        Departure(saved[1], 3)


def test_the_command_goes_on_by_hand_and_by_a_model(
    saved, tmp_path, tiny_model_dir, agentrl, monkeypatch
):
    write_trajectories(tmp_path / "trajectories" / "step_000000.parquet", [(saved[1], Score(6.0))])
    command = ("replay", str(tmp_path), "train-000000/0/0", "--turn", "1")
    monkeypatch.setattr("sys.stdin", io.StringIO("4\n5\n"))
    done = agentrl(*command, "--by", "hand")
    assert done.returncode == 0, done.stderr
    assert "recorded: terminated after 3 turns, score 6" in done.stdout
    assert "now: terminated after 3 turns, score 10" in done.stdout
    monkeypatch.setattr("sys.stdin", io.StringIO("4\n"))
    assert "left before its end" in agentrl(*command, "--by", "hand").stdout
    # An untrained model writes no numbers, which is its environment's failure, and is told.
    done = agentrl(*command, "--model", str(tiny_model_dir))
    assert done.returncode == 0, done.stderr
    assert "now: failed after 2 turns, no score" in done.stdout
    assert "could not convert string to float" in done.stdout
    done = agentrl(*command[:3], "--by", "hand")
    assert (done.returncode, "add --turn N" in done.stderr) == (2, True)
