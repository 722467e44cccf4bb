"""Reports of evaluations on disk, and the comparison of two: a small JSON file for each suite and step.

RUN/evaluations/NAME_000020.json      of the weights after 20 steps; NAME is the suite's, or held_out
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from agentrl.durable import write_whole
from agentrl.errors import ConfigError
from agentrl.observe.intervals import Interval, paired_difference
from agentrl.trajectory import Score, Trajectory, Unscored, succeeded

HELD_OUT = "held_out"
"""The name of the evaluation on the run's held-out tasks."""


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """How one episode of an evaluation ended. `task` names its task, with the seed of its environment."""

    task: str
    success: bool | None
    """None if nothing tells (`agentrl.trajectory.succeeded`)."""
    score: float | None
    """None if every part of the reward compares the members of a group."""

    @staticmethod
    def of(trajectory: Trajectory, score: Score, sampled: bool) -> "EpisodeResult":
        """The result of a scored episode; of a suite (`sampled`), the id of its task ends with the sample's number."""
        task = trajectory.task
        name = task.id.rpartition("/")[0] if sampled else task.id
        agent = f" {trajectory.agent}" if trajectory.agent else ""
        value = None if isinstance(score.status, Unscored) else score.value
        return EpisodeResult(f"{name} seed {task.seed}{agent}", succeeded(trajectory, score), value)


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """An evaluation of the weights after `step` steps: its metrics, and each episode that did not fail."""

    name: str
    step: int
    metrics: Mapping[str, float]
    episodes: Sequence[EpisodeResult]

    def write(self, folder: Path) -> Path:
        """Write the report into a folder, and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}_{self.step:06d}.json"
        write_whole(path, json.dumps(asdict(self), indent=1) + "\n")
        return path

    def by_task(self, value: str) -> dict[str, float]:
        """The mean `success` or `score` of each task, without episodes of which it is unknown."""
        values = defaultdict[str, list[float]](list)
        for episode in self.episodes:
            if (known := getattr(episode, value)) is not None:
                values[episode.task].append(float(known))
        return {task: fmean(own) for task, own in values.items()}


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two models did on the tasks that both were evaluated on, and by how much the second did better.

    The success of both, `first` and `second`, is NaN where it is unknown, as is a difference.
    """

    name: str
    steps: tuple[int, int]
    tasks: int
    first: float
    second: float
    success: Interval
    score: Interval


def read_reports(folder: Path) -> dict[str, EvaluationReport]:
    """The newest report of each evaluation of a run, or of a folder of reports, by name.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    where = folder / "evaluations" if (folder / "evaluations").is_dir() else folder
    newest: dict[str, tuple[int, Path]] = {}
    for path in where.glob("*.json") if where.is_dir() else ():
        if match := re.fullmatch(r"(.+)_(\d{6,})\.json", path.name):
            newest[match[1]] = max(newest.get(match[1], (-1, path)), (int(match[2]), path))
    if not newest:
        raise ConfigError(
            f"{folder} has no reports of evaluations: name a run that was evaluated, or what `agentrl eval` wrote"
        )
    return {name: _read(path) for name, (_, path) in sorted(newest.items())}


def compare(first: Mapping[str, EvaluationReport], second: Mapping[str, EvaluationReport]) -> list[Comparison]:
    """The evaluations that both have, on the tasks that both have played.

    Raises:
        ConfigError: they have no task in common.
    """
    found = []
    for name in sorted(first.keys() & second.keys()):
        one, other = first[name], second[name]
        by_task = one.by_task("success"), other.by_task("success")
        judged, success = paired_difference(*by_task)
        scored, score = paired_difference(one.by_task("score"), other.by_task("score"))
        if tasks := max(judged, scored):
            both = by_task[0].keys() & by_task[1].keys()
            means = [fmean(values[task] for task in both) if both else math.nan for values in by_task]
            found.append(Comparison(name, (one.step, other.step), tasks, means[0], means[1], success, score))
    if not found:
        raise ConfigError(
            f"the two have no evaluated task in common: one has {', '.join(first)}, the other {', '.join(second)}. "
            "Held-out seeds depend on the run's seed; suites (`evaluation.suites`) are the same for every run"
        )
    return found


def left_out(
    first: Mapping[str, EvaluationReport], second: Mapping[str, EvaluationReport], compared: Sequence[Comparison]
) -> dict[str, str]:
    """Why the other evaluations of the two cannot be compared, by name."""
    found = {}
    for name in sorted((first.keys() | second.keys()) - {one.name for one in compared}):
        if name in first and name in second:
            seeds = "; held-out tasks depend on the run's seed" if name == HELD_OUT else ""
            found[name] = f"the two have played no task in common{seeds}"
        else:
            found[name] = f"only the {'first' if name in first else 'second'} has it"
    return found


def _read(path: Path) -> EvaluationReport:
    try:
        raw = json.loads(path.read_text())
        episodes = tuple(EpisodeResult(**episode) for episode in raw["episodes"])
        return EvaluationReport(raw["name"], raw["step"], raw["metrics"], episodes)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no report of an evaluation: {error!r}") from error
