"""The metrics of a step, and the file that they are written to."""

import json
import logging
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np

from agentrl.algorithms.samples import TracedBatch
from agentrl.errors import StorageError
from agentrl.files.durable import write_whole
from agentrl.observe.intervals import Interval, share_over_tasks
from agentrl.tokens.arrays import IntArray
from agentrl.trajectory import Group, Score, Trajectory, Unscored, columns_of, succeeded

logger = logging.getLogger(__name__)

_TASKS = 4
"""Tasks without which equal answers say nothing."""


def rollout_metrics(
    groups: Sequence[Group], step: int, oldest_version: int = 0, envs: Sequence[str] = ()
) -> dict[str, float]:
    """Metrics of the trajectories trained on at `step`.

    Staleness is in versions; its histograms are shares of groups (by their oldest token) and of
    tokens. Lengths are in turns and tokens. Only staleness also counts the partial groups; whole
    episodes count all their turns. Tokens older than `oldest_version` carry no loss: they are
    `stale_tokens`, and have no part in staleness. `envs` are the environments of a mixture.
    """
    parts_of_episodes = [
        trajectory for group in groups if group.partial for trajectory in group.trajectories
    ]
    by_group = [_versions(group) for group in groups]
    trained = [versions_T[versions_T >= oldest_version] for versions_T in by_group]
    ages_of_groups = Counter(
        step - int(versions_T.min()) for versions_T in trained if len(versions_T)
    )
    groups = [group for group in groups if not group.partial]
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    scores = [score for group in groups for score in group.scores]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    names = sorted({name for score in scores for name in score.parts})
    parts = {name: [score.parts[name] for score in scores if name in score.parts] for name in names}
    versions_T = np.concatenate([np.empty(0, np.int64), *trained])
    stale = sum(map(len, by_group)) - len(versions_T)
    ages_of_tokens = {
        step - int(version): int(count)
        for version, count in zip(*np.unique(versions_T, return_counts=True), strict=True)
    }
    lengths = Counter(turn.completion.finish_reason for turn in turns)
    prompt_tokens = 0
    for trajectory in trajectories:
        # The prompt that a branch answers, and those before, count for the episode that it left.
        own = 0 if trajectory.branch is None else trajectory.branch.turn + 1
        prompt_tokens += sum(len(turn.prompt_ids) for turn in trajectory.turns[own:])
    return {
        "reward": fmean(score.value for score in scores),
        "reward_std": pstdev(score.value for score in scores),
        **by_agent(list(zip(trajectories, scores, strict=True))),
        **by_env(list(zip(trajectories, scores, strict=True)), envs),
        **{
            f"envs/{env}/groups": float(sum(group.task.env == env for group in groups))
            for env in envs
        },
        **{f"reward/{name}": fmean(values) for name, values in parts.items()},
        **{f"reward_std/{name}": pstdev(values) for name, values in parts.items()},
        "success": success_share(list(zip(trajectories, scores, strict=True))),
        "turns": fmean(len(trajectory.turns) for trajectory in trajectories),
        "sampled_tokens": float(sum(one.num_played_tokens for one in trajectories)),
        "prompt_tokens": float(prompt_tokens),
        "forked_turns": float(sum(turn.forked for turn in turns)),
        "forked_share": sum(turn.forked for turn in turns) / max(1, len(turns) - len(trajectories)),
        "cut_answers": lengths["length"] / max(1, len(turns)),
        **_reasoning_metrics(trajectories),
        **_call_metrics(trajectories),
        "truncated": fmean(trajectory.status.name == "truncated" for trajectory in trajectories),
        **({"segments": float(len(parts_of_episodes))} if parts_of_episodes else {}),
        "mixed_groups": fmean(group.has_signal for group in groups),
        **same_answers(trajectories),
        "different_starts": fmean(not group.begins_alike for group in groups),
        **({"stale_tokens": stale / (stale + len(versions_T))} if stale else {}),
        "staleness/max": float(max(ages_of_tokens, default=0)),
        "staleness/mean": step - float(versions_T.mean()) if len(versions_T) else 0.0,
        **{
            f"staleness/groups/{age}": count / ages_of_groups.total()
            for age, count in sorted(ages_of_groups.items())
        },
        **{
            f"staleness/tokens/{age}": count / len(versions_T)
            for age, count in sorted(ages_of_tokens.items())
        },
    }


def masked_shares(groups: Sequence[Group], made: TracedBatch) -> dict[str, float]:
    """The share of the whole episodes of a batch of which no token carries a loss, and that of all
    its new tokens.
    """
    whole = {
        trajectory.id for group in groups if not group.partial for trajectory in group.trajectories
    }
    sampled = sum(len(_versions(group)) for group in groups)
    return {
        "masked": len(made.masked) / max(1, len(whole)),
        "masked_tokens": 1 - made.batch.num_loss_tokens / max(1, sampled),
    }


def same_answers(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The share of whole episodes that have the commonest answers, in all of their turns. Nothing
    if they are of too few different tasks.
    """
    said = Counter(
        tuple(answer.tobytes() for answer in columns_of(one.turns).answers())
        for one in trajectories
    )
    # A suite plays a task several times, as `NAME/SAMPLE`.
    tasks = {(one.task.env, one.task.id.partition("/")[0], one.task.seed) for one in trajectories}
    if len(tasks) < _TASKS or len(trajectories) < 2 * _TASKS:
        return {}
    return {"same_answers": max(said.values()) / len(trajectories)}


def _versions(group: Group) -> IntArray:
    """The policy version of each token that is not yet trained on."""
    versions = (trajectory.new_versions for trajectory in group.trajectories)
    return np.concatenate([np.empty(0, np.int32), *versions])


def _reasoning_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The share of reasoning in answers, and of answers that ended within it."""
    thought = [
        (message, turn)
        for trajectory in trajectories
        for message, turn in zip(
            (message for message in trajectory.messages if message.is_answer),
            trajectory.turns,
            strict=False,
        )
        if message.reasoning
    ]
    if not thought:
        return {}
    answers = sum(len(trajectory.turns) for trajectory in trajectories)
    cut = sum(
        turn.completion.finish_reason == "length" and not message.content
        for message, turn in thought
    )
    return {
        "reasoning/tokens": float(sum(message.reasoning_tokens for message, _ in thought)),
        "reasoning/cut": cut / answers,
    }


def _call_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Metrics of the calls of programs and their samples; nothing for environments, which make
    none."""
    kinds = Counter(
        turn.info["call_kind"]
        for trajectory in trajectories
        for turn in trajectory.turns
        if "call_kind" in turn.info
    )
    if not kinds:
        return {}
    rows = sum(1 + sum(turn.forked for turn in trajectory.turns) for trajectory in trajectories)
    dropped = sum(
        tokens for trajectory in trajectories for _, tokens in trajectory.dropped.values()
    )
    return {
        "calls/per_row": kinds.total() / rows,
        "calls/dropped_tokens": float(dropped),
        **{f"calls/{kind}": count / kinds.total() for kind, count in sorted(kinds.items())},
    }


def by_agent(scored: Sequence[tuple[Trajectory, Score]]) -> dict[str, float]:
    """Reward, success and turns of each agent that has a name."""
    metrics: dict[str, float] = {}
    for agent in sorted({trajectory.agent for trajectory, _ in scored} - {""}):
        own = [(trajectory, score) for trajectory, score in scored if trajectory.agent == agent]
        metrics[f"agents/{agent}/reward"] = mean_reward(own)
        metrics[f"agents/{agent}/success"] = success_share(own)
        metrics[f"agents/{agent}/turns"] = fmean(len(trajectory.turns) for trajectory, _ in own)
    return metrics


def by_env(scored: Sequence[tuple[Trajectory, Score]], envs: Sequence[str]) -> dict[str, float]:
    """Reward, success and turns of each environment of a mixture that has been played."""
    metrics: dict[str, float] = {}
    for env in envs:
        if own := [
            (trajectory, score) for trajectory, score in scored if trajectory.task.env == env
        ]:
            success = success_interval(own)
            metrics |= {
                f"envs/{env}/reward": mean_reward(own),
                f"envs/{env}/success": success_share(own),
                f"envs/{env}/success_low": success.low,
                f"envs/{env}/success_high": success.high,
                f"envs/{env}/turns": fmean(len(trajectory.turns) for trajectory, _ in own),
                f"envs/{env}/episodes": float(len(own)),
                f"envs/{env}/tokens": float(sum(one.num_played_tokens for one, _ in own)),
            }
    return metrics


def verdicts(scored: Iterable[tuple[Trajectory, Score]]) -> list[bool]:
    """The success of each episode, without those of which nothing tells."""
    found = (succeeded(*pair) for pair in scored)
    return [verdict for verdict in found if verdict is not None]


def success_share(scored: Iterable[tuple[Trajectory, Score]]) -> float:
    """Share of successful episodes among those with a verdict; NaN if none has one."""
    known = verdicts(scored)
    return fmean(known) if known else math.nan


def success_interval(scored: Iterable[tuple[Trajectory, Score]]) -> Interval:
    """The mean success of each task, over tasks: the members of a group, and the agents of one
    game, are not independent.
    """
    by_task = defaultdict[str, list[bool]](list)
    for trajectory, score in scored:
        if (verdict := succeeded(trajectory, score)) is not None:
            by_task[trajectory.task.id].append(verdict)
    return share_over_tasks([fmean(known) for known in by_task.values()])


def mean_reward(scored: Iterable[tuple[Trajectory, Score]]) -> float:
    """The mean score; NaN where all parts of the reward compare members, and none was compared."""
    values = [score.value for _, score in scored if not isinstance(score.status, Unscored)]
    return fmean(values) if values else math.nan


def is_evaluation(row: Mapping[str, Any]) -> bool:
    """True if a row has the results of an evaluation of the weights after its number of steps."""
    return any(name.startswith("eval/") for name in row)


class MetricsFile:
    """`metrics.jsonl`: one JSON object per line, in order of steps. Every appended row is flushed
    to disk.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_begun = path.exists()

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row."""
        if self._is_begun and not self._path.exists():
            logger.warning("%s was deleted: the metrics of earlier steps are lost", self._path)
        self._is_begun = True
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def rows(self) -> list[dict[str, Any]]:
        """All complete rows, without a last line that a killed process left incomplete.

        Raises:
            StorageError: a line is not a row.
        """
        if not self._path.exists():
            return []
        lines = self._path.read_text(errors="replace").split("\n")[:-1]
        return [self._row(number, line) for number, line in enumerate(lines, 1)]

    def _row(self, number: int, line: str) -> dict[str, Any]:
        try:
            row: dict[str, Any] = json.loads(line)
            row["step"]
        except (ValueError, LookupError, TypeError) as error:
            raise StorageError(
                f"line {number} of {self._path} is damaged: {line!r:.80}. Remove the line, and lose"
                " its metrics"
            ) from error
        return row

    def values(self, name: str) -> dict[int, float]:
        """The values of a metric, by step."""
        return {row["step"]: row[name] for row in self.rows() if name in row}

    def mend(self) -> None:
        """Remove an incomplete last line, so that rows can follow."""
        self._write(self.rows())

    def remove_rows(self, step: int, metric: str) -> None:
        """Remove the rows of `step` with this metric, which will be repeated."""
        rows = self.rows()
        kept = [row for row in rows if row["step"] != step or metric not in row]
        if len(kept) < len(rows):
            self._write(kept)

    def rewind(self, step: int) -> None:
        """Remove the rows of `step` and later, which will be repeated, except an evaluation at
        `step`.
        """
        rows = [
            row
            for row in self.rows()
            if row["step"] < step or (row["step"] == step and is_evaluation(row))
        ]
        self._write(rows)

    def _write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replace the file by these rows."""
        write_whole(self._path, "".join(json.dumps(row) + "\n" for row in rows))
