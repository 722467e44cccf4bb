"""The trees of a group (`rollout.branches`): the parent of each branch, the turn at which it
leaves, and the value of the states there.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any


def trees_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The episodes of a group, each followed by its branches; empty if there are no branches.

    `left`: the episode that it has left, at `turn`. `states`: those in which others have left it,
    each with the `turn` that is next, the mean score of the episodes that went through it (`value`,
    `None` if no score is known), and their number (`leaves`).
    """
    if not any(row["parent"] for row in rows):
        return []
    # An episode of several parts or agents has several rows; it is the same tree.
    by_id = {row["id"]: row for row in rows}
    branches: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in by_id.values():
        if row["parent"] in by_id:
            branches[row["parent"]].append(row)
    found = []
    for row in by_id.values():
        if row["parent"] in by_id:
            continue
        # The last ones to leave come first, so that a drawing has no crossings.
        leaving = sorted(branches[row["id"]], key=lambda row: (-row["branch_turn"], row["id"]))
        found += [_node(row, leaving), *(_node(branch, []) for branch in leaving)]
    return found


def _node(row: Mapping[str, Any], branches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    states = []
    for turn in sorted({one["branch_turn"] for one in branches}):
        through = [row, *(one for one in branches if one["branch_turn"] >= turn)]
        scores = [one["score"] for one in through if one["score"] is not None]
        value = fmean(scores) if scores else None
        states.append({"turn": turn, "value": value, "leaves": len(through)})
    return {
        "id": row["id"],
        "left": row["parent"],
        "turn": row["branch_turn"],
        "turns": row["num_turns"],
        "score": row["score"],
        "states": states,
    }
