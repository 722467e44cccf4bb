"""MiniGrid and BabyAI as boards of text."""

import sys
import threading
from importlib.util import find_spec
from typing import Any

import pytest

from agentrl import plugins
from agentrl.envs import foreign
from agentrl.envs.foreign import silence_output
from agentrl.errors import EnvError
from agentrl.protocols import Env
from agentrl.testing import check_env

needs_minigrid = pytest.mark.skipif(
    find_spec("minigrid") is None, reason="minigrid is not installed"
)

BOARD = """\
Mission: use the key to open the door and then get to the goal
## ## ## ## ##
## .. ## .. ##
## vv LY .. ##
## KY ## GG ##
## ## ## ## ##
You carry nothing."""


def make(name: str) -> Env:
    env: Env = plugins.load("envs", f"gymnasium:minigrid:{name}")()
    return env


@needs_minigrid
@pytest.mark.parametrize(
    "name",
    ["MiniGrid-LavaCrossingS9N1-v0", "MiniGrid-Dynamic-Obstacles-5x5-v0", "BabyAI-PutNextLocal-v0"],
)
def test_boards_keep_the_contract(name: str) -> None:
    check_env(plugins.load("envs", f"gymnasium:minigrid:{name}"), seeds=(0, 4), max_turns=12)


@needs_minigrid
def test_a_key_is_fetched_and_its_door_opened_by_words() -> None:
    env = make("MiniGrid-DoorKey-5x5-v0")
    first: Any
    first, _ = env.reset(seed=1, options={})  # type: ignore[misc]
    assert "Actions: left, right, forward, pickup, drop, toggle, done." in first
    assert first.endswith(BOARD)
    seen: list[Any] = [
        env.step(word)
        for word in ("pickup", "left", "toggle", "forward", "I go forward", "right", "forward")
    ]
    texts = [text for text, *_ in seen]
    assert "## .. ## GG ##" in texts[0]
    assert [text.rpartition("\n")[2] for text in texts] == ["You carry a yellow key."] * 7
    assert "## >> LY .. ##" in texts[1]
    assert "## >> OY .. ##" in texts[2]
    assert "## .. >> .. ##" in texts[3]
    assert [step[1:4] for step in seen[:-1]] == [(0.0, False, False)] * 6
    assert seen[-1][1] == pytest.approx(1 - 0.9 * 7 / 250)
    assert seen[-1][2:] == (True, False, {"success": True})


@needs_minigrid
def test_a_board_of_three_actions_offers_three() -> None:
    first: Any
    first, _ = make("MiniGrid-Dynamic-Obstacles-5x5-v0").reset(seed=1, options={})  # type: ignore[misc]
    assert "Actions: left, right, forward.\n" in first


@needs_minigrid
def test_green_and_grey_are_told_apart() -> None:
    first: Any
    first, _ = make("BabyAI-BossLevel-v0").reset(seed=1, options={})  # type: ignore[misc]
    assert {"KG", "BE", "DE"} <= set(first.split())


@needs_minigrid
def test_what_babyai_prints_while_it_makes_a_puzzle_is_dropped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    env: Any = make("BabyAI-PutNextLocal-v0")
    env.reset(seed=4, options={})
    assert capsys.readouterr().out == ""
    env._env.reset(seed=4)
    assert "Sampling rejected" in capsys.readouterr().out


def test_only_the_thread_that_is_hushed_is_not_heard(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    with silence_output():
        print("dropped")
        assert sys.stdout.encoding == before.encoding
        other = threading.Thread(target=print, args=("heard",))
        other.start()
        other.join()
    print("heard too")
    assert sys.stdout is before
    assert capsys.readouterr().out == "heard\nheard too\n"


def test_a_reset_that_never_ends_is_named_to_those_who_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(foreign, "GLOBAL_RNG_SECONDS", 0.01)
    with silence_output(), pytest.raises(EnvError, match="isolation=process"), silence_output():
        pass
