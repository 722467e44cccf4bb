"""The results of a run's evaluations as rows of a table, for reports and model cards."""

import math
from collections.abc import Mapping, Sequence
from typing import Any


def evaluation_table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each evaluation, by suite and step; held-out tasks first.

    Its `suite` and `step` (the number of steps before it), `success` with the bounds `low` and
    `high`, the mean `score`, and how many `episodes` counted and `failed`. What is unknown is None.
    """
    found = []
    for row in rows:
        for key in row:
            prefix, _, metric = key.rpartition("/")
            if metric == "success" and (prefix == "eval" or prefix.startswith("eval/")):
                names = {"low": "success_low", "high": "success_high", "score": "reward"}
                names |= {"episodes": "episodes", "failed": "failed"}
                values = {short: row.get(f"{prefix}/{name}") for short, name in names.items()}
                suite = prefix.removeprefix("eval").removeprefix("/")
                values["success"] = row[key]
                known = {
                    name: None if value is None or math.isnan(value) else value
                    for name, value in values.items()
                }
                found.append({"suite": suite or "held out", "step": row["step"], **known})
    return sorted(found, key=lambda one: (one["suite"] != "held out", one["suite"], one["step"]))
