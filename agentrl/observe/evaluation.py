"""`Evaluation`: the episodes of a suite with their scores, its metrics, and its result in one line.

The held-out tasks are the suite `held_out`. Its metrics have no name of a suite: `eval/success`
beside `eval/NAME/success`.
"""

import math
import re
import shlex
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from rich.markup import escape

from agentrl.observe.intervals import mean_over_tasks, passes, share_over_tasks
from agentrl.observe.metrics import (
    by_agent,
    by_env,
    same_answers,
    success_interval,
    success_share,
    verdicts,
)
from agentrl.observe.reports import HELD_OUT
from agentrl.trajectory import Score, Trajectory, Unscored


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Episodes of a suite with their scores. Failed ones are counted and never averaged in."""

    scored: tuple[tuple[Trajectory, Score], ...]
    """The episodes that ended, each with its score: one for each trained agent."""
    failed: tuple[Trajectory, ...]
    """The episodes that failed, or whose reward did."""
    name: str = HELD_OUT
    """The suite's name."""
    samples: int = 1
    """Episodes per task."""
    envs: tuple[str, ...] = ()
    """The environments of a mixture, by their names in the run."""

    @property
    def prefix(self) -> str:
        """The prefix of its metrics."""
        return metric_prefix(self.name)

    def metrics(self) -> dict[str, float]:
        """Success, reward and turns of the scored episodes, and how many episodes failed. Unknown
        values are NaN.
        """
        values = self._means_over_episodes() if self.name == HELD_OUT else self._means_over_tasks()
        return {f"{self.prefix}{name}": value for name, value in values.items()}

    def _means_over_episodes(self) -> dict[str, float]:
        """Means over episodes: each held-out task is played once. Intervals are over tasks, as an
        episode of several agents has a score for each.
        """
        trajectories = [trajectory for trajectory, _ in self.scored]
        success, values = success_interval(self.scored), score_values(self.scored)
        return {
            "success": success_share(self.scored),
            "success_low": success.low,
            "success_high": success.high,
            "reward": fmean(values) if values else math.nan,
            "reward_error": self._reward_error(),
            "turns": self._mean_turns(),
            "episodes": float(len(trajectories)),
            "failed": float(len(self.failed)),
            **same_answers(trajectories),
            **by_agent(self.scored),
            **by_env(self.scored, self.envs),
        }

    def _reward_error(self) -> float:
        """The standard error of the mean score, over tasks: what one agent of a game wins, another
        may lose.
        """
        means = [fmean(own) for scored in self._by_task().values() if (own := score_values(scored))]
        return stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan

    def _by_task(self) -> Mapping[str, list[tuple[Trajectory, Score]]]:
        by_task = defaultdict[str, list[tuple[Trajectory, Score]]](list)
        for trajectory, score in self.scored:
            by_task[self._task_of(trajectory)].append((trajectory, score))
        return by_task

    def _task_of(self, trajectory: Trajectory) -> str:
        """The id of an episode's task, of which a suite plays samples (`TASK/SAMPLE`)."""
        task = trajectory.task.id
        return task if self.name == HELD_OUT else task.rpartition("/")[0]

    def _means_over_tasks(self) -> dict[str, float]:
        """Means over tasks, of which each is the mean of its samples, with pass@k."""
        by_task = self._by_task()
        shares: list[float] = []
        means: list[float] = []
        for scored in by_task.values():
            if known := verdicts(scored):
                shares.append(fmean(known))
            if values := score_values(scored):
                means.append(fmean(values))
        metrics = {
            "turns": self._mean_turns(),
            "tasks": float(len(by_task)),
            "episodes": float(len(self.scored)),
            "failed": float(len(self.failed)),
            **same_answers([trajectory for trajectory, _ in self.scored]),
        }
        intervals = {"success": share_over_tasks(shares), "reward": mean_over_tasks(means)}
        if self.samples > 1:
            complete, by_k = passes(self._verdicts_of_agents(), self.samples)
            metrics["pass_tasks"] = float(complete)
            intervals |= {f"pass@{k}": interval for k, interval in by_k.items()}
        for name, interval in intervals.items():
            metrics[name] = interval.value
            metrics[f"{name}_low"] = interval.low
            metrics[f"{name}_high"] = interval.high
        return metrics

    def _verdicts_of_agents(self) -> Mapping[Hashable, Iterable[list[bool]]]:
        """The verdicts on each agent's answers to each task: k games of an agent are k answers, and
        those of its opponents in them are no more answers.
        """
        found: dict[Hashable, Iterable[list[bool]]] = {}
        for task, scored in self._by_task().items():
            by_agent = defaultdict[str, list[tuple[Trajectory, Score]]](list)
            for trajectory, score in scored:
                by_agent[trajectory.agent].append((trajectory, score))
            found[task] = [verdicts(own) for own in by_agent.values()]
        return found

    def _mean_turns(self) -> float:
        turns = [len(trajectory.turns) for trajectory, _ in self.scored]
        return fmean(turns) if turns else math.nan

    def result(self, step: int, run: Path) -> str:
        """The result of the weights after `step` steps of the run in this folder, in one line of
        terminal markup.
        """
        values = {name.removeprefix(self.prefix): value for name, value in self.metrics().items()}
        held_out = self.name == HELD_OUT
        what = "held-out success" if held_out else f"success on {self.name}"
        if not self.scored:
            named = escape(shlex.quote(str(run)))
            return (
                f"{what} after {step} steps: [bold]unknown[/bold], as all {values['failed']:.0f}"
                f" episodes failed; `agentrl eval {named} --suite {self.name}` shows why"
            )
        if math.isnan(values["success"]):
            return (
                f"{what} after {step} steps: [bold]unknown[/bold], as neither the environment nor"
                f" the reward tells it of the {values['episodes']:.0f} episodes: set"
                ' info["success"], or add a part of the reward that scores single episodes'
            )
        count = f"{values['episodes']:.0f} episodes" if held_out else f"{values['tasks']:.0f} tasks"
        pass_rates = "".join(
            f", {name} {value:.1%}"
            for name, value in values.items()
            if re.fullmatch(r"pass@\d+", name)
        )
        return (
            f"{what} after {step} steps: [bold]{values['success']:.1%}[/bold] of {count}"
            f" (95 % interval {values['success_low']:.1%} to {values['success_high']:.1%};"
            f" {values['failed']:.0f} failed){pass_rates}"
        )


def metric_prefix(suite: str) -> str:
    """The prefix of a suite's metrics."""
    return "eval/" if suite == HELD_OUT else f"eval/{suite}/"


def score_values(scored: Iterable[tuple[Trajectory, Score]]) -> list[float]:
    """The values of the scores; none, if every part of the reward compares members."""
    return [score.value for _, score in scored if not isinstance(score.status, Unscored)]
