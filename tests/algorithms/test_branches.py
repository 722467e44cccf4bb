"""Credit in trees: the expected gradient, with all trees enumerated, and the noise of a token."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agentrl.algorithms.branches import branch_advantages, tree_advantages
from agentrl.algorithms.gigpo import Gigpo
from agentrl.algorithms.grpo import Grpo, Rloo
from agentrl.algorithms.policy_loss import PolicyAlgorithm
from agentrl.algorithms.ppo import TurnPpo
from agentrl.algorithms.samples import samples_of
from agentrl.oracles.estimators import (
    Branching,
    Oracle,
    chain,
    cosine,
    dialogue,
    residual,
    stopping,
    t_maze,
)
from agentrl.trajectory import BranchPoint, Group
from tests.tiers import evenly

PROBLEMS = {
    "stopping": stopping(),
    "t_maze": t_maze(),
    "chain": chain(2),
    "dialogue": dialogue(),
    "long chain": chain(3),
}
ONE = {"normalizer": 1.0}
BRANCH = Grpo(Grpo.Config(**ONE, advantage="branch"))
TREE = Grpo(Grpo.Config(**ONE, advantage="tree"))
LATER = {"stopping": 1, "t_maze": 2, "chain": 1, "dialogue": 1, "long chain": 1}
"""The turn at which the trees of a problem branch."""


def measured(
    algorithm: PolicyAlgorithm, problem: str, branching: Branching, members: int = 2
) -> tuple[float, float]:
    """The residual and the cosine of an algorithm's expected gradient in trees."""
    oracle = Oracle(PROBLEMS[problem])
    logits = oracle.logits(seed=1)
    found = oracle.expected_gradient(algorithm, logits, members=members, branching=branching)
    wanted = oracle.gradient(logits)
    return residual(found, wanted), cosine(found, wanted)


@pytest.mark.parametrize(
    "problem", ["stopping", "t_maze", "chain", pytest.param("dialogue", marks=pytest.mark.slow)]
)
def test_the_expected_gradient_of_branches_is_that_of_the_mean_return(problem: str) -> None:
    off, direction = measured(BRANCH, problem, Branching((LATER[problem],)))
    assert off < 1e-5
    assert direction > 0.999


@pytest.mark.parametrize(
    "branching", [Branching((1,), width=2), Branching((1, 2)), Branching((1, 5))], ids=str
)
def test_it_is_also_with_several_branches_at_several_turns(branching: Branching) -> None:
    problem = "long chain" if branching.turns == (1, 2) else "stopping"
    members = 1 if branching.turns == (1, 2) else 2
    oracle = Oracle(PROBLEMS[problem])
    logits = oracle.logits(seed=1)
    found = oracle.expected_gradient(BRANCH, logits, members=members, branching=branching)
    wanted = oracle.gradient(logits)
    if members == 1:  # nothing is known of the first turn, so only the others count
        first = oracle.sizes[oracle.states[0]]
        found, wanted = found[first:], wanted[first:]
    assert residual(found, wanted) < 1e-5
    assert cosine(found, wanted) > 0.999


def test_without_branches_it_is_leave_one_out() -> None:
    oracle = Oracle(PROBLEMS["stopping"])
    group = oracle.group([0, 1, 2, 3], oracle.logits(1))
    alone = Rloo(Rloo.Config(**ONE)).advantages(group)
    wanted = [[one] * len(t.turns) for one, t in zip(alone, group.trajectories, strict=True)]
    for own, expected in zip(branch_advantages(group), wanted, strict=True):
        assert own == pytest.approx(expected)


def tree_group() -> Group:
    """Two episodes of the long chain; the first has two branches, at turn 1 and at turn 2."""
    oracle = Oracle(PROBLEMS["long chain"])
    plain = oracle.group([0, 7, 2, 1], oracle.logits(1))
    trunk, other, early, late = plain.trajectories
    branches = [
        replace(early, branch=BranchPoint(trunk.id, 1, 1 / 3), trained_turns=1),
        replace(late, branch=BranchPoint(trunk.id, 2, 1 / 3), trained_turns=2),
    ]
    rewards = (1.0, 0.0, 4.0, 10.0)
    scores = tuple(
        replace(s, value=r, turns=()) for s, r in zip(plain.scores, rewards, strict=True)
    )
    return replace(plain, trajectories=(trunk, other, *branches), scores=scores)


def test_the_advantages_of_a_tree_are_those_by_hand() -> None:
    # The tree is worth (1 + 4 + 10) / 3 = 5, the other episode 0.
    # Turn 0: all three leaves pass, each less 0, each a third of the tree.
    first = 5.0
    # At turn 1 there are the early branch (4), on the trunk a mean of 5.5, and the 0 of before.
    early = (4 - (5.5 + 0) / 2) / 3
    second = ((1 - (4 + 0) / 2) + (10 - 2)) / 3
    # At turn 2: the trunk (1), the late branch (10), and the 2 of before.
    late = (10 - (1 + 2) / 2) / 3
    third = (1 - (10 + 2) / 2) / 3
    found = branch_advantages(tree_group())
    assert found[0] == pytest.approx([first, second, third])
    assert found[1] == pytest.approx([-5.0] * 3)
    assert found[2] == pytest.approx([0, early, early])
    assert found[3] == pytest.approx([0, 0, late])


def test_a_shared_turn_of_tree_grpo_has_the_sum_of_its_leaves() -> None:
    group = tree_group()
    found = tree_advantages(group, by_std=False)
    within, across = np.array([1, 4, 10]) - 5, np.array([1, 0, 4, 10]) - 3.75
    leaf = {0: within[0] + across[0], 2: within[1] + across[2], 3: within[2] + across[3]}
    assert found[0] == pytest.approx([sum(leaf.values()), leaf[0] + leaf[3], leaf[0]])
    assert found[1] == pytest.approx([across[1]] * 3)
    assert found[2][1:] == pytest.approx([leaf[2]] * 2)


def test_each_sampled_token_is_trained_on_in_one_row() -> None:
    group = tree_group()
    sampled = sum(len(u.completion.token_ids) for t in group.trajectories for u in t.new_turns)
    rows = list(samples_of([group], BRANCH))
    assert sum(int(row.loss_mask.sum()) for row in rows) == sampled
    assert len(rows) == 4


def test_what_has_left_an_episode_of_another_group_is_refused() -> None:
    group = tree_group()
    orphan = replace(group, trajectories=group.trajectories[1:], scores=group.scores[1:])
    with pytest.raises(ValueError, match="has left 0, which is no whole episode of its group"):
        BRANCH.advantages(orphan)


@pytest.mark.parametrize(
    ("algorithm", "setting"),
    [
        (Grpo, {"gamma": 0.9}),
        (Grpo, {"reward_to_go": True}),
        (Grpo, {"kl_reward": 0.1}),
        (Gigpo, {}),
    ],
)
def test_what_does_not_go_with_trees_is_refused(
    algorithm: type[Grpo], setting: dict[str, object]
) -> None:
    with pytest.raises(ValueError, match="advantage=branch compares"):
        algorithm.Config(advantage="branch", **setting)  # type: ignore[arg-type]


CASES: dict[str, tuple[PolicyAlgorithm, int]] = {
    "`grpo`": (Grpo(Grpo.Config(**ONE)), 2),
    "`rloo`": (Rloo(Rloo.Config(**ONE)), 2),
    "`rloo`, groups of 4": (Rloo(Rloo.Config(**ONE)), 4),
    "`gigpo`": (Gigpo(Gigpo.Config(**ONE, step_gamma=1.0)), 2),
    "`turn_ppo`, exact critic": (
        TurnPpo(TurnPpo.Config(normalizer=1.0, whiten=False, truncated="terminal")),
        2,
    ),
    "`advantage=branch`": (BRANCH, 2),
    "`advantage=tree`": (TREE, 2),
}
"""Algorithms, with the members of their groups, or trees with a branch each."""


def table_row(name: str, problem: str) -> tuple[float, float, float]:
    """Residual, cosine and noise of an algorithm on a problem, for a row of the docs."""
    algorithm, members = CASES[name]
    branching = Branching((LATER[problem],)) if algorithm in (BRANCH, TREE) else Branching()
    oracle = Oracle(PROBLEMS[problem])
    noise = oracle.noise(algorithm, oracle.logits(seed=1), members=members, branching=branching)
    return *measured(algorithm, problem, branching, members), noise


@pytest.mark.parametrize(
    "problem", ["stopping", "t_maze", "chain", pytest.param("dialogue", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("name", evenly(CASES, 3))
def test_the_docs_say_how_biased_and_how_noisy_they_are(name: str, problem: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "branches.md").read_text()
    (row,) = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", page, re.MULTILINE)
    cells = dict(zip(("stopping", "t_maze", "chain", "dialogue"), row.split("|"), strict=True))
    off, direction, noise = map(float, cells[problem].split(", "))
    found = table_row(name, problem)
    assert (off, direction) == pytest.approx(found[:2], abs=6e-3)
    assert noise == pytest.approx(found[2], abs=0.6)
