"""Evaluation: held-out tasks, played by the same code as training."""

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean, stdev

from agentrl.assembly import RolloutAssembly
from agentrl.config import RunConfig
from agentrl.flow import Flow, Turnstile, now, run_to_completion
from agentrl.observe.metrics import by_agent, by_env, wilson_interval
from agentrl.observe.trajectories import write_trajectories
from agentrl.rollout.episode import Episode, EpisodeRunner
from agentrl.rollout.outage import Outages
from agentrl.rollout.seeds import derive_seed
from agentrl.run import Run
from agentrl.task_sources import held_out_tasks
from agentrl.trajectory import Failed, Score, Task, Trajectory, succeeded


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Episodes with their scores. Failed ones are counted and never averaged in."""

    scored: tuple[tuple[Trajectory, Score], ...]
    failed: tuple[Trajectory, ...]
    envs: tuple[str, ...] = ()
    """The environments of a mixture."""

    def metrics(self) -> dict[str, float]:
        """Success, reward and turns of the scored episodes, and how many episodes failed."""
        played = [trajectory for trajectory, _ in self.scored]
        successes = [succeeded(*pair) for pair in self.scored]
        low, high = wilson_interval(sum(successes), len(played))
        values = [score.value for _, score in self.scored if score.parts]  # none, if every part compares members
        return {
            "eval/success": fmean(successes) if played else float("nan"),
            "eval/success_low": low,
            "eval/success_high": high,
            "eval/reward": fmean(values) if values else float("nan"),
            "eval/reward_error": stdev(values) / math.sqrt(len(values)) if len(values) > 1 else float("nan"),
            "eval/turns": fmean(len(t.turns) for t in played) if played else float("nan"),
            "eval/episodes": float(len(played)),
            "eval/failed": float(len(self.failed)),
            **{f"eval/{name}": value for name, value in by_agent(self.scored).items()},
            **{f"eval/{name}": value for name, value in by_env(self.scored, self.envs).items()},
        }


async def play_all(
    runner: EpisodeRunner, tasks: Iterable[Task], config: RunConfig, turnstile: Turnstile | None = None
) -> list[Trajectory]:
    """Play each task once, at most `rollout.max_live_episodes` at a time. One trajectory for each trained agent, in
    order of the tasks.

    An episode that fails is not played again, unless the environments' server could not be reached: it waits for up to
    `rollout.deadlines.outage`. If there is a turnstile, each episode passes it before it begins.
    """
    slots = asyncio.Semaphore(config.rollout.max_live_episodes)
    outages = Outages(config.rollout.deadlines.outage)

    async def play(task: Task) -> Sequence[Trajectory]:
        episode = Episode(task.id, task, derive_seed(config.seed, "sampling", task.id))
        rng = Random(derive_seed(config.seed, "pause", task.id))
        async with slots:
            failures = 0
            while True:
                if turnstile is not None:
                    await turnstile.passes()
                started = now()
                played = await runner.play(episode)
                failed = next((one.status for one in played if isinstance(one.status, Failed)), None)
                if failed is None:
                    outages.episode_ended()
                if failed is None or not outages.caused(failed, started):
                    return played
                failures += 1
                await outages.pause(failures, rng)

    async with Flow("evaluation") as flow:
        playing = [flow.start(play(task), name=task.id) for task in tasks]
    return [trajectory for episode in playing for trajectory in episode.result()]


async def evaluate(rollouts: RolloutAssembly, tasks: int | None = None) -> Evaluation:
    """Play the held-out tasks with the engine's current weights.

    Each task is played once, so the scores exclude reward parts that compare the members of a group.
    """
    config = rollouts.config
    held_out = held_out_tasks(config, config.evaluation.tasks if tasks is None else tasks)
    trajectories = await play_all(rollouts.evaluating(), held_out, config)
    ended = [t for t in trajectories if not isinstance(t.status, Failed)]
    async with Flow("scoring") as flow:
        asked = [flow.start(rollouts.reward.score(trajectory), name=trajectory.id) for trajectory in ended]
    scores = [score.result() for score in asked]
    scored = [pair for pair in zip(ended, scores, strict=True) if not isinstance(pair[1].status, Failed)]
    kept = {(trajectory.id, trajectory.agent) for trajectory, _ in scored}
    failed = tuple(trajectory for trajectory in trajectories if (trajectory.id, trajectory.agent) not in kept)
    return Evaluation(tuple(scored), failed, tuple(one.called for one in config.env.mixture))


async def evaluate_run(run: Run, rollouts: RolloutAssembly, step: int) -> None:
    """Evaluate the weights after `step` steps and record the result, unless that was done before."""
    if run.config.evaluation.tasks == 0 or run.evaluated(step):
        return
    run.begin_phase(step, "evaluation")
    evaluation = await evaluate(rollouts)
    file = run.folder / "trajectories" / f"held_out_{step:06d}.parquet"
    await run_to_completion(asyncio.to_thread(write_trajectories, file, evaluation.scored))
    run.record_evaluation(step, evaluation.metrics())
