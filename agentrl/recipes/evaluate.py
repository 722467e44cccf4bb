"""Evaluation: held-out tasks, played by the same code as training."""

import asyncio
import math
from collections.abc import Collection, Iterable
from dataclasses import replace
from random import Random

from agentrl.assembly.rollouts import RolloutAssembly
from agentrl.config.run_config import RunConfig
from agentrl.errors import ConfigError, StalenessError
from agentrl.flow import Flow, Turnstile
from agentrl.hosting.wrappers import address
from agentrl.observe.evaluation import Evaluation, score_values
from agentrl.observe.reports import (
    HELD_OUT,
    Conditions,
    EpisodeResult,
    EvaluationReport,
    PlayedTask,
)
from agentrl.rollout.assignment import Assignment, EpisodeOver, MemberReport, TokensSampled
from agentrl.rollout.attempts import NO_RETRIES, Attempts
from agentrl.rollout.concurrency import EpisodeSlots
from agentrl.rollout.member import Member, MemberResult
from agentrl.rollout.outage import Outages
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.seeds import derive_seed
from agentrl.rollout.staleness import Ticket
from agentrl.rollout.token_budget import Holding, TokenBudget
from agentrl.runs.run import Run
from agentrl.runs.task_sources import held_out_tasks
from agentrl.tasks.suite_tasks import suite_episodes
from agentrl.tasks.suites import EvaluationSampling, SuiteConfig
from agentrl.trajectory import Failed, Score, Task, Trajectory

EVALUATION_PRIORITY = 1 << 30
"""Of an evaluation's requests: those of training, if there are any, are served before them."""


async def play_all(
    runner: EpisodeRunner,
    tasks: Iterable[Task],
    config: RunConfig,
    turnstile: Turnstile | None = None,
) -> list[Trajectory]:
    """Play each task once, and score nothing. One trajectory for each trained agent, in order of
    the tasks. See `play_members`.
    """
    results = await play_members(Member(runner), tasks, config, turnstile)
    return [trajectory for result in results for trajectory in result.trajectories]


async def play_members(
    member: Member,
    tasks: Iterable[Task],
    config: RunConfig,
    turnstile: Turnstile | None = None,
    tokens: TokenBudget | None = None,
) -> list[MemberResult]:
    """Play and score each task once, at most `rollout.max_live_episodes` at a time, and as many as
    the engines' KV caches hold, if there is a budget of `tokens`. The results are in order of the
    tasks.

    An episode that fails is not played again, unless the environments' server could not be reached:
    it waits for up to `rollout.deadlines.outage`. If there is a turnstile, each episode passes it
    before it begins.
    """
    most = config.rollout.live_episodes().most
    slots = EpisodeSlots(most)
    attempts = Attempts(NO_RETRIES, Outages(config.rollout.deadlines.outage))

    def follow_tokens() -> None:
        if (allowed := share.limit) is not None:
            slots.limit = min(most, max(1, allowed))
            slots.grant()

    async def play(assignment: Assignment, place: Ticket) -> MemberResult | None:
        await slots.acquire(place)
        if turnstile is not None:
            await turnstile.passes()

        async def play_in_slot(holding: Holding) -> MemberResult:
            def take_report(report: MemberReport) -> None:
                match report:
                    case TokensSampled(_, answers, context):
                        holding.answered(answers, context)
                    case EpisodeOver(lengths):
                        holding.end(whole=bool(lengths))
                        slots.release()  # before it is scored

            return await member.play(assignment, take_report)

        return await share.play(assignment.task.env, play_in_slot)

    async def play_until_over(number: int, task: Task) -> MemberResult:
        seed = derive_seed(config.seed, "sampling", task.id)
        assignment = Assignment(task.id, task, seed, priority=EVALUATION_PRIORITY)
        rng, place = Random(derive_seed(config.seed, "pause", task.id)), Ticket(0, number, 0)
        last = await attempts.repeat(lambda attempt: play(assignment, place), rng)
        return last.result

    share = (tokens or TokenBudget(None, 1)).join(follow_tokens)
    follow_tokens()
    try:
        async with Flow("evaluation") as flow:
            playing = [
                flow.start(play_until_over(number, task), name=task.id)
                for number, task in enumerate(tasks)
            ]
    finally:
        share.leave()
    return [task.result() for task in playing]


async def evaluate(
    rollouts: RolloutAssembly, name: str = HELD_OUT, *, tasks: int | None = None
) -> Evaluation:
    """Play the tasks of a suite with the engine's current weights. `tasks`: how many held-out
    tasks, by default as many as the config has.

    Episodes are scored singly, so the scores exclude reward parts that compare the members of a
    group.
    """
    config = rollouts.config
    if name == HELD_OUT:
        held_out = held_out_tasks(config, config.evaluation.tasks if tasks is None else tasks)
        scored, failed = await _play_and_score(rollouts, config.evaluation, held_out)
        envs = tuple(entry.run_name for entry in config.env.mixture)
        return Evaluation(scored, failed, envs=envs)
    suite = _suites(config)[name]
    episodes = await asyncio.to_thread(suite_episodes, suite, config.envs[suite.label])
    scored, failed = await _play_and_score(rollouts, suite, episodes)
    return Evaluation(scored, failed, name, suite.samples)


async def evaluate_all(
    rollouts: RolloutAssembly, tasks: int | None, names: Collection[str]
) -> dict[str, Evaluation]:
    """The evaluations of the suites with these names, by default of all, `held_out` (`tasks` of its
    tasks) among them.

    Raises:
        ConfigError: there is no such suite.
    """
    suites = _suites(rollouts.config)
    if unknown := sorted(set(names) - {HELD_OUT, *suites}):
        raise ConfigError(
            f"no suite {unknown[0]!r} in evaluation.suites; there is"
            f" {', '.join([HELD_OUT, *suites])}"
        )
    played = names or ([HELD_OUT, *suites] if tasks != 0 else suites)
    return {name: await evaluate(rollouts, name, tasks=tasks) for name in played}


def _suites(config: RunConfig) -> dict[str, SuiteConfig]:
    """The configured suites by name."""
    return {suite.name: suite for suite in config.evaluation.suites}


async def _play_and_score(
    rollouts: RolloutAssembly, how: EvaluationSampling, tasks: Iterable[Task]
) -> tuple[tuple[tuple[Trajectory, Score], ...], tuple[Trajectory, ...]]:
    """(scored episodes, failed ones) of these tasks."""
    member = Member(rollouts.evaluating(how), rollouts.reward)
    results = await play_members(member, tasks, rollouts.config, tokens=rollouts.tokens)
    _check_version(trajectory for result in results for trajectory in result.trajectories)
    scored: list[tuple[Trajectory, Score]] = []
    failed: list[Trajectory] = []
    for result in results:
        if result.failure is None:
            scored += result.scored
        else:
            failed += [replace(one, status=result.failure) for one in result.trajectories]
    return tuple(scored), tuple(failed)


def _check_version(trajectories: Iterable[Trajectory]) -> None:
    """An evaluation is of one version of the weights.

    Raises:
        StalenessError: it has tokens of several (a defect).
    """
    versions = set[int]()
    for trajectory in trajectories:
        for turn in trajectory.turns:
            stamps = turn.completion.policy_versions
            # Versions only grow within an answer, so the first and the last token tell.
            versions.update(map(int, (*stamps[:1], *stamps[-1:])))
    if len(versions) > 1:
        raise StalenessError(
            f"an evaluation has tokens of the weights of {sorted(versions)}: they belong to no step"
        )


async def evaluate_run(
    run: Run, rollouts: RolloutAssembly, step: int, *, due: bool = False, overlaps: bool = False
) -> None:
    """Evaluate the weights after `step` steps and record the results, unless that was done before.

    `due`: only what `every` asks for at this step. `overlaps`: training continues meanwhile.
    """
    left = evaluations_left(run, step, due=due)
    run.evaluations.begin(step, left)
    for name in left:
        if not overlaps:  # else the phase is one of training
            run.status.begin_phase(step, "evaluation")
        evaluation = await evaluate(rollouts, name)
        await _record(run, step, evaluation)
        check_best(run, step, evaluation)
        run.evaluations.finish(step, name, evaluation.metrics())


def check_best(run: Run, step: int, evaluation: Evaluation) -> None:
    """Check that what `checkpoint.best` names tells one checkpoint from another.

    Raises:
        ConfigError: it is unknown before the first step.
    """
    best, scored, metrics = run.config.checkpoint.best, evaluation.scored, evaluation.metrics()
    if best is None or best not in metrics or not scored:
        return
    if math.isnan(metrics[best]):
        text = (
            f"checkpoint.best={best} is unknown, as neither the environment nor the reward says"
            " which episodes succeeded"
        )
        if step == 0:
            raise ConfigError(
                f"{text}: write checkpoint.best={best.rpartition('/')[0]}/reward with a part of the"
                ' reward that scores single episodes, or set info["success"] in the environment'
            )
        run.display.say(f"{text}: no checkpoint is kept for it")
    elif not best.endswith("/reward") and _all_above_zero(scored):
        run.display.say(
            f"checkpoint.best={best} cannot tell these weights from others: neither the environment"
            " nor the reward gives a verdict, every score is above 0, and that counts as a"
            " success. Write success_at beside the part of the reward that knows, or"
            f" checkpoint.best={best.rpartition('/')[0]}/reward"
        )


def _all_above_zero(scored: Iterable[tuple[Trajectory, Score]]) -> bool:
    """True if each episode counts as a success only because its score is above zero, and the scores
    differ.
    """
    scored = list(scored)
    guessed = all(
        trajectory.success is None and score.success is None for trajectory, score in scored
    )
    values = score_values(scored)
    return guessed and min(values, default=0.0) > 0 and min(values) < max(values)


def evaluations_left(run: Run, step: int, *, due: bool) -> list[str]:
    """The names of the evaluations of these weights that have no result yet. `due`: only of those
    that are due, and of those that an earlier launch has begun.
    """
    config = run.config.evaluation
    every = {HELD_OUT: config.every} if config.tasks else {}
    every |= {suite.name: suite.every for suite in config.suites}
    return [
        name
        for name, steps in every.items()
        if (not due or (steps and step % steps == 0) or name in run.evaluations.pending(step))
        and not run.evaluations.is_finished(step, name)
    ]


async def _record(run: Run, step: int, evaluation: Evaluation) -> None:
    """Write the episodes of an evaluation, its report and its metrics."""
    lost = [
        (trajectory, Score(math.nan, status=trajectory.status))
        for trajectory in evaluation.failed
        if isinstance(trajectory.status, Failed)
    ]
    await run.recorder.record_episodes(evaluation.name, step, [*evaluation.scored, *lost])
    report_of(step, evaluation, run.config).write(run.folder / "evaluations")
    run.recorder.track_samples(evaluation.name, step, evaluation.scored)
    run.recorder.record_evaluation(step, evaluation)


def report_of(
    step: int, evaluation: Evaluation, config: RunConfig | None = None
) -> EvaluationReport:
    """The report of an evaluation of the weights after `step` steps, played by `config`."""
    name, sampled = evaluation.name, evaluation.name != HELD_OUT
    episodes = []
    for trajectory, score in evaluation.scored:
        played = None
        if config is not None:
            env = config.envs[trajectory.task.env]
            where = address(env.name, env.all_wrappers)
            played = PlayedTask.of(trajectory, where, program=env.is_agent)
        episodes.append(EpisodeResult.of(trajectory, score, sampled, played))
    conditions = Conditions() if config is None else _conditions(name, config)
    return EvaluationReport(name, step, evaluation.metrics(), tuple(episodes), conditions)


def _conditions(name: str, config: RunConfig) -> Conditions:
    """The settings by which the evaluation of this name is played and scored."""
    suite = next((suite for suite in config.evaluation.suites if suite.name == name), None)
    envs = dict(config.env.all) if suite is None else {suite.label: config.envs[suite.label]}
    sampling = (
        (suite or config.evaluation).sampling(config.rollout.sampling).model_dump(mode="json")
    )
    longest, budgets, rewards = (
        config.own_max_tokens(),
        config.own_budgets(),
        config.rewards_by_env(),
    )
    for env in envs:
        of = f" of {env}" if len(envs) > 1 else ""
        sampling[f"max_tokens{of}"] = longest.get(env, config.rollout.sampling.max_tokens)
        for limit, value in budgets.get(env, config.rollout.budget):
            sampling[f"budget.{limit}{of}"] = value
    return Conditions(
        {address(one.name, one.all_wrappers): one.options for one in envs.values()},
        sampling,
        [rewards.get(env, config.reward).dump() for env in envs],
    )
