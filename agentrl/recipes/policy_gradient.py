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
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from agentrl.algorithms.batch_processing import BatchProcessing
from agentrl.algorithms.samples import TracedBatch, traced_batch_of
from agentrl.assembly.training import TrainingAssembly, assemble_training
from agentrl.config.compatibility import check_stage
from agentrl.estimation.advisors import ON_NEWEST, CriticTraining
from agentrl.estimation.teacher import TeacherConfig
from agentrl.flow import loop_metrics
from agentrl.observe.step_report import StepReport
from agentrl.observe.stopwatch import Stopwatch
from agentrl.protocols import Algorithm
from agentrl.recipes.demonstrations import DemonstrationsConfig
from agentrl.recipes.evaluations import evaluations
from agentrl.recipes.starting_model import starting_model
from agentrl.rollout.opponents import Matches
from agentrl.runs.run import Run
from agentrl.settings.base import Settings
from agentrl.trajectory import Group


class PolicyGradientSettings(Settings):
    """Settings of `recipe: policy_gradient`."""

    demonstrations: DemonstrationsConfig | None = None
    """The episodes that the model imitates first, if it cannot do the task at all yet."""


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
        start = await parts.resume(run)
        async with parts.changing_engines(run), evaluations(run, parts, start) as evaluating:
            await evaluating.evaluate(start, due=start > 0)  # the others were at the beginning
            run.metrics.rewind(start)
            by_env: dict[str, Algorithm] = {}
            for entry in config.env.mixture:
                if entry.algorithm is not None:
                    by_env[entry.run_name] = entry.algorithm.make()
            processing = parts.state.add(
                "batch_processing", BatchProcessing(config.batch_processing, algorithm, by_env)
            )
            scheduler = parts.rollouts(run, start, processing.teaches)
            async with (
                scheduler as rollouts,
                run.recorder.scribe.in_own_process(config.rollout.worker_range is not None),
                run.recorder.keeping_episodes(rollouts.take_all),
                run.writing_checkpoints(),
            ):
                for step in range(start, config.steps):
                    clock = Stopwatch(partial(run.status.begin_phase, step))
                    with clock("rollout"):
                        async with run.saved_if_stopped(step, parts):
                            groups = await rollouts.next_batch()
                    with clock("train"):
                        # In a thread: a batch of millions of tokens takes long to make.
                        oldest = config.rollout.oldest_trained(step)
                        traced = await asyncio.to_thread(
                            traced_batch_of, groups, algorithm, processing, oldest, by_env
                        )
                        # The teacher is an engine, and those sleep while trainers that share
                        # their devices work.
                        taught = await parts.advisors.ask_teacher(traced.batch)
                    async with parts.sharing.training():
                        with clock("train"):
                            report = await update_policy(
                                run,
                                parts,
                                algorithm,
                                step=step,
                                groups=groups,
                                traced=replace(traced, batch=taught),
                            )
                        with clock("weights"):
                            await evaluating.before_update()
                            async with rollouts.new_weights(step + 1), parts.sharing.updating():
                                published = await parts.weights.publish(
                                    parts.trainer, version=step + 1
                                )
                    report = replace(
                        report,
                        seconds=clock.seconds,
                        untrained=rollouts.take_untrained(),
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


async def update_policy(
    run: Run,
    parts: TrainingAssembly,
    algorithm: Algorithm,
    *,
    step: int,
    groups: Sequence[Group],
    traced: TracedBatch,
) -> StepReport:
    """Train on a batch, after the reference or the critic of the run has seen it, and record its
    samples. The report has the metrics of these parts.
    """
    batch, advice = await parts.advisors.advise(traced.batch, step, groups)
    exact = await parts.exact.measure(groups, batch)
    metrics = await parts.trainer.step(batch, algorithm.loss, algorithm.normalizer(batch))
    samples = await run.recorder.record_samples(
        step, groups, replace(traced, batch=batch), parts.trainer
    )
    return StepReport(step, groups, trainer=metrics, samples=samples, advisors=advice, exact=exact)
