"""The summary of a run: `summary.json`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from agentrl.config.run_config import RunConfig
from agentrl.ledger.ledger import Ledger
from agentrl.observe.silence import Silence

Row = Mapping[str, Any]
"""A row of `metrics.jsonl`."""


def summarise(
    config: RunConfig, rows: Sequence[Row], ledger: Ledger, silence: Silence
) -> dict[str, Any]:
    """The summary of a run with these rows of metrics so far. `silence`: a new one, to repeat the
    warnings.

    The checksum of the weights, which takes long to compute, is left out.
    """
    trained = [row for row in rows if "reward" in row]
    tested = sorted((row for row in rows if "eval/success" in row), key=_step)  # some come late
    before, after = _ends(tested)
    return {
        "steps": count_steps(rows),
        "success_before": before.get("eval/success"),
        "success_before_interval": _interval(before),
        "episodes_before": before.get("eval/episodes"),
        "failed_before": before.get("eval/failed"),
        "success_after": after.get("eval/success"),
        "success_after_interval": _interval(after),
        "episodes_after": after.get("eval/episodes"),
        "failed_after": after.get("eval/failed"),
        "suites": {
            suite.name: _suite_results(rows, suite.name) for suite in config.evaluation.suites
        },
        "seconds": sum(row.get("seconds", 0.0) for row in trained),
        "max_staleness": config.rollout.max_staleness,
        "largest_staleness": max((row.get("staleness/max", 0) for row in trained), default=0),
        "largest_logprob_gap": max(
            (row.get("logprob_gap_max", 0.0) for row in trained), default=0.0
        ),
        "warnings": [alarm.text for row in rows for alarm in silence.read(row)],
        "weights_sha256": None,
        "tasks": asdict(ledger.task_fates()),
        "episodes": asdict(ledger.episode_fates()),
    }


def _interval(row: Mapping[str, float]) -> list[float] | None:
    """The 95 % interval of an evaluation's success."""
    return (
        [row["eval/success_low"], row["eval/success_high"]] if "eval/success_low" in row else None
    )


def _ends(tested: Sequence[Row]) -> tuple[Row, Row]:
    """The last results before the first step, and the last ones after it, of results in order of
    steps. Missing ones are empty.
    """
    before = [row for row in tested if _step(row) == 0]
    after = [row for row in tested if _step(row) > 0]
    return before[-1] if before else {}, after[-1] if after else {}


def count_steps(rows: Sequence[Row]) -> int:
    """The steps of a run. Those of recipes that learn from files have no reward."""
    return sum("reward" in row for row in rows) or sum("loss" in row for row in rows)


def _step(row: Row) -> int:
    return int(row["step"])


def _suite_results(rows: Sequence[Row], name: str) -> dict[str, Mapping[str, float]]:
    """The results of a suite before and after training, without the prefix of the metrics."""
    prefix = f"eval/{name}/"
    tested = sorted((row for row in rows if f"{prefix}success" in row), key=_step)
    ends = zip(("before", "after"), _ends(tested), strict=True)
    return {
        when: {
            key.removeprefix(prefix): value for key, value in row.items() if key.startswith(prefix)
        }
        for when, row in ends
        if row
    }
