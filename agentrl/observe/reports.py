"""Reports of evaluations on disk, and the comparison of two: a small JSON file for each suite and
step.

RUN/evaluations/NAME_000020.json    of the weights after 20 steps; NAME is the suite's, or held_out
RUN/evaluations/eval-DATE/...       the reports of `agentrl eval RUN`

Two evaluations are compared task by task. A task is the same in both if environment, options, seed,
prompt and sampling are: equal names and seeds alone may be those of different games.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

import xxhash

from agentrl.errors import ConfigError
from agentrl.files.durable import write_whole
from agentrl.observe.intervals import Interval, paired_difference
from agentrl.trajectory import Score, Trajectory, Unscored, succeeded

HELD_OUT = "held_out"
"""The name of the evaluation on the run's held-out tasks."""


@dataclass(frozen=True, slots=True)
class PlayedTask:
    """The problem of an episode: two of the same problem, whatever the runs are called that played
    them, are equal.
    """

    environment: str
    """Its address, with its wrappers."""
    seed: int
    options: str
    """A digest of the task's options."""
    prompt: str
    """A digest of the messages before the first answer. Empty of a program, which makes its own."""
    agent: str = ""

    @staticmethod
    def of(trajectory: Trajectory, environment: str, *, program: bool = False) -> "PlayedTask":
        """That of an episode. `program`: whether a program has called the model, and made its
        prompts.
        """
        task = trajectory.task
        shown = (
            []
            if program
            else takewhile(lambda message: message.role != "assistant", trajectory.messages)
        )
        prompt = [
            (message.role, message.content, *(image.digest for image in message.images))
            for message in shown
        ]
        options = json.dumps(dict(task.options), sort_keys=True, default=str)
        return PlayedTask(
            environment,
            task.seed,
            _digest(options),
            _digest(json.dumps(prompt)) if prompt else "",
            trajectory.agent,
        )


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """The outcome of one episode of an evaluation. `task` names its task, with the seed of its
    environment.
    """

    task: str
    success: bool | None
    """None if nothing tells (`agentrl.trajectory.succeeded`)."""
    score: float | None
    """None if every part of the reward compares the members of a group."""
    played: PlayedTask | None = None
    """None if that is not known; `task` stands for it then."""

    @staticmethod
    def of(
        trajectory: Trajectory, score: Score, sampled: bool, played: PlayedTask | None = None
    ) -> "EpisodeResult":
        """The result of a scored episode; of a suite (`sampled`), the id of its task ends with the
        sample's number.
        """
        task = trajectory.task
        name = task.id.rpartition("/")[0] if sampled else task.id
        agent = f" {trajectory.agent}" if trajectory.agent else ""
        value = None if isinstance(score.status, Unscored) else score.value
        return EpisodeResult(
            f"{name} seed {task.seed}{agent}", succeeded(trajectory, score), value, played
        )


@dataclass(frozen=True, slots=True)
class Conditions:
    """The settings by which the episodes of an evaluation were played and scored, each by its own
    name or that of a setting.
    """

    environments: Mapping[str, Any] = field(default_factory=dict)
    """The options of each environment."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The sampling of the policy, and the budget of an episode."""
    reward: Any = None
    """The section of the config."""


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """An evaluation of the weights after `step` steps: its metrics, and each episode that did not
    fail.
    """

    name: str
    step: int
    metrics: Mapping[str, float]
    episodes: Sequence[EpisodeResult]
    conditions: Conditions = Conditions()
    file: Path | None = None
    """The file that it was read from."""

    def write(self, folder: Path) -> Path:
        """Write the report into a folder, and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}_{self.step:06d}.json"
        row = {"at": datetime.now(UTC).isoformat(), **asdict(self)}
        del row["file"]
        write_whole(path, json.dumps(row, indent=1) + "\n")
        return path

    @property
    def failed(self) -> int:
        """Failed episodes. They are in no figure."""
        names = ("eval/failed", f"eval/{self.name}/failed")
        return next((round(self.metrics[name]) for name in names if name in self.metrics), 0)

    def by_task(self, value: str) -> dict[Hashable, float]:
        """The mean `success` or `score` of each task, without episodes of which it is unknown."""
        values = defaultdict[Hashable, list[float]](list)
        for episode in self.episodes:
            if (known := getattr(episode, value)) is not None:
                values[episode.played or episode.task].append(float(known))
        return {task: fmean(own) for task, own in values.items()}

    @property
    def tasks(self) -> set[PlayedTask | str]:
        """The tasks of which an episode did not fail."""
        return {episode.played or episode.task for episode in self.episodes}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The results of two models on the tasks that both were evaluated on, and the lead of the
    second.

    The success of both, `first` and `second`, is NaN where it is unknown, as is a difference.
    """

    name: str
    steps: tuple[int, int]
    tasks: int
    first: float
    second: float
    success: Interval
    score: Interval
    failed: tuple[int, int] = (0, 0)
    """Episodes that failed; they are in no figure."""
    alone: tuple[int, int] = (0, 0)
    """Tasks that only one has, and that are not compared."""
    why_alone: str = ""
    files: tuple[Path | None, Path | None] = (None, None)
    rewards_differ: bool = False


def read_reports(folder: Path) -> dict[str, EvaluationReport]:
    """The newest report of each evaluation, by name: of a run, those that `agentrl eval` has saved
    there too.

    The newest is the one that was written last.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    newest: dict[str, tuple[float, int, Path]] = {}
    for path in (
        path
        for pattern in ("*.json", "eval-*/*.json", "evaluations/**/*.json")
        for path in folder.glob(pattern)
    ):
        if match := re.fullmatch(r"(.+)_(\d{6,})\.json", path.name):
            newest[match[1]] = max(
                newest.get(match[1], (-math.inf, 0, path)), (_written(path), int(match[2]), path)
            )
    if not newest:
        raise ConfigError(
            f"{folder} has no reports of evaluations: name a run that was evaluated, or what"
            " `agentrl eval` wrote"
        )
    return {name: _read_report(path) for name, (_, _, path) in sorted(newest.items())}


def compare(
    first: Mapping[str, EvaluationReport], second: Mapping[str, EvaluationReport]
) -> list[Comparison]:
    """The evaluations that both have, on the tasks that both have played.

    Raises:
        ConfigError: they have no task in common.
    """
    shared = sorted(first.keys() & second.keys())
    made = [_compare_one(first[name], second[name]) for name in shared]
    found = [comparison for comparison in made if comparison is not None]
    if not found:
        reasons = "; ".join(f"{name}: {difference(first[name], second[name])}" for name in shared)
        raise ConfigError(
            f"the two have no evaluated task in common: one has {', '.join(first)}, the other"
            f" {', '.join(second)}"
            + (f" ({reasons}). " if reasons else ". ")
            + "Held-out seeds depend on the run's seed; suites (`evaluation.suites`) are the same"
            " for every run"
        )
    return found


def _compare_one(one: EvaluationReport, other: EvaluationReport) -> Comparison | None:
    """The comparison of two evaluations; None if they have no task in common."""
    if one.conditions.sampling != other.conditions.sampling:
        return None
    by_task = one.by_task("success"), other.by_task("success")
    judged, success = paired_difference(*by_task, largest=1.0)
    scored, score = paired_difference(one.by_task("score"), other.by_task("score"))
    if not (tasks := max(judged, scored)):
        return None
    both = by_task[0].keys() & by_task[1].keys()
    means = [fmean(values[task] for task in both) if both else math.nan for values in by_task]
    alone = len(one.tasks - other.tasks), len(other.tasks - one.tasks)
    return Comparison(
        one.name,
        (one.step, other.step),
        tasks,
        means[0],
        means[1],
        success,
        score,
        failed=(one.failed, other.failed),
        alone=alone,
        why_alone=difference(one, other) if any(alone) else "",
        files=(one.file, other.file),
        rewards_differ=one.conditions.reward != other.conditions.reward,
    )


def difference(one: EvaluationReport, other: EvaluationReport) -> str:
    """The differences of two evaluations that keep tasks from being compared, in words; empty if
    they only have different tasks.
    """
    found = []
    if differing := _describe_differences(one.conditions.sampling, other.conditions.sampling):
        found.append(f"they were sampled differently ({differing})")
    if differing := _describe_differences(
        one.conditions.environments, other.conditions.environments
    ):
        found.append(f"their environments differ ({differing})")
    own = {task for task in one.tasks if isinstance(task, PlayedTask)}
    others = {task for task in other.tasks if isinstance(task, PlayedTask)}
    alone, others_alone = own - others, others - own
    for what, without in _LESS.items():
        known = {without(task) for task in others_alone}
        if not found and any(without(task) in known for task in alone):
            found.append(f"the {what} of their tasks differ")
    if not found and not own & others:
        seeds = "; held-out tasks depend on the run's seed" if one.name == HELD_OUT else ""
        found.append(f"the two have played no task in common{seeds}")
    return "; ".join(found)


_LESS: Mapping[str, Callable[[PlayedTask], PlayedTask]] = {
    "prompts": lambda task: replace(task, prompt=""),
    "options": lambda task: replace(task, prompt="", options=""),
}
"""Tasks without what may differ between those of two evaluations."""


def _describe_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The entries of two mappings that differ, with both values."""
    said = [
        f"{key}: {_format_setting(one, key)} and {_format_setting(other, key)}"
        for key in dict.fromkeys([*one, *other])
        if key not in one or key not in other or one[key] != other[key]
    ]
    return ", ".join(said)


def _format_setting(values: Mapping[str, Any], key: str) -> str:
    return f"{values[key]!r:.80}" if key in values else "none"


def left_out(
    first: Mapping[str, EvaluationReport],
    second: Mapping[str, EvaluationReport],
    compared: Sequence[Comparison],
) -> dict[str, str]:
    """The reasons why the other evaluations of the two cannot be compared, by name."""
    found = {}
    for name in sorted((first.keys() | second.keys()) - {one.name for one in compared}):
        if name in first and name in second:
            found[name] = difference(first[name], second[name])
        else:
            found[name] = f"only the {'first' if name in first else 'second'} has it"
    return found


def _written(path: Path) -> float:
    """The Unix time at which a report was written. It says so itself, as a copy of the file may be
    of any time; those of earlier versions do not.
    """
    try:
        return datetime.fromisoformat(json.loads(path.read_bytes())["at"]).timestamp()
    except (ValueError, LookupError, TypeError):
        return path.stat().st_mtime


def _read_report(path: Path) -> EvaluationReport:
    try:
        raw = json.loads(path.read_text())
        if "conditions" not in raw and "episodes" in raw:
            raise ConfigError(
                f"{path} was written by an earlier version, which did not keep what its tasks are:"
                " evaluate again with `agentrl eval`"
            )
        episodes = []
        for row in raw["episodes"]:
            played = None if row["played"] is None else PlayedTask(**row["played"])
            episodes.append(EpisodeResult(row["task"], row["success"], row["score"], played))
        conditions = Conditions(**raw["conditions"])
        return EvaluationReport(
            raw["name"], raw["step"], raw["metrics"], tuple(episodes), conditions, path
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no report of an evaluation: {error!r}") from error


def _digest(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass"))
