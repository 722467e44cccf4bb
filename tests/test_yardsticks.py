"""The yardsticks: their settings are right before hours are spent on them, and the page is what the
curves say.
"""

import random
import re
from collections import Counter
from pathlib import Path

import pytest

from agentrl.config import load_config
from benchmarks.yardsticks.curves import read_results, write_results
from benchmarks.yardsticks.page import HEAD, section, verdict_of
from benchmarks.yardsticks.table import YARDSTICKS
from benchmarks.yardsticks.tic_tac_toe import (
    AgainstMinimax,
    TicTacToe,
    best_moves,
    clumsy_player,
    moves,
    value,
)
from benchmarks.yardsticks.yardstick import EXAMPLES, Curve, Order, Yardstick

DOCS = Path(__file__).parents[1] / "docs"
GAME = Yardstick(
    "game", "One is better.", "t_maze", {"a": [], "b": []}, [Order("a", "b")], metric="win"
)


def ending(*values: float) -> Curve:
    return Curve(range(len(values)), [10 * n for n in range(len(values))], values, 60, "abc")


@pytest.mark.parametrize("yardstick", YARDSTICKS, ids=lambda one: one.name)
def test_every_arm_of_a_yardstick_is_a_valid_run(yardstick: Yardstick) -> None:
    configs = [
        load_config(
            EXAMPLES / f"{yardstick.config}.yaml", [*yardstick.settings, *settings]
        ).config.model_dump()
        for settings in yardstick.arms.values()
    ]
    assert all(one != other for n, one in enumerate(configs) for other in configs[:n])
    assert {arm for order in yardstick.orders for arm in (order.better, order.worse)} <= set(
        yardstick.arms
    )


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ((0.9, 0.8, 0.85), (0.5, 0.4, 0.5), "holds"),
        ((0.5, 0.4, 0.5), (0.9, 0.8, 0.85), "reversed"),
        ((0.9, 0.2, 0.5), (0.5, 0.4, 0.5), "not shown"),
        ((0.9,), (0.5,), "not shown"),
    ],
)
def test_an_order_holds_if_seeds_agree(
    first: tuple[float, ...], second: tuple[float, ...], words: str
) -> None:
    arms = {
        arm: {str(seed): ending(0.1, end) for seed, end in enumerate(ends)}
        for arm, ends in {"a": first, "b": second}.items()
    }
    assert verdict_of(GAME, GAME.orders[0], arms).words == words


def test_an_order_at_equal_tokens_is_that_of_the_shorter_run() -> None:
    arms = {
        "a": {"1": ending(0.0, 0.4, 0.8), "2": ending(0.0, 0.4, 0.9)},
        "b": {"1": ending(0.0, 0.5), "2": ending(0.0, 0.6)},
    }
    found = verdict_of(GAME, GAME.orders[0], arms)
    assert (found.words, round(found.difference, 6)) == ("holds", 0.3)
    equal = verdict_of(GAME, GAME.orders[0], arms, equal_tokens=True)
    assert (equal.words, round(equal.difference, 6)) == ("reversed", -0.15)


def test_a_run_has_collapsed_if_it_lost_most_of_what_it_had_gained() -> None:
    assert ending(0.2, 0.8, 0.3).collapsed("high")
    assert not ending(0.2, 0.8, 0.6).collapsed("high")
    assert not ending(0.2, 0.22, 0.2).collapsed("high")
    assert ending(0.8, 0.2, 0.7).collapsed("low")


def test_the_page_is_what_the_curves_say(tmp_path: Path) -> None:
    results = read_results()
    page = (DOCS / "yardsticks.md").read_text()
    assert page.startswith(HEAD)
    for yardstick in YARDSTICKS:
        arms = results.get(yardstick.name)
        assert (f"`{yardstick.name}`" if arms is None else section(yardstick, arms)) in page
    pictures = set(re.findall(r"\(pictures/(yardstick_.+?\.png)\)", page))
    assert pictures == {one.name for one in (DOCS / "pictures").glob("yardstick_*.png")}
    write_results(results, tmp_path / "results.json")
    assert read_results(tmp_path / "results.json") == results


def test_whoever_plays_best_in_tic_tac_toe_never_loses() -> None:
    assert value("." * 9, "X") == 0
    ends = Counter[float]()
    for seed in range(100):
        env, rng = AgainstMinimax(), random.Random(seed)
        env.reset(seed=seed, options={})
        ended, reward = False, 0.0
        while not ended:
            skill = seed % 2  # every other player is as good
            _, reward, ended, *_ = env.step(clumsy_player(env, rng, skill=float(skill)))
        ends[reward] += 1
        assert reward <= 0
        assert reward == 0 or seed % 2 == 0
    assert min(ends[0.0], ends[-1.0]) > 20


@pytest.mark.parametrize(
    ("cells", "rewards"),
    [
        ("14253", {"first": 1.0, "second": -1.0}),
        ("1422", {"first": 1.0, "second": -1.0}),
        ("1x", {"first": 1.0, "second": -1.0}),
        ("132465798", {"first": 0.0, "second": 0.0}),
    ],
)
def test_a_row_wins_tic_tac_toe_and_a_taken_cell_loses(
    cells: str, rewards: dict[str, float]
) -> None:
    env = TicTacToe()
    seen, told = env.reset(seed=0, options={})
    assert (seen, told["agent"]) == ("1 2 3\n4 5 6\n7 8 9", "first")
    for number, cell in enumerate(cells, 1):
        seen, _, ended, _, told = env.step(cell)
        assert ended == (number == len(cells))
    assert told["rewards"] == rewards
    assert told["success"] == {agent: reward >= 0 for agent, reward in rewards.items()}


def test_each_agent_of_tic_tac_toe_sees_its_own_marks_as_x() -> None:
    env = TicTacToe()
    env.reset(seed=0, options={})
    assert env.step("5")[0] == "1 2 3\n4 O 6\n7 8 9"
    assert env.step("1")[0] == "O 2 3\n4 X 6\n7 8 9"
    assert best_moves("XX.OO....", "X") == [2]
    assert moves("XX.OO....") == [2, 5, 6, 7, 8]
