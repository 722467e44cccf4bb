"""Credit in trees of episodes: those that have left another one at a turn say what the state there
is worth. Pure functions.

A tree is an episode and its branches (`Trajectory.branch`). Its leaves are these episodes, each
with a share of the tree, and a turn stands for all leaves that pass through it:

    turn          0      1      2
    episode       A0 --- A1 --- A2     shares 1/3, its turn 0 stands for all three
    branches       \\---- B1            1/3, from turn 1 on
                   \\---- C1 --- C2     1/3

Each leaf is by itself an episode of the policy, as long as where to branch was decided without
looking at what came after it. So the mean over the leaves, by their shares, is an unbiased estimate
of what a single episode estimates.

Dimension suffixes: G members of a group; J trees, L leaves of a tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import fsum

from agentrl.algorithms.advantages import Comparison, Deviation, compared
from agentrl.tokens.arrays import constant, scale_of, settled
from agentrl.trajectory import Group


@dataclass(slots=True)
class _Leaf:
    """An episode of a tree; `turn` is the first of its own."""

    member: int
    reward: float
    turn: int = 0
    share: float = 1.0


@dataclass(slots=True)
class _Tree:
    """An episode and its branches, in order of their turns."""

    trunk: _Leaf
    branches: list[_Leaf] = field(default_factory=list)

    @property
    def leaves(self) -> list[_Leaf]:
        return [self.trunk, *self.branches]

    @property
    def value(self) -> float:
        return _mean(self.leaves)

    def through(self, turn: int) -> list[_Leaf]:
        """The leaves that pass through a turn of the trunk."""
        return [self.trunk, *(leaf for leaf in self.branches if leaf.turn > turn)]


def branch_advantages(group: Group) -> list[list[float]]:
    """The advantages of the turns of each member: the difference of values.

    A turn is worth the mean return of the leaves that pass through it. Its baseline is the value of
    the state at the last branching before it, from the other continuations there: VinePPO
    (arXiv:2410.01679), for turns. They count together with the baseline of the state before, which
    counts as one more continuation, and so on back to the mean of the group's other trees: a single
    continuation is right, and so is none, where this is the leave-one-out baseline of whole
    returns. No baseline depends on the turn's own answer. A turn's share of the tree is in its
    advantage.

    Raises:
        ValueError: an episode has left one that is no whole episode of the group.
    """
    trees = _trees(group)
    rewards_G = list(group.rewards_G)
    scale = scale_of(rewards_G)
    found: list[list[float]] = [[0.0] * len(t.turns) for t in group.trajectories]
    if constant(rewards_G):
        return found
    values_J = [tree.value for tree in trees]
    for number, tree in enumerate(trees):
        others = [value for at, value in enumerate(values_J) if at != number]
        baseline = fsum(others) / len(others) if others else None
        branches = iter(tree.branches)
        left = next(branches, None)
        for turn in range(len(found[tree.trunk.member])):
            here: list[_Leaf] = []
            while left is not None and left.turn == turn:
                here.append(left)
                left = next(branches, None)
            through = tree.through(turn)
            for leaf in here:
                siblings = [one.reward for one in here if one is not leaf]
                known = [*siblings, _mean(through), *_given(baseline)]
                credit = settled(leaf.reward - fsum(known) / len(known), scale)
                count = len(found[leaf.member])
                found[leaf.member] = [0.0] * leaf.turn + [leaf.share * credit] * (count - leaf.turn)
            if here:
                known = [*(leaf.reward for leaf in here), *_given(baseline)]
                baseline = fsum(known) / len(known)
            if baseline is not None:
                found[tree.trunk.member][turn] = sum(
                    leaf.share * settled(leaf.reward - baseline, scale) for leaf in through
                )
    return found


def tree_advantages(
    group: Group, *, by_std: bool = True, deviation: Deviation = "population"
) -> list[list[float]]:
    """The advantages of the turns of each member: each leaf against the leaves of its tree, and
    against those of all trees.

    Tree-GRPO (arXiv:2509.21240), intra-tree and inter-tree advantages. A turn that several leaves
    share has the sum of theirs, as if each of them were trained on whole. Biased by design: a leaf
    is compared with itself and with those that share its beginning, divided by their spread, and
    later turns count more often.

    Raises:
        ValueError: an episode has left one that is no whole episode of the group.
    """
    trees = _trees(group)
    with_what: Comparison = "group_std" if by_std else "group_mean"
    rewards_G = list(group.rewards_G)
    scale = scale_of(rewards_G)
    across_G = compared(rewards_G, with_what, scale, deviation)
    credit_G = [0.0] * len(rewards_G)
    for tree in trees:
        within_L = compared([leaf.reward for leaf in tree.leaves], with_what, scale, deviation)
        for leaf, within in zip(tree.leaves, within_L, strict=True):
            credit_G[leaf.member] = within + across_G[leaf.member]
    found = [
        [credit] * len(t.turns) for credit, t in zip(credit_G, group.trajectories, strict=True)
    ]
    for tree in trees:
        own = found[tree.trunk.member]
        for turn in range(len(own)):
            own[turn] = fsum(credit_G[leaf.member] for leaf in tree.through(turn))
    return found


def _trees(group: Group) -> list[_Tree]:
    trees: dict[str, _Tree] = {}
    for member, trajectory in enumerate(group.trajectories):
        if trajectory.branch is None:
            trees[trajectory.id] = _Tree(_Leaf(member, group.rewards_G[member]))
    for member, trajectory in enumerate(group.trajectories):
        if trajectory.branch is not None:
            own = trajectory.branch
            tree = trees.get(own.parent)
            if tree is None:
                raise ValueError(
                    f"{trajectory.id} has left {own.parent}, which is no whole episode of its"
                    " group: credit in trees needs both"
                )
            tree.branches.append(_Leaf(member, group.rewards_G[member], own.turn, own.share))
            tree.trunk.share -= own.share
    for tree in trees.values():
        tree.branches.sort(key=lambda leaf: leaf.turn)
    return list(trees.values())


def _mean(leaves: Sequence[_Leaf]) -> float:
    """The mean return of leaves, by their shares."""
    return fsum(leaf.share * leaf.reward for leaf in leaves) / fsum(leaf.share for leaf in leaves)


def _given(baseline: float | None) -> list[float]:
    return [] if baseline is None else [baseline]
