"""`EvaluationLog`: the evaluations of a run that are pending, and the results of the others."""

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from agentrl.files.durable import write_whole
from agentrl.observe.metrics import MetricsFile
from agentrl.runs.old_state import evaluations_in_metrics, pending_evaluations

logger = logging.getLogger(__name__)

LOG_FILE = "evaluation_log.json"
"""The log's file in the folder of a run."""


class EvaluationLog:
    """The evaluations of a run, by the steps of their weights and the suite, in a file of the run.

    An evaluation is pending from its beginning until its result is recorded. A run that is killed
    meanwhile finds it there when it is resumed.
    """

    def __init__(
        self,
        path: Path,
        pending: Mapping[int, list[str]],
        finished: Mapping[int, dict[str, dict[str, float]]],
    ) -> None:
        self._path = path
        self._pending = dict(pending)
        self._finished = dict(finished)

    @classmethod
    def of_run(cls, folder: Path) -> Self:
        """The log of the run in this folder. Writes nothing yet."""
        path = folder / LOG_FILE
        if not path.exists():
            rows = MetricsFile(folder / "metrics.jsonl").rows()
            pending = pending_evaluations(folder / "owed_evaluations.json")
            return cls(path, pending, evaluations_in_metrics(rows))
        try:
            log = json.loads(path.read_text())
            return cls(path, _by_step(log["pending"], list), _by_step(log["finished"], dict))
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            logger.warning("%s cannot be read (%s): evaluations may be made again", path, error)
            return cls(path, {}, {})

    def pending(self, step: int) -> list[str]:
        """The suites whose evaluation of the weights after `step` steps is pending."""
        return self._pending.get(step, [])

    def pending_steps(self) -> list[int]:
        """The steps after which an evaluation is pending, in order."""
        return sorted(self._pending)

    def is_finished(self, step: int, suite: str) -> bool:
        """True if the weights after `step` steps have a result of this suite."""
        return suite in self._finished.get(step, {})

    def values(self, metric: str) -> dict[int, float]:
        """The values of a metric of evaluations, by the steps of the weights."""
        values: dict[int, float] = {}
        for step, results in self._finished.items():
            for metrics in results.values():
                if metric in metrics:
                    values[step] = metrics[metric]
        return values

    def begin(self, step: int, suites: Iterable[str]) -> None:
        """Record that these evaluations begin."""
        new = [suite for suite in suites if suite not in self.pending(step)]
        if new:
            self._pending[step] = [*self.pending(step), *new]
            self._write()

    def finish(self, step: int, suite: str, metrics: Mapping[str, float]) -> None:
        """Record the result of an evaluation."""
        self._finished.setdefault(step, {})[suite] = dict(metrics)
        remaining = [name for name in self.pending(step) if name != suite]
        self._pending.pop(step, None)
        if remaining:
            self._pending[step] = remaining
        self._write()

    def go_back_to(self, step: int) -> None:
        """Forget the evaluations of later weights: a resumed run trains them again."""
        later = [there for there in (*self._pending, *self._finished) if there > step]
        for there in later:
            self._pending.pop(there, None)
            self._finished.pop(there, None)
        if later:
            self._write()

    def _write(self) -> None:
        log = {"pending": self._pending, "finished": self._finished}
        write_whole(self._path, json.dumps(log) + "\n")


def _by_step(entries: Mapping[str, Any], kind: type) -> dict[int, Any]:
    """The entries of a log by step, each of which must be of this kind."""
    by_step: dict[int, Any] = {}
    for step, entry in entries.items():
        if not isinstance(entry, kind):
            raise TypeError(f"the entry of step {step} is {entry!r:.80}")
        by_step[int(step)] = entry
    return by_step
