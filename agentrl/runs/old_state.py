"""The state of runs that were begun before checkpoints had `state.json`.

Such a run kept its state in `metrics.jsonl`, under the names of metrics, and its pending
evaluations in `owed_evaluations.json`. This is the only module that reads state from there. It is
asked when a run of such a version is resumed for the first time.
"""

import json
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from agentrl.rollout.results import Results

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]
"""A row of `metrics.jsonl`."""


def state_in_metrics(rows: Iterable[Row], step: int) -> dict[str, Any]:
    """The states of all parts after `step` steps, by the part's name, as `RunState.load` takes
    them.
    """
    rows = [row for row in rows if row["step"] < step]
    return {
        "batch_processing": _batch_processing_state(rows),
        "opponents": _opponents_state(rows),
        "tasks": _mixture_state(rows),
    }


def _batch_processing_state(rows: Iterable[Row]) -> dict[str, Any]:
    # Of values that are replaced in each step, the last row has the newest.
    multipliers: dict[str, float] = {}
    learners: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith("constraints/multiplier/"):
                multipliers[name.removeprefix("constraints/multiplier/")] = value
            elif match := re.fullmatch(r"(envs/.+?/)?baseline/(.+)", name):
                learner = learners.setdefault(match[1] or "", {"baselines": {}})
                learner["baselines"][match[2]] = value
    return {"multipliers": multipliers, "learners": learners}


def _opponents_state(rows: Iterable[Row]) -> Mapping[str, Any]:
    results = Results()
    for row in rows:
        tallies: dict[int, tuple[float, float]] = {}
        for name, episodes in row.items():
            if match := re.fullmatch(r"opponents/(\d+)/(.+)/episodes", name):
                version = int(match[1])
                won = episodes * row[f"opponents/{version}/{match[2]}/success"]
                before = tallies.get(version, (0.0, 0.0))
                tallies[version] = (before[0] + won, before[1] + episodes)
        results.add(tallies)
    return results.state()


def _mixture_state(rows: Iterable[Row]) -> dict[str, Any]:
    # The metric has the tokens of one step, and the state their sum.
    tokens: dict[str, float] = defaultdict(float)
    for row in rows:
        for name, value in row.items():
            if match := re.fullmatch(r"envs/(.+)/tokens", name):
                tokens[match[1]] += value
    return {"tokens": dict(tokens)}


def evaluations_in_metrics(rows: Iterable[Row]) -> dict[int, dict[str, dict[str, float]]]:
    """The metrics of finished evaluations, by the steps of their weights and the suite."""
    finished: dict[int, dict[str, dict[str, float]]] = defaultdict(dict)
    for row in rows:
        for name in row:
            if match := re.fullmatch(r"eval/(?:([\w-]+)/)?success", name):
                metrics = {key: value for key, value in row.items() if key.startswith("eval/")}
                finished[row["step"]][match[1] or "held_out"] = metrics
    return dict(finished)


def pending_evaluations(path: Path) -> dict[int, list[str]]:
    """The suites in an `owed_evaluations.json`, by the steps of the weights; none if there is no
    such file, or it cannot be read.
    """
    if not path.exists():
        return {}
    try:
        return {
            int(step): [str(name) for name in names]
            for step, names in json.loads(path.read_text()).items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        logger.warning(
            "%s cannot be read (%s): evaluations that had begun are left out", path, error
        )
        return {}
