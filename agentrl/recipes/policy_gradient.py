"""Policy gradient over many turns: the file to read first.

     ┌────────────────────────── weights, version step + 1 ──────────────────────────┐
     ▼                                                                               │
    Rollouts: env ◀─turns─▶ engine ─▶ reward ─▶ groups ──▶ advantages ──▶ batch ──▶ trainer
     (agentrl/rollout)                       next_batch    (algorithm)   collate

One loop. With `rollout.max_staleness = 0` it is synchronous: no episode begins before the weights
of the last step are live. With 1 or more, the episodes of the next steps are played while the
trainer works.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from agentrl.algorithms.batch_processing import BatchProcessing
from agentrl.algorithms.samples import traced_batch_of
from agentrl.assembly.training import assemble_training
from agentrl.config.compatibility import check_stage
from agentrl.estimation.advisors import ON_NEWEST, CriticTraining
from agentrl.estimation.teacher import TeacherConfig
from agentrl.flow import elapsed, loop_metrics
from agentrl.observe.step_report import StepReport
from agentrl.protocols import Algorithm
from agentrl.recipes.demonstrations import DemonstrationsConfig
from agentrl.recipes.evaluations import evaluations
from agentrl.recipes.starting_model import starting_model
from agentrl.rollout.opponents import Matches
from agentrl.runs.run import Run
from agentrl.settings.base import Settings


class PolicyGradientSettings(Settings):
    """Settings of `recipe: policy_gradient`."""

    demonstrations: DemonstrationsConfig | None = None
    """What the model imitates first, if it cannot do the task at all yet."""


async def policy_gradient(run: Run, settings: PolicyGradientSettings) -> None:
    """Train `run.config.steps` steps, evaluating on held-out tasks before and after."""
    check_stage(run.config, "training")
    await train(
        run, run.config.algorithm.make(), await starting_model(run, settings.demonstrations)
    )


async def train(
    run: Run,
    algorithm: Algorithm,
    model: Path,
    *,
    teacher: TeacherConfig | None = None,
    training: CriticTraining = ON_NEWEST,
    matches: Matches | None = None,
) -> None:
    """The loop of the drawing above, from the model in this folder.

    `teacher`: what an algorithm of distillation asks, if an engine serves it. `training`: that of
    the critic, if any. `matches`: who plays whom in self-play.
    """
    config = run.config
    latest = run.checkpoints.latest
    async with assemble_training(
        config, algorithm, model, latest, teacher, training=training, matches=matches
    ) as parts:
        trainer, weights = parts.trainer, parts.weights
        start = await parts.resume(run)
        async with evaluations(run, parts, start) as evaluating:
            await evaluating.evaluate(start, due=start > 0)  # the others were at the beginning
            run.metrics.rewind(start)
            by_env = {
                one.called: one.algorithm.make()
                for one in config.env.mixture
                if one.algorithm is not None
            }
            processing = parts.state.add(
                "batch_processing", BatchProcessing(config.batch_processing, algorithm, by_env)
            )
            scheduler = parts.rollouts(run, start, processing.teaches)
            async with (
                scheduler as rollouts,
                run.recorder.keeping_episodes(rollouts.take_all),
                run.writing_checkpoints(),
            ):
                for step in range(start, config.steps):
                    clock = Stopwatch(partial(run.status.begin_phase, step))
                    with clock("rollout"):
                        async with run.saved_if_stopped(step, parts):
                            groups = await rollouts.next_batch()
                    with clock("train"):
                        oldest = config.rollout.oldest_trained(step)
                        make = partial(
                            traced_batch_of, groups, algorithm, processing, oldest, by_env
                        )
                        made = await asyncio.to_thread(make)  # millions of tokens take long
                        batch = await parts.advisors.taught(made.batch)
                        async with parts.sharing.training():
                            batch, advice = await parts.advisors.advise(batch, step, groups)
                            exact = await parts.exact.measured(groups, batch)
                            metrics = await trainer.step(
                                batch, algorithm.loss, algorithm.normalizer(batch)
                            )
                            health = await run.recorder.record_samples(
                                step, groups, replace(made, batch=batch), trainer
                            )
                    with clock("weights"):
                        await evaluating.before_update()
                        async with rollouts.new_weights(step + 1):
                            published = await weights.publish(trainer, version=step + 1)
                    report = StepReport(
                        step,
                        groups,
                        clock.seconds,
                        rollouts.take_untrained(),
                        trainer=metrics,
                        samples=health,
                        advisors=advice,
                        exact=exact,
                        weights=published.metrics(),
                        rollouts=rollouts.metrics(),
                        batch_processing=processing.update(groups),
                        event_loop=loop_metrics(),
                    )
                    await run.recorder.record_step(report)
                    if (step + 1) % config.checkpoint.every == 0 or step + 1 == config.steps:
                        await run.begin_checkpoint(step + 1, parts)
                    async with run.saved_if_stopped(step + 1, parts):
                        await evaluating.evaluate(step + 1, due=True)
            await evaluating.evaluate(config.steps)
        await run.finish()


class Stopwatch:
    """Measures seconds by phase. `begins` is called with each phase's name when it begins."""

    def __init__(self, begins: Callable[[str], None] = lambda phase: None) -> None:
        self.seconds: dict[str, float] = {}
        self._begins = begins

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the time of the block as `phase`."""
        self._begins(phase)
        started = elapsed()
        yield
        self.seconds[phase] = elapsed() - started
