"""Where branches leave changes the noise of the gradient, and never what it is on average."""

import re
from pathlib import Path

import pytest

from benchmarks.where_to_branch import (
    ATS,
    MEMBERS,
    PROBLEMS,
    At,
    bias_at,
    noise_at,
    noise_by_turn,
    noise_without,
    oracle_of,
)

FAST = ("t_maze",)
SIZES = [
    pytest.param(problem, marks=pytest.mark.slow if problem in FAST else pytest.mark.long)
    for problem in PROBLEMS
]


def told(label: str, problem: str) -> float:
    """A cell of the table in the docs."""
    page = (Path(__file__).parents[2] / "docs" / "branches.md").read_text()
    (head,) = re.findall(r"^\| where \|(.*)\|$", page, re.MULTILINE)
    (row,) = re.findall(rf"^\| {re.escape(label)} \|(.*)\|$", page, re.MULTILINE)
    names = [name.strip(" `") for name in head.split("|")]
    return dict(zip(names, map(float, row.split("|")), strict=True))[problem]


@pytest.mark.parametrize("problem", SIZES)
@pytest.mark.parametrize("at", ATS)
def test_the_docs_say_how_noisy_the_gradient_is(at: At, problem: str) -> None:
    assert noise_at(at, problem) == pytest.approx(told(f"`{at}`", problem), abs=0.06)


@pytest.mark.parametrize("problem", SIZES)
def test_the_docs_say_what_the_best_and_the_worst_turn_give(problem: str) -> None:
    found = noise_by_turn(problem)
    assert min(found) == pytest.approx(told("the best turn", problem), abs=0.06)
    assert max(found) == pytest.approx(told("the worst turn", problem), abs=0.06)


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("members", [MEMBERS, pytest.param(2 * MEMBERS, marks=pytest.mark.long)])
def test_the_docs_say_how_noisy_groups_without_branches_are(members: int, problem: str) -> None:
    label = f"no branches, groups of {members}"
    assert noise_without(problem, members) == pytest.approx(told(label, problem), abs=0.06)


@pytest.mark.parametrize("problem", SIZES)
@pytest.mark.parametrize("at", ATS)
def test_no_rule_changes_the_expected_gradient(at: At, problem: str) -> None:
    off, direction = bias_at(at, problem)
    assert off < 1e-5
    assert direction > 0.999


@pytest.mark.parametrize("at", ["entropy", "every", "level"])
def test_rules_that_draw_nothing_do_not_in_a_maze(at: At) -> None:
    off, direction = bias_at(at, "t_maze")
    assert off < 1e-5
    assert direction > 0.999


def test_what_is_decided_from_a_turn_on_is_the_same_until_the_junction() -> None:
    oracle = oracle_of("t_maze")
    logits = oracle.logits(seed=1)
    # Of each sign, the two ways differ in what is answered at the junction: p (1 - p) of the prize.
    probabilities = oracle.probabilities(logits).tolist()
    ways: dict[float, list[float]] = {}
    for chance, path in zip(probabilities, oracle.paths, strict=True):
        ways.setdefault(path.turns[-1][0], []).append(chance)
    decided = sum(one * other / (one + other) for one, other in ways.values())
    assert oracle.spreads(logits) == pytest.approx({1: decided, 2: decided, 3: decided})
