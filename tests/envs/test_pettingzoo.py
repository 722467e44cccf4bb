"""PettingZoo's games as environments of several agents."""

import random
import re
from importlib.util import find_spec
from typing import Any

import pytest

from agentrl import plugins
from agentrl.config import load_config
from agentrl.envs.pettingzoo import PettingZoo, random_player
from agentrl.errors import ConfigError, EnvError, PluginError
from agentrl.testing import check_env

pytestmark = pytest.mark.skipif(
    find_spec("pettingzoo") is None, reason="pettingzoo is not installed"
)


def begun(name: str, seed: int = 0, **options: Any) -> tuple[PettingZoo, str, dict[str, Any]]:
    env: PettingZoo = plugins.load("envs", f"pettingzoo:{name}")()
    return env, *env.reset(seed=seed, options=options)  # type: ignore[misc]


@pytest.mark.parametrize("name", ["connect_four_v3", "tictactoe_v3", "rps_v2"])
def test_classic_games_keep_the_contract(name: str) -> None:
    check_env(
        plugins.load("envs", f"pettingzoo:classic/{name}"),
        seeds=(2**62,),
        actions=random_player,
        max_turns=12,
    )


def test_four_in_a_row_win_and_each_agent_sees_its_own_pieces_and_the_rules_once() -> None:
    env, first, info = begun("classic/connect_four_v3")
    assert info == {"agents": ["player_0", "player_1"], "agent": "player_0"}
    assert first.startswith("You are player_0.\n")
    assert first.endswith("Actions: 0, 1, 2, 3, 4, 5, 6.\n" + "\n".join([". . . . . . ."] * 6))
    reply: Any = env.step("I drop it into column 3.")
    assert reply[0].startswith("You are player_1.\n")
    assert reply[0].endswith("\n. . . O . . .")
    assert reply[4]["agent"] == "player_1"
    reply = env.step("0")
    assert reply[0].endswith("\n. . . . . . .\nO . . X . . .")
    assert "Actions" not in reply[0]
    for column in (3, 0, 3, 0):
        env.step(str(column))
    observation, reward, terminated, truncated, info = env.step("3")  # type: ignore[misc]
    assert (observation, reward, terminated, truncated) == ("The game is over.", 1.0, True, False)
    assert info == {
        "rewards": {"player_0": 1.0, "player_1": -1.0},
        "success": {"player_0": True, "player_1": False},
    }
    with pytest.raises(EnvError, match="call reset first"):
        env.step("3")


def test_an_impossible_action_costs_a_turn_and_the_possible_ones_are_told() -> None:
    env, *_ = begun("classic/tictactoe_v3")
    assert env.step("4")[0].endswith("0 1 2\n3 O 5\n6 7 8\nPossible: 0, 1, 2, 3, 5, 6, 7, 8.")  # type: ignore[index]
    for message in ("4", "1 or 2", "nothing"):
        hint, *rest = env.step(message)  # type: ignore[misc]
        assert hint.endswith("Answer with one of: 0, 1, 2, 3, 5, 6, 7, 8.")
        assert rest == [0.0, False, False, {"agent": "player_2"}]
    assert env.step("0")[4]["agent"] == "player_1"  # type: ignore[index]


def test_what_agents_choose_at_once_is_hidden_until_both_have_chosen() -> None:
    env, first, _ = begun("classic/rps_v2", kwargs={"max_cycles": 1})
    assert first.endswith("Actions: rock, paper, scissors.\nThe other's last choice: none yet.")
    observation, *_ = env.step("Paper!")  # type: ignore[misc]
    assert observation.endswith("The other's last choice: none yet.")
    _, reward, terminated, truncated, info = env.step("rock")  # type: ignore[misc]
    assert (reward, terminated, truncated) == (-1.0, False, True)
    assert info["rewards"] == {"player_0": 1.0, "player_1": -1.0}


def test_a_move_of_chess_is_two_squares() -> None:
    env, first, _ = begun("classic/chess_v6")
    assert "Possible: " in first
    assert re.search(r"\be2e4\b", first)
    for move in ("f2f3", "e7e5", "g2g4"):
        assert env.step(f"I play {move}.")[2:4] == (False, False)  # type: ignore[index]
    assert env.step("e1e5")[0].startswith("Your message names no action.")  # type: ignore[index]
    reward, terminated, _, info = env.step("d8h4")[1:]  # type: ignore[index]
    assert (reward, terminated, info["success"]) == (
        1.0,
        True,
        {"player_0": False, "player_1": True},
    )


def test_a_random_player_plays_games_of_any_actions_to_their_end() -> None:
    for name, options in (
        ("classic/go_v5", {"board_size": 5}),
        ("classic/rps_v2", {"num_actions": 5}),
    ):
        env, *_ = begun(name, seed=3, kwargs=options)
        rng, over = random.Random(0), False
        while not over:
            reply: Any = env.step(random_player(env, rng))
            assert not reply[0].startswith("Your message")
            over = reply[2] or reply[3]


def test_a_config_says_who_plays_each_agent(tmp_path: Any) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "env:\n  name: pettingzoo:classic/connect_four_v3\n"
        '  agents: {player_1: {name: scripted, player: "agentrl.envs.pettingzoo:random_player"}}\n'
    )
    assert load_config(config).config.env.agents["player_1"].name == "scripted"


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("classic/connect_for_v3", "No module named 'pettingzoo.classic.connect_for_v3'"),
        ("butterfly/no_such_game", "is installed by: pip install 'pettingzoo[butterfly]'"),
        ("classic", "neither `env` nor `parallel_env`"),
        ("json", "neither `env` nor `parallel_env`"),
    ],
)
def test_a_wrong_address_says_the_way_out(address: str, said: str) -> None:
    with pytest.raises(PluginError) as error:
        plugins.load("envs", f"pettingzoo:{address}")
    assert said in str(error.value)


def test_games_of_pictures_and_wrong_keywords_are_refused() -> None:
    pictures = "tests.envs.pictures"
    with pytest.raises(
        ConfigError, match=r"an observation of .* is an image, an array of \(64, 64, 3\) in uint8"
    ):
        begun(pictures)
    with pytest.raises(ConfigError, match="cannot make 'classic/rps_v2'"):
        begun("classic/rps_v2", kwargs={"num_action": 3})
