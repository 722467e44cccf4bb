"""Demonstrations and the tokenizer's texts: what fails is left out, up to a bound."""

import asyncio
import logging
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import RunConfig, load_config
from agentrl.envs.base import TextEnv
from agentrl.envs.oracle import OracleEnv
from agentrl.errors import ConfigError, DeadlineError, EnvError
from agentrl.protocols import StepResult
from agentrl.recipes.demonstrations import DemonstrationsConfig, demonstrate
from agentrl.recipes.starting_model import opening_texts

HERE = "tests.recipes.test_demonstrations"


class Flaky(TextEnv):
    """Hangs or fails in the share of resets that its options say, the same ones each time."""

    system_prompt = "Say yes."

    async def start(self, seed: int, options: Mapping[str, Any]) -> str:
        if random.Random(seed).random() < options["hang"]:
            await asyncio.sleep(1000)
        return "Yes?"

    async def step(self, action: str) -> StepResult:
        return "Good.", 1.0, True, False, {"success": True}


def say_yes(env: Flaky, rng: random.Random) -> str:
    return "yes"


def config_with(tmp_path: Path, hang: float, bound: int) -> RunConfig:
    path = tmp_path / "run.yaml"
    deadlines = "deadlines: {reset: 0.02}"
    path.write_text(
        f"env: {{name: '{HERE}:Flaky', options: {{hang: {hang}}}}}\nrollout: {{max_failed_tasks:"
        f" {bound}, {deadlines}}}"
    )
    return load_config(path).config


SHOWN = DemonstrationsConfig(player=f"{HERE}:say_yes", episodes=40)


def test_demonstrations_that_fail_are_left_out_and_counted(
    tmp_path: Path, tiny_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        played = asyncio.run(demonstrate(config_with(tmp_path, 0.2, 16), SHOWN, tiny_model_dir))
    assert 20 < len(played) < 40
    assert all(trajectory.success for trajectory in played)
    assert f"{40 - len(played)} of 40 demonstrations failed" in caplog.text


@pytest.mark.parametrize(("hang", "bound"), [(0.5, 2), (1.0, 1000)])
def test_too_many_failed_demonstrations_end_the_run(
    tmp_path: Path, tiny_model_dir: Path, hang: float, bound: int
) -> None:
    with pytest.raises(
        EnvError,
        match=rf"of 40 demonstrations failed, .*reset.* \(rollout.max_failed_tasks={bound}\)",
    ):
        asyncio.run(demonstrate(config_with(tmp_path, hang, bound), SHOWN, tiny_model_dir))


def test_resets_that_hang_before_the_first_step_cost_their_texts_only(tmp_path: Path) -> None:
    texts = asyncio.run(opening_texts(config_with(tmp_path, 0.3, 16), episodes=20))
    assert 2 * 5 < len(texts) < 2 * 20
    with pytest.raises(DeadlineError):
        asyncio.run(opening_texts(config_with(tmp_path, 1.0, 3), episodes=20))


def say_often(env: Flaky, rng: random.Random, words: int = 1) -> str:
    return " ".join(["yes"] * words)


def test_a_player_takes_its_options_and_is_refused_with_others(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    shown = DemonstrationsConfig(player=f"{HERE}:say_often", episodes=1, options={"words": 3})
    (played,) = asyncio.run(demonstrate(config_with(tmp_path, 0, 0), shown, tiny_model_dir))
    assert [message.content for message in played.messages if message.role == "assistant"] == [
        "yes yes yes"
    ]
    wrong = DemonstrationsConfig(player=f"{HERE}:say_often", episodes=1, options={"word": 3})
    with pytest.raises(
        ConfigError, match=r"unexpected keyword argument 'word'. Its options: words"
    ):
        asyncio.run(demonstrate(config_with(tmp_path, 0, 0), wrong, tiny_model_dir))


def tell_the_decision(env: OracleEnv, rng: random.Random) -> str:
    return f"It is at {env.point.decision.state}."


def maze_with(tmp_path: Path, context: str) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(
        "env: {name: oracle, options: {problem: t_maze, settings: {length: 6}}}\nrollout: {budget:"
        f" {{turns: 8}}, context: {context}}}"
    )
    return load_config(path).config


SUMMARISED = DemonstrationsConfig(
    player="agentrl.envs.oracle:weak_player",
    options={"skill": 1.0},
    summaries=f"{HERE}:tell_the_decision",
    episodes=4,
)


def test_demonstrations_show_summaries_where_they_are_requested(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = maze_with(tmp_path, "{name: summary, max_prompt_tokens: 130}")
    played = asyncio.run(demonstrate(config, SUMMARISED, tiny_model_dir))
    for trajectory in played:
        asked = [turn for turn in trajectory.turns if turn.info.get("context") == "summary"]
        assert asked
        assert trajectory.success
        assert any(turn.forked for turn in trajectory.turns)
        said = [message.content for message in trajectory.messages if message.is_answer]
        assert sum(text.startswith("It is at ") for text in said) == len(asked)
    whole = SUMMARISED.model_copy(update={"summaries": None})
    for trajectory in asyncio.run(demonstrate(config, whole, tiny_model_dir)):
        assert not any(turn.forked for turn in trajectory.turns)


def test_demonstrations_show_the_exchanges_that_the_context_keeps(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    whole = SUMMARISED.model_copy(update={"summaries": None})
    config = maze_with(tmp_path, "{name: last_k, turns: 2}")
    for trajectory in asyncio.run(demonstrate(config, whole, tiny_model_dir)):
        assert [turn.forked for turn in trajectory.turns] == [False] * 3 + [True] * 5


def test_summaries_that_nothing_asks_for_are_refused(tmp_path: Path, tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing requests any with the last_k context"):
        asyncio.run(
            demonstrate(maze_with(tmp_path, "{name: last_k, turns: 2}"), SUMMARISED, tiny_model_dir)
        )
