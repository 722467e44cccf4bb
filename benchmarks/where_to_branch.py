"""Where to branch: the noise of the gradient's estimate for each sampled token, on the oracles.

    python benchmarks/where_to_branch.py                    # the table of docs/branches.md
    python benchmarks/where_to_branch.py t_maze --at level disagreement

All groups of two trees with a branch each are enumerated, so the numbers are exact: so many tokens
have to be sampled until the gradient is as large as its noise. Each member draws its own turn, by
the rule that training has too; `disagreement` knows what it would after many trees of this policy.
The last rows are the turns that are best and worst for all members, and groups without branches.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Literal, get_args

from agentrl.algorithms.grpo import Grpo
from agentrl.oracles.estimators import Branching, DrawnBranching, Oracle, cosine, residual
from agentrl.oracles.problems import chain, corridor, dialogue, t_maze
from agentrl.rollout.branches import BranchesConfig, BranchPlan, chances

At = Literal["uniform", "entropy", "every", "level", "disagreement"]
ATS: tuple[At, ...] = get_args(At)
ONE = {"normalizer": 1.0}
BRANCH = Grpo(Grpo.Config(**ONE, advantage="branch"))
ALONE = Grpo(Grpo.Config(**ONE, advantage="leave_one_out"))
PROBLEMS = {
    "t_maze": t_maze(2),
    "chain": chain(3),
    "corridor": corridor(),
    "dialogue": dialogue(),
}
MEMBERS = 2


@cache
def oracle_of(problem: str) -> Oracle:
    """The problem, with exact answers."""
    return Oracle(PROBLEMS[problem])


def last_turn(oracle: Oracle) -> int:
    """Most turns of an episode."""
    return max(len(path.turns) for path in oracle.paths)


def branching_at(at: At, oracle: Oracle, seed: int = 1) -> DrawnBranching:
    """Where trees branch, with the probabilities of what is drawn."""
    rule, limit = BranchesConfig(at=at), last_turn(oracle)
    turns = rule.possible(limit)
    if at == "uniform":
        drawn = [1 / len(turns)] * len(turns)
    elif at == "disagreement":
        drawn = chances(oracle.spreads(oracle.logits(seed)), turns, limit)
    else:  # nothing is drawn
        return DrawnBranching(((1.0, rule.plan(limit, Random(0))),), rule.share)
    plans = (BranchPlan(frozenset([turn]), points=1) for turn in turns)
    return DrawnBranching(tuple(zip(drawn, plans, strict=True)), rule.share)


def noise(problem: str, branching: Branching | DrawnBranching, seed: int = 1) -> float:
    """The tokens that have to be sampled until the gradient is as large as its noise."""
    oracle = oracle_of(problem)
    return oracle.noise(BRANCH, oracle.logits(seed), members=MEMBERS, branching=branching)


def noise_at(at: At, problem: str) -> float:
    """The noise of branches that leave where the rule says."""
    return noise(problem, branching_at(at, oracle_of(problem)))


def noise_by_turn(problem: str) -> list[float]:
    """The noise if all members branch at the first turn, at the second, and so on."""
    turns = range(1, last_turn(oracle_of(problem)))
    return [noise(problem, Branching((turn,))) for turn in turns]


def noise_without(problem: str, members: int) -> float:
    """The noise of groups of whole episodes."""
    oracle = oracle_of(problem)
    return oracle.noise(ALONE, oracle.logits(seed=1), members=members)


def bias_at(at: At, problem: str) -> tuple[float, float]:
    """The part of the true gradient that is not along the expected one, and their cosine."""
    oracle = oracle_of(problem)
    logits = oracle.logits(seed=1)
    where = branching_at(at, oracle)
    found = oracle.expected_gradient(BRANCH, logits, members=MEMBERS, branching=where)
    wanted = oracle.gradient(logits)
    return residual(found, wanted), cosine(found, wanted)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("problems", nargs="*", metavar="PROBLEM", help=f"{', '.join(PROBLEMS)}")
    parser.add_argument("--at", nargs="+", choices=ATS, default=ATS)
    given = parser.parse_args(arguments)
    if unknown := sorted(set(given.problems) - PROBLEMS.keys()):
        parser.error(f"there is no {unknown[0]!r}: {', '.join(PROBLEMS)}")
    names = given.problems or list(PROBLEMS)
    by_turn = {name: noise_by_turn(name) for name in names}
    rows = {f"`{at}`": [noise_at(at, name) for name in names] for at in given.at}
    rows["the best turn"] = [min(by_turn[name]) for name in names]
    rows["the worst turn"] = [max(by_turn[name]) for name in names]
    for members in (MEMBERS, 2 * MEMBERS):
        rows[f"no branches, groups of {members}"] = [noise_without(one, members) for one in names]
    print(f"| where | {' | '.join(f'`{name}`' for name in names)} |")
    print(f"|{'---|' * (1 + len(names))}")
    for label, found in rows.items():
        print(f"| {label} | {' | '.join(f'{one:.1f}' for one in found)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
