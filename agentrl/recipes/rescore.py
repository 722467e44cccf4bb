"""Scores the saved episodes of a run again, with another reward, and reports what changes.

Neither a model nor an environment is needed. Episodes that the new reward cannot score have no
score: they are counted separately, and never as a number.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from agentrl.config.run_config import RunConfig
from agentrl.errors import ConfigError
from agentrl.files.durable import none_unfinished, unfinished
from agentrl.flow import Flow
from agentrl.observe.run_images import RunImages
from agentrl.recipes.recordings import played_in
from agentrl.scoring.build import build_pipeline
from agentrl.scoring.pipeline import RewardPipeline
from agentrl.scoring.rule_pool import RulePool
from agentrl.tasks.saved_rows import saved_rows
from agentrl.tokens.arrays import constant
from agentrl.trajectory import (
    SEGMENT,
    Failed,
    Score,
    Terminated,
    Trajectory,
    Truncated,
    Unscored,
    succeeded,
)

_CONCURRENT_GROUPS = 64
"""Groups that are scored at the same time."""


@dataclass(frozen=True, slots=True)
class Rescored:
    """A saved episode with its score in the run, and the one by the new reward."""

    step: int
    trajectory: Trajectory
    before: float
    """NaN if it had none."""
    succeeded_before: bool | None
    score: Score

    @property
    def after(self) -> float:
        """The new score; NaN if there is none."""
        return math.nan if isinstance(self.score.status, Failed | Unscored) else self.score.value

    @property
    def succeeded_after(self) -> bool | None:
        """Success by the environment's verdict, or else by the new reward's."""
        return succeeded(self.trajectory, self.score)

    @property
    def change(self) -> float:
        """How much more it has now; NaN if one of the two is not known."""
        return self.after - self.before


async def rescore(config: RunConfig, folder: Path, step: int | None = None) -> list[Rescored]:
    """Score the episodes that a run was trained on, or those of one step, by `config.reward`: also
    those of environments with a reward of their own.

    Raises:
        ConfigError: the run has no such episodes, or the reward cannot work with such tasks at all.
    """
    found: list[Rescored] = []
    rollout = config.rollout
    pipeline = build_pipeline(
        config.reward,
        RulePool(rollout.rules),
        deadline=rollout.deadlines.reward,
        retries=rollout.retries,
    )
    async with pipeline as reward:
        groups = _groups(folder, step)
        while batch := [group for group, _ in zip(groups, range(_CONCURRENT_GROUPS), strict=False)]:
            async with Flow("rescoring") as flow:
                tasks = [
                    flow.start(_score_group(reward, group), name=group[0].trajectory.id)
                    for group in batch
                ]
            found += [one for task in tasks for one in task.result()]
    if not found:
        of_step = "" if step is None else f" of step {step}"
        raise ConfigError(f"{folder} has no episodes{of_step} that were trained on")
    return found


async def _score_group(reward: RewardPipeline, group: Sequence[Rescored]) -> list[Rescored]:
    trajectories = [one.trajectory for one in group]
    alone = [await reward.score(trajectory) for trajectory in trajectories]
    # Members are compared as in the run: those that could be scored.
    sound = [at for at, score in enumerate(alone) if not isinstance(score.status, Failed)]
    if sound:
        compared = await reward.score_group(
            [trajectories[at] for at in sound], [alone[at] for at in sound]
        )
        for at, score in zip(sound, compared, strict=True):
            alone[at] = score
    return [replace(one, score=score) for one, score in zip(group, alone, strict=True)]


def _groups(folder: Path, step: int | None) -> Iterator[list[Rescored]]:
    """The episodes of each task in a step; of those that were trained in parts, the last part,
    which has all turns.
    """
    images = RunImages(folder)
    for number, rows in groupby(saved_rows(folder / "trajectories"), key=lambda pair: pair[0]):
        if step not in (None, number):
            continue
        whole = [row for _, row in rows if row["detail"] != SEGMENT.limit]
        for _, members in groupby(whole, key=lambda row: (row["task"], row["agent"])):
            yield [_read_row(number, row, images) for row in members]


def _read_row(step: int, row: dict[str, Any], images: RunImages) -> Rescored:
    """A saved episode that is not scored again yet."""
    ended = Truncated(row["detail"]) if row["status"] == Truncated.name else Terminated()
    before = math.nan if row["score"] is None else row["score"]
    trajectory = replace(played_in(row, images), status=ended)
    return Rescored(step, trajectory, before, row["success"], Score(0.0, status=Unscored()))


@dataclass(frozen=True, slots=True)
class Changes:
    """What another reward changes, in figures."""

    episodes: int
    failed: int
    """Episodes that the new reward could not score. They are in no other figure."""
    unknown: int
    """Those that had no score in the run."""
    changed: int
    means: tuple[float, float]
    """Before and after, of the episodes that have both."""
    successes: tuple[float, float]
    groups: int
    mixed: tuple[int, int]
    """Groups whose members' scores differ, which are those that most algorithms learn from."""
    reordered: float
    """Of the pairs of a group that both rewards tell apart, the share that they order differently;
    NaN without any."""


def changes(rescored: Sequence[Rescored]) -> Changes:
    """The figures of some episodes."""
    both = [one for one in rescored if not math.isnan(one.change)]
    groups: dict[tuple[int, str, str], list[Rescored]] = {}
    for one in both:
        key = (one.step, one.trajectory.task.id, one.trajectory.agent)
        groups.setdefault(key, []).append(one)
    mixed = [0, 0]
    for members in groups.values():
        mixed[0] += not constant([one.before for one in members])
        mixed[1] += not constant([one.after for one in members])
    orders = [
        (a.before - b.before) * (a.after - b.after)
        for members in groups.values()
        for a, b in combinations(members, 2)
    ]
    # 0 where one of the rewards does not tell the two apart.
    decided = [order for order in orders if order]
    return Changes(
        len(rescored),
        sum(math.isnan(one.after) for one in rescored),
        sum(math.isnan(one.before) for one in rescored),
        sum(one.change != 0 for one in both),
        (_mean([one.before for one in both]), _mean([one.after for one in both])),
        (
            _mean([float(bool(one.succeeded_before)) for one in both]),
            _mean([float(bool(one.succeeded_after)) for one in both]),
        ),
        len(groups),
        (mixed[0], mixed[1]),
        _mean([float(order < 0) for order in decided]),
    )


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def write_scores(path: Path, rescored: Sequence[Rescored]) -> None:
    """Write a line of JSON for each episode into a new file.

    Raises:
        ConfigError: the file is there already.
    """
    if path.exists():
        raise ConfigError(f"{path} is there already: name a new file")
    path.parent.mkdir(parents=True, exist_ok=True)
    with none_unfinished(path), unfinished(path).open("w") as file:
        for one in rescored:
            status = one.score.status
            row = {
                "id": one.trajectory.id,
                "agent": one.trajectory.agent,
                "task": one.trajectory.task.id,
                "step": one.step,
                "before": None if math.isnan(one.before) else one.before,
                "after": None if math.isnan(one.after) else one.after,
                "parts": dict(one.score.parts),
                "words": dict(one.score.explanations),
                "success_before": one.succeeded_before,
                "success_after": one.succeeded_after,
                "error": status.error if isinstance(status, Failed) else "",
            }
            file.write(json.dumps(row) + "\n")
    unfinished(path).replace(path)
