"""Held-out tasks over all evaluations of a run: first solved, best, worst, and now."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Le

from agentrl.errors import ConfigError
from agentrl.observe.reports import HELD_OUT
from agentrl.viewer.episodes import MOST_ROWS, EpisodeIndex

_SOLVED_SHARE = 0.5
"""Share of a task's episodes that succeed from which on an evaluation has solved it."""
_Task = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TaskQuery:
    """The tasks of an evaluation (by default the first) to show, and their order."""

    name: str = ""
    text: str = ""
    show: str = ""
    """One of `lost`, `never`, `gained`, `always`; empty for all."""
    sort: str = "task"
    """One of `task`, `first`, `best`, `worst`, `last`, `change`."""
    descending: bool = False
    offset: Annotated[int, Ge(0)] = 0
    limit: Annotated[int, Ge(0), Le(MOST_ROWS)] = 100


def evaluations(
    index: EpisodeIndex, names: Mapping[str, Sequence[int]], query: TaskQuery
) -> dict[str, Any]:
    """The tasks of an evaluation. `names`: the evaluations, and the numbers of steps before each.

    `columns`: each evaluation in order; `tasks`: in `cells` what a task did in each of them
    (success, score, episodes, failed ones, an episode), the steps before the `first` that solved
    it, its `best` and `worst` value with the steps before, the `last` value, and its `change` since
    the first one. A value is the score, or where there is none the success. `counts`: tasks by what
    became of them; `low` and `high`: the range of the scores.

    Raises:
        ConfigError: there is no such evaluation, order or kind of task.
    """
    ordered = sorted(names, key=lambda name: (name != HELD_OUT, name))
    if not ordered:
        return {"names": [], "name": "", "columns": [], "tasks": [], "counts": {}, "total": 0}
    name = query.name or ordered[0]
    for given, allowed in (
        (name, ordered),
        (query.sort, list(_ORDERS)),
        (query.show or "all", ["all", *_KINDS]),
    ):
        if given not in allowed:
            raise ConfigError(f"there is no {given!r} here, only {', '.join(allowed)}")
    rows = index.evaluated(name)
    steps = sorted({row["step"] for row in rows})
    tasks = _tasks(rows, steps)
    shown = [
        task
        for task in tasks
        if query.text.lower() in task["task"].lower()
        and (not query.show or _KINDS[query.show](task))
    ]
    known = [task for task in shown if _ORDERS[query.sort](task) is not None]
    known.sort(key=_ORDERS[query.sort], reverse=query.descending)
    shown = [*known, *(task for task in shown if _ORDERS[query.sort](task) is None)]
    scores = [row["score"] for row in rows if row["score"] is not None]
    return {
        "names": [[each, sorted(names[each])] for each in ordered],
        "name": name,
        "columns": [_column(step, [row for row in rows if row["step"] == step]) for step in steps],
        "tasks": shown[query.offset : query.offset + query.limit],
        "total": len(shown),
        "counts": {
            "all": len(tasks),
            **{kind: sum(map(holds, tasks)) for kind, holds in _KINDS.items()},
        },
        "low": min(scores, default=None),
        "high": max(scores, default=None),
    }


def _tasks(rows: Sequence[Mapping[str, Any]], steps: Sequence[int]) -> list[_Task]:
    by_task: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        by_task.setdefault(row["task"], {})[row["step"]] = row
    return [_summarise_task(name, own, steps) for name, own in by_task.items()]


def _summarise_task(name: str, own: Mapping[int, Mapping[str, Any]], steps: Sequence[int]) -> _Task:
    values = [
        (value, step) for step in steps if step in own and (value := _value(own[step])) is not None
    ]
    solved = [step for step in steps if step in own and _is_solved(own[step])]
    played = [own[step] for step in steps if step in own]
    shown = ("success", "score", "episodes", "failed", "id")
    return {
        "task": name,
        "env": played[0]["env"],
        "cells": [[own[at][name] for name in shown] if at in own else None for at in steps],
        "first": solved[0] if solved else None,
        "solved": len(solved),
        "played": len(played),
        "begins": _is_solved(played[0]),
        "now": _is_solved(played[-1]),
        "judged": any(row["success"] is not None for row in played),
        "best": max(values, key=lambda pair: pair[0], default=None),
        "worst": min(values, key=lambda pair: pair[0], default=None),
        "last": values[-1][0] if values else None,
        "change": values[-1][0] - values[0][0] if len(values) > 1 else None,
    }


def _value(row: Mapping[str, Any]) -> float | None:
    found: float | None = row["success"] if row["score"] is None else row["score"]
    return found


def _is_solved(row: Mapping[str, Any]) -> bool:
    return row["success"] is not None and row["success"] >= _SOLVED_SHARE


def _column(step: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "step": step,
        "solved": sum(map(_is_solved, rows)),
        "failed": sum(r["failed"] for r in rows),
    }
    for name in ("success", "score"):
        values = [row[name] for row in rows if row[name] is not None]
        found[name] = sum(values) / len(values) if values else None
    return found


_KINDS: Mapping[str, Callable[[_Task], bool]] = {
    "lost": lambda task: task["solved"] > 0 and not task["now"],
    "never": lambda task: task["judged"] and not task["solved"],
    "gained": lambda task: task["now"] and not task["begins"],
    "always": lambda task: task["judged"] and task["solved"] == task["played"],
}
_ORDERS: Mapping[str, Callable[[_Task], Any]] = {
    "task": lambda task: task["task"],
    "first": lambda task: task["first"],
    "best": lambda task: task["best"] and task["best"][0],
    "worst": lambda task: task["worst"] and task["worst"][0],
    "last": lambda task: task["last"],
    "change": lambda task: task["change"],
}
