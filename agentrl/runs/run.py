"""`Run`: the folder of a run, and all that is written into it.

runs/NAME/
  config.yaml        the resolved config; `agentrl train --resume runs/NAME` needs nothing else
  config.0.yaml ...  each config that the run has had; changes.jsonl has the changes
  metrics.jsonl      a row for each step and each evaluation
  data.json          digests of the task files, if tasks come from files
  ledger.sqlite      the fate of every task and episode
  trajectories/      step_000000.parquet ...: every episode that was trained on
  profile/           traces for Perfetto, where the run was profiled
  untrained/         step_000000.parquet ...: some episodes that were filtered, stale or failed; of
                     a step in which the run ended, all that were played to their end
  samples/           step_000000.parquet ...: the training samples of each step, with the trainer's
                     figures for each token
  timeline.jsonl     when each phase of each step began
  warnings.jsonl     warnings raised by the run
  origins.json       the origin of each setting in config.yaml
  checkpoints/       step_000010/ ... (each a Hugging Face folder with the optimizer beside it)
  model_commit       the commit of a model that was taken from the hub
  demonstrations/    the model after supervised play, where the config asks for it
  reward_model/      the model that the recipe reward_model has trained
  iterations/        model, pairs and lineage of each iteration of the recipe iterative_dpo
  tensorboard/       event files
  trackers/          the ids of this run at trackers with a server
  reward_curve.png   when the run has ended
  status.json        the current step and phase with its start, the process id and host; and the
                     run's end (ending.py)
  launches.jsonl     each start: when, on which host, and from which commit
  machine.jsonl      how busy the machine was: CPU, memory, GPUs, disks
  live.json          while the process lives, renewed every second: workers alive, pending calls
  lock               held by the process that trains here, which it names
  tmp/               temporary files of the process that trains here, and of its children
  evaluation_log.json     pending evaluations, and the results of the finished ones
  evaluations/       the result of each episode of each evaluation; `agentrl compare` reads them
  summary.json       of an ended run: how it ended, success before and after, steps, seconds,
                     largest staleness, fates
"""

import asyncio
import json
import logging
import os
import socket
import sqlite3
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic_core import to_json
from rich.console import Console
from rich.markup import escape

from agentrl.algorithms.samples import TracedBatch
from agentrl.cluster.worker_registry import restart_metrics
from agentrl.config.history import ConfigHistory, SettingChange, refuse_another_run
from agentrl.config.learning_rates import jumps_of_schedules, notes_of_schedules
from agentrl.config.loading import LoadedConfig, check_installed, check_options
from agentrl.config.run_config import RunConfig, unused_by
from agentrl.conversation.renderer import renderer_of
from agentrl.errors import AgentRLError, ConfigError, describe
from agentrl.estimation.advisors import CRITIC_FOLDER
from agentrl.files.disk_errors import storage_problem
from agentrl.files.durable import remove_left, remove_unfinished, unfinished, write_whole
from agentrl.flow import Flow, elapsed, run_to_completion
from agentrl.ledger.ledger import Ledger, check_ledger
from agentrl.models.source import (
    check_architecture,
    commit_of,
    description_folder,
    model_folder,
    vocabulary_size,
)
from agentrl.models.tiny import SIZES
from agentrl.observe.curve import draw_curve
from agentrl.observe.ending import Ending, ending_of, how_to_go_on
from agentrl.observe.evaluation import Evaluation
from agentrl.observe.falls import Alarm
from agentrl.observe.health import batch_health, episode_health
from agentrl.observe.launches import record_launch
from agentrl.observe.live_status import LiveStatus
from agentrl.observe.machine import MachineLog
from agentrl.observe.metrics import MetricsFile, masked_shares, rollout_metrics
from agentrl.observe.profiler import Profiler
from agentrl.observe.progress import ProgressDisplay
from agentrl.observe.reports import HELD_OUT
from agentrl.observe.samples import TrainedBatch, drawn_groups, write_samples
from agentrl.observe.silence import Silence, conditions
from agentrl.observe.step_report import StepReport, merge_metrics
from agentrl.observe.tracking import Tracking, sample_of
from agentrl.observe.trajectories import write_trajectories
from agentrl.planner.check import check_placement
from agentrl.protocols import AlgorithmOffers, Renderer, Savable, Trainer
from agentrl.rollout.agents import FrozenRoute
from agentrl.rollout.seeds import derive_seed
from agentrl.rollout.underway import Underway
from agentrl.runs.checkpoint import Checkpoints, set_aside
from agentrl.runs.evaluation_log import EvaluationLog
from agentrl.runs.lock import RunLock
from agentrl.runs.task_sources import fingerprints
from agentrl.runs.temp import RunTemp
from agentrl.trajectory import Group, Message, Score, Task, Trajectory
from agentrl.weights.fit import check_fit
from agentrl.weights.low_rank import LowRank
from agentrl.weights.publisher import checksum

logger = logging.getLogger(__name__)
_COMMIT = "model_commit"
_ADAPTERS, _TRAINER_STATE = "adapter", "trainer.pt"
"""What the trainers here write into a checkpoint: a folder of adapters if they train those, and
their state.
"""
_SHAPE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
"""What of a model's config.json decides the shapes of its weights."""


class Run:
    """A new or resumed run in its folder. A context manager.

    A resumed run continues from its newest checkpoint that is not damaged, or from the one after
    `step` steps. What its config changes is said; `change` allows it to change what defines the
    run: its model, and the stream of its tasks.

    Raises:
        CheckpointError: every checkpoint is damaged.
        ConfigError: the folder holds another run already, or no run to resume; another process
            trains in it; its ledger is missing or contradicts its checkpoint; there is no such
            checkpoint or model; the placement is not possible; a tracker, or
            what a component imports, is not installed. Nothing has started then.
    """

    def __init__(
        self,
        loaded: LoadedConfig,
        console: Console,
        *,
        resume: bool = False,
        step: int | None = None,
        change: bool = False,
    ) -> None:
        self.config = loaded.config
        self._loaded = loaded
        self.folder = self.config.run_dir
        self.resumed = resume
        self._check_folder()
        self._changes = self._check_changes(change)
        self._new_model = any(
            change.key in ("model.name", "model.revision") for change in self._changes
        )
        check_installed(self.config)
        check_options(loaded)
        check_model(self.config, pinned=not self._new_model)
        check_placement(self.config)
        data = fingerprints(self.config)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"run_dir: the folder {self.folder} cannot be made: {error.strerror}"
            ) from error
        for path in (self.folder / "checkpoints", self.folder / "trajectories"):
            if path.exists() and not path.is_dir():
                raise ConfigError(f"{path} is a file, where the run keeps a folder: move it away")
        with ExitStack() as opened:
            opened.enter_context(RunLock(self.folder))
            self._check_folder()  # another process may have started meanwhile, and ended
            opened.enter_context(RunTemp(self.folder))
            remove_unfinished(self.folder)
            kept = self.config.checkpoint
            self.checkpoints = Checkpoints(
                self.folder / "checkpoints", kept.keep, kept.keep_best if kept.best else 0
            )
            if resume:
                self._check_state(console, step)
            self._check_data(data, change)
            self.ledger = Ledger(self.folder / "ledger.sqlite")
            self.metrics = MetricsFile(self.folder / "metrics.jsonl")
            if resume:
                self.metrics.mend()
            self.evaluations = EvaluationLog.of_run(self.folder)
            self.display = ProgressDisplay(console, self.config.steps, str(self.folder))
            self._live = LiveStatus(self.folder)
            self._profiler = Profiler(self.folder, always=self.config.observe.profile)
            self._settings = {key: value for key, value, _ in loaded.rows()}
            self._tracking: Tracking | None = None
            self._ending: Ending | None = None
            self._silence = self._new_silence()
            self._checkpoint_flow = Flow("checkpoints")
            self._begun: asyncio.Task[Path] | None = None
            self._status: dict[str, Any] = {}
            self._summary: Mapping[str, Any] | None = None
            self._open = opened.pop_all()

    def _check_state(self, console: Console, step: int | None) -> None:
        """Let the run continue from its newest sound checkpoint, or from the one after `step`
        steps.
        """
        if not self.config.checkpoint.allow_foreign:
            self.checkpoints.check_origin()
        self.checkpoints.set_aside_damaged(
            lambda text: console.print(text, highlight=False, soft_wrap=True)
        )
        newest = self.checkpoints.latest()
        done = step if step is not None else newest[0] if newest else 0
        if done > self.config.steps:
            raise ConfigError(
                f"steps={self.config.steps}: the run in {self.folder} has made {done} steps "
                f"already: write a larger number to go on, `--step {self.config.steps}` to go "
                "back to that checkpoint if there is one, or run_dir=ANOTHER for a new run"
            )
        if step is not None:
            self.checkpoints.go_back_to(step)
        newest = self.checkpoints.latest()
        if newest is not None:
            check_goes_on(newest[1], self.config, new_model=self._new_model)
            check_ledger(self.folder / "ledger.sqlite", newest[0])

    def _check_changes(self, change: bool) -> Sequence[SettingChange]:
        """What a resumed run changes of its config, which may not make another run of it unless
        `change`.
        """
        if not self.resumed:
            return ()
        changes = ConfigHistory(self.folder).changes(self._loaded)
        if not change:
            refuse_another_run(changes, self.folder)
        return changes

    def _check_data(self, data: Mapping[str, str], change: bool) -> None:
        """Record what the tasks' data are, and refuse to resume on others, unless the tasks may
        change.
        """
        path = self.folder / "data.json"
        before = _fingerprints_in(path) if self.resumed and path.exists() else {}
        changed = [split for split in data if before.get(split, data[split]) != data[split]]
        if changed and not change:
            raise ConfigError(
                f"tasks: the data of the split {changed[0]!r} are not those that the run in "
                f"{self.folder} began with: put them back, start a new run with run_dir=ANOTHER, "
                "or add --change to go on with them in this one"
            )
        if data:
            write_whole(path, json.dumps({**before, **data}, indent=2) + "\n")

    def _check_folder(self) -> None:
        started = (self.folder / "config.yaml").exists()
        if started and not self.resumed:
            raise ConfigError(
                f"{self.folder} holds a run already: resume it with `agentrl train --resume "
                f"{self.folder}`, or write run_dir=ANOTHER for a new one"
            )
        if self.resumed and not started:
            raise ConfigError(f"{self.folder} holds no run to resume (no config.yaml in it)")

    def __enter__(self) -> Self:
        with self._open as opened:
            opened.enter_context(self.ledger)
            self._tracking = Tracking(
                self.config.trackers,
                self.folder,
                self._settings,
                self._say_warning,
                tags=self.config.observe.tags,
            )
            opened.callback(self._end_tracking)
            opened.enter_context(self.display)
            opened.enter_context(self._profiler)
            opened.enter_context(self._live)
            opened.enter_context(MachineLog(self.folder))
            record_launch(self.folder, resumed=self.resumed)
            self._write_status(None, None, datetime.now(UTC))
            self._keep_config()
            self._open = opened.pop_all()
        return self

    def _keep_config(self) -> None:
        """Keep the config, and say what is to be known of it before the work begins."""
        newest = self.checkpoints.latest()
        start = newest[0] if newest and self.resumed else 0
        if self._changes:
            self.display.say(f"resuming after {start} steps with changes:")
            for change in self._changes:
                self.display.say(f"  {escape(str(change))}")
        if self._new_model:
            self._set_aside_models()
        history = ConfigHistory(self.folder)
        notes = list(notes_of_schedules(self.config))
        if self._changes:
            notes += jumps_of_schedules(history.newest().config, self.config, start)
        history.keep(self._loaded, self._changes, start)
        for text in notes:
            self.note(start, text, "lr")
        if not self.resumed:
            self._say_what_is_not_used()
        elif (self.folder / "demonstrations").exists():
            late = [
                change.key
                for change in self._changes
                if change.key.startswith("recipe.demonstrations")
            ]
            if late:
                self.note(
                    start,
                    f"{', '.join(late)}: changes nothing any more, as demonstrations/ is made "
                    "already",
                )

    def _set_aside_models(self) -> None:
        """Rename what was made of the model that the run had before: it is made again of the new
        one.
        """
        (self.folder / _COMMIT).unlink(missing_ok=True)
        for made in (self.folder / "model", self.folder / "demonstrations"):
            if made.exists():
                self.display.say(
                    f"{made} is of the model before: it is set aside as "
                    f"{set_aside(made, 'left').name}"
                )

    def note(self, step: int, text: str, *metrics: str) -> None:
        """Say what the author of the settings has hardly meant, and keep it with the warnings about
        these metrics.
        """
        self.display.say(f"[yellow]note:[/yellow] {escape(text)}")
        self._keep_warning(step, Alarm(text, metrics))

    def _say_what_is_not_used(self) -> None:
        """Name the sections that somebody has written, and that the recipe does not use."""
        recipe = self.config.recipe
        written = {
            key.partition(".")[0] for key, _, origin in self._loaded.rows() if origin != "default"
        }
        if unused := [section for section in unused_by(recipe) if section in written]:
            self.display.say(
                f"[yellow]note:[/yellow] recipe={recipe.name} does not use {', '.join(unused)}"
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._open:
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        """Keep why the run ends. That it cannot be kept must not hide why the run ends."""
        try:
            newest = self.checkpoints.latest()
            steps = _steps_made(self.metrics.rows())
            self._ending = ending = ending_of(
                error, self.folder, steps=steps, checkpoint=newest[0] if newest else None
            )
            # which says itself what to write
            if error is not None and not isinstance(error, ConfigError):
                error.add_note(how_to_go_on(self.folder, ending.checkpoint))
            self._status["ended"] = ending.as_row()
            write_whole(self.folder / "status.json", json.dumps(self._status) + "\n")
            if self._summary is None:
                self._summary = self._summarised()
            self._write_summary({**self._summary, "ended": ending.as_row()})
        except (OSError, sqlite3.Error, AgentRLError) as problem:
            logger.warning(
                "why the run in %s has ended cannot be written there: %s", self.folder, problem
            )

    def _end_tracking(self) -> None:
        if self._tracking is None:
            return
        ending = self._ending
        if ending is None or ending.how == "killed":
            self._tracking.end("failed", "nothing tells why")
        else:
            self._tracking.end(ending.how, ending.why)

    def _new_silence(self) -> Silence:
        config = self.config
        # With a critic, an episode is compared with what was expected of it, and not with its
        # group.
        compares_groups = config.rollout.group_size > 1 and all(
            offers.compares_members and not offers.credits_turns and not offers.beyond_rewards
            for offers in (AlgorithmOffers.of(algorithm) for _, algorithm in config.trained_with())
        )
        sampling = config.rollout.sampling
        extends = config.model.history == "extend"
        budget = config.rollout.budget
        return Silence(
            conditions(
                sampling.max_tokens, budget, compares_groups=compares_groups, extends=extends
            )
        )

    def _warn(self, row: Mapping[str, Any]) -> None:
        for alarm in self._silence.read(row):
            self.display.warn(row["step"], alarm.text)
            self._keep_warning(row["step"], alarm)

    def _say_warning(self, text: str) -> None:
        """Warn of what is no metric's doing."""
        self.display.say(f"[yellow]warning:[/yellow] {escape(text)}")
        self._keep_warning(len(self.metrics.values("reward")), Alarm(text, ()))

    def _keep_warning(self, step: int, alarm: Alarm) -> None:
        with (self.folder / "warnings.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, **asdict(alarm)}) + "\n")

    def source_model(self) -> Path:
        """The folder of the configured model. One on the hub stays at the commit that the run began
        with.

        Raises:
            ConfigError: it is not there any more.
        """
        name = self.config.model.name
        folder = model_folder(name, _revision(self.config))
        if (commit := commit_of(folder)) is not None and not Path(name).is_dir():
            write_whole(self.folder / _COMMIT, f"{commit}\n")
        return folder

    def open_tasks(self, step: int) -> list[tuple[int, Task]]:
        """The tasks, with their numbers, that an earlier launch left open, after `step` steps.

        Where the run had another environment then, they are cancelled: nothing can play them any
        more. (A mixture keeps its environments.)
        """
        pending = self.ledger.rewind(step)
        if self.config.env.mixture:
            return pending
        gone = [number for number, task in pending if task.env not in self.config.env.all]
        for number in gone:
            self.ledger.end_task(
                number, "cancelled", "the run was resumed with another environment"
            )
        return [(number, task) for number, task in pending if number not in gone]

    def watch(self, underway: Callable[[], Underway]) -> None:
        """Show what a scheduler does, in the terminal and in `live.json`. `underway` is called by
        other threads.
        """
        self.display.watch(underway)
        self._live.watch(underway)

    def begin_phase(self, step: int, phase: str) -> None:
        """Record in `status.json` and `timeline.jsonl` that `phase` of step `step` begins."""
        begin = datetime.now(UTC)
        self._profiler.begin_phase(step, phase, begin.timestamp())
        self.display.begin_phase(phase)
        self._live.begin_phase()
        row = self._write_status(step, phase, begin)
        with (self.folder / "timeline.jsonl").open("a") as timeline:
            timeline.write(json.dumps(row) + "\n")

    def _write_status(
        self, step: int | None, phase: str | None, since: datetime
    ) -> Mapping[str, Any]:
        """Replace `status.json`, which also forgets how an earlier process has ended. Before its
        first step, a run has no step and no phase.
        """
        row = {"pid": os.getpid(), "step": step, "phase": phase, "since": since.isoformat()}
        self._status = {**row, "host": socket.gethostname()}
        path = self.folder / "status.json"
        # it need not survive a loss of power
        unfinished(path).write_text(json.dumps(self._status) + "\n")
        unfinished(path).replace(path)
        return row

    async def record_step(self, report: StepReport) -> None:
        """Record the results of a step.

        Raises:
            MetricNameError: two parts of the run report a metric of the same name.
        """
        step, groups = report.step, report.groups
        self.begin_phase(step, "record")
        path = self.folder / "untrained" / f"step_{step:06d}.parquet"
        if report.untrained:
            await run_to_completion(
                asyncio.to_thread(write_trajectories, path, report.untrained, self._epoch)
            )
        else:
            remove_left(path)  # of a step that a resumed run makes again
        await run_to_completion(
            asyncio.to_thread(self._write_trajectories, step, groups, self._epoch)
        )
        metrics = await asyncio.to_thread(self._step_metrics, report)
        self.write(step, metrics)
        if (step + 1) % self.config.checkpoint.every == 0:
            first = [(group.trajectories[0], group.scores[0]) for group in groups]
            self.track_samples("train", step, first)
        self.display.step(step, metrics, groups)

    def _step_metrics(self, report: StepReport) -> dict[str, float]:
        """The metrics of a step: those of its report, and of the episodes and workers behind it."""
        envs = [entry.called for entry in self.config.env.mixture]
        oldest_version = self.config.rollout.oldest_trained(report.step)
        episodes = rollout_metrics(report.groups, report.step, oldest_version, envs)
        tokens = episodes["sampled_tokens"] + episodes["prompt_tokens"]
        speed = tokens / max(sum(report.seconds.values()), 1e-9)
        return report.metrics(
            episodes=episodes,
            episode_health=episode_health(report.groups),
            workers=restart_metrics(),
            throughput={"tokens_per_second": speed},
        )

    async def record_samples(
        self, step: int, groups: Sequence[Group], made: TracedBatch, trainer: Trainer
    ) -> Mapping[str, float]:
        """Record the batch of these groups that the trainer has just made step `step` on, what it
        computed of its tokens, and which episodes carried no loss.

        Returns metrics of the batch: what was masked, and its health.
        """
        self.ledger.masked(step, made.masked, made.masked_segments)
        batch = made.batch
        count = self.config.observe.token_groups
        told = await trainer.token_logprobs() if count else None
        detailed = drawn_groups(batch, count, derive_seed(self.config.seed, "token_groups", step))
        path = self.folder / "samples" / f"step_{step:06d}.parquet"
        trained = TrainedBatch(batch, made.origins, told)
        await run_to_completion(asyncio.to_thread(write_samples, path, step, trained, detailed))
        health = await asyncio.to_thread(batch_health, trained)
        return merge_metrics({"masked": masked_shares(groups, made), "health": health})

    @cached_property
    def _epoch(self) -> float:
        """The Unix time when the event loop's clock, gaps included, showed 0. Read once, for equal
        times of all parts of an episode.
        """
        return datetime.now(UTC).timestamp() - elapsed()

    def _write_trajectories(self, step: int, groups: Sequence[Group], epoch: float) -> None:
        """Write the trajectories that a step was trained on."""
        scored: list[tuple[Trajectory, Score]] = []
        for group in groups:
            scored += zip(group.trajectories, group.scores, strict=True)
        write_trajectories(self.folder / "trajectories" / f"step_{step:06d}.parquet", scored, epoch)

    async def record_episodes(
        self, name: str, step: int, played: Sequence[tuple[Trajectory, Score]]
    ) -> None:
        """Write the episodes, also failed ones, of an evaluation after `step` steps."""
        path = self.folder / "trajectories" / f"{name}_{step:06d}.parquet"
        await run_to_completion(asyncio.to_thread(write_trajectories, path, played, self._epoch))

    def record_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Record an evaluation of the weights after `step` steps."""
        metrics = evaluation.metrics()
        self.write(step, metrics)
        if evaluation.name == HELD_OUT:
            self.display.held_out(step, metrics["eval/success"], len(evaluation.failed))
        self.display.say(evaluation.result(step, self.folder))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a row of metrics to the run's file and its trackers, and warn of what it shows."""
        row = {"step": step, **metrics}
        self.metrics.append(row)
        if self._tracking is not None:
            self._tracking.log(step, metrics)
        self._warn(row)

    def track_samples(
        self, name: str, step: int, scored: Sequence[tuple[Trajectory, Score]]
    ) -> None:
        """Send some of these episodes to the trackers: always the first ones, of an evaluation thus
        of the same tasks.

        `name`: that of the evaluation, or "train".
        """
        if self._tracking is not None:
            samples = [sample_of(*pair) for pair in scored[: self.config.observe.tracked_episodes]]
            self._tracking.log_samples(name, step, samples)

    async def save_checkpoint(self, step: int, state: Savable) -> None:
        """Save the state after `step` steps. The ledger is flushed to disk first, as a resumed run
        relies on it.
        """
        self.begin_phase(step, "checkpoint")
        await asyncio.to_thread(self.ledger.sync)
        await self.checkpoints.save(step, state, self._values())

    @asynccontextmanager
    async def writing_checkpoints(self) -> AsyncIterator[None]:
        """While the block lasts, `begin_checkpoint` may be used. Leaving it waits for what has been
        begun, also when the run is stopped.
        """
        async with Flow("checkpoints") as flow:
            self._checkpoint_flow = flow
            try:
                yield
            except asyncio.CancelledError:
                await self._begun_is_finished()
                raise

    async def begin_checkpoint(self, step: int, state: Savable) -> None:
        """Save the state after `step` steps in the background; it may change when this returns. It
        is begun also if the run is stopped meanwhile.
        """
        await run_to_completion(self._begin_checkpoint(step, state))

    async def _begin_checkpoint(self, step: int, state: Savable) -> None:
        if self._begun is not None:
            await self._begun
        self.begin_phase(step, "checkpoint")
        await asyncio.to_thread(self.ledger.sync)
        begun = await self.checkpoints.begin(step, state, self._values())
        self._begun = self._checkpoint_flow.start(begun.finish(), name=f"step {step}")

    async def _begun_is_finished(self) -> None:
        """Wait until the checkpoint that has been begun is finished or has failed, which its owner
        reports.
        """
        if self._begun is not None:
            await asyncio.wait({self._begun})

    def _values(self) -> Mapping[int, float] | None:
        """The values that the best checkpoints are chosen by."""
        best = self.config.checkpoint.best
        return self.evaluations.values(best) if best else None

    @asynccontextmanager
    async def saved_if_stopped(self, step: int, state: Savable) -> AsyncIterator[None]:
        """If the run is stopped in the block, save the state after `step` steps, which the block
        leaves alone.
        """
        try:
            yield
        except asyncio.CancelledError:
            await self._begun_is_finished()
            newest = self.checkpoints.latest()
            if step > (newest[0] if newest else 0):
                self.display.say(
                    f"stopping: saving the state after {step} steps; a second Ctrl-C stops at once"
                )
                try:
                    await self.save_checkpoint(step, state)
                except Exception as error:  # what stops the run may be why
                    why = storage_problem(error) or describe(error)
                    logger.warning("the state after %d steps cannot be saved: %s", step, why)
            raise

    @asynccontextmanager
    async def keeping_episodes(
        self, take_all: Callable[[], Sequence[tuple[Trajectory, Score]]]
    ) -> AsyncIterator[None]:
        """If the run ends in the block in the middle of a step, keep the episodes of that step,
        which `take_all` gives, in `untrained/`.
        """
        try:
            yield
        except (Exception, asyncio.CancelledError):
            step, phase = self._status.get("step"), self._status.get("phase")
            if step is not None and phase != "record" and (left := take_all()):
                path = self.folder / "untrained" / f"step_{step:06d}.parquet"
                try:
                    await run_to_completion(
                        asyncio.to_thread(write_trajectories, path, left, self._epoch)
                    )
                except Exception as error:  # what ends the run may be why
                    why = storage_problem(error) or describe(error)
                    logger.warning(
                        "the episodes of the step that ends here cannot be kept: %s", why
                    )
            raise

    async def finish(self) -> None:
        """Draw the curve, and summarise the run with the checksum of the weights in its newest
        checkpoint.

        `summary.json` is written when the run is left.
        """
        await asyncio.to_thread(
            draw_curve, self.metrics.rows(), self.folder / "reward_curve.png", self.folder.name
        )
        self._summary = {
            **self._summarised(),
            "weights_sha256": await asyncio.to_thread(self._weights_checksum),
        }

    def _summarised(self) -> dict[str, Any]:
        """What `summary.json` says of the run so far; the weights have no checksum, which takes
        long.
        """
        rows, silence = self.metrics.rows(), self._new_silence()
        trained = [row for row in rows if "reward" in row]
        tested = sorted((row for row in rows if "eval/success" in row), key=_step)  # some come late
        before, after = _ends(tested)
        return {
            "steps": _steps_made(rows),
            "success_before": before.get("eval/success"),
            "success_before_interval": _interval(before),
            "episodes_before": before.get("eval/episodes"),
            "failed_before": before.get("eval/failed"),
            "success_after": after.get("eval/success"),
            "success_after_interval": _interval(after),
            "episodes_after": after.get("eval/episodes"),
            "failed_after": after.get("eval/failed"),
            "suites": {
                suite.name: _of_suite(rows, suite.name) for suite in self.config.evaluation.suites
            },
            "seconds": sum(row.get("seconds", 0.0) for row in trained),
            "max_staleness": self.config.rollout.max_staleness,
            "largest_staleness": max((row.get("staleness/max", 0) for row in trained), default=0),
            "largest_logprob_gap": max(
                (row.get("logprob_gap_max", 0.0) for row in trained), default=0.0
            ),
            "warnings": [alarm.text for row in rows for alarm in silence.read(row)],
            "weights_sha256": None,
            "tasks": asdict(self.ledger.task_fates()),
            "episodes": asdict(self.ledger.episode_fates()),
        }

    def _write_summary(self, summary: Mapping[str, Any]) -> None:
        write_whole(
            self.folder / "summary.json",
            to_json(summary, indent=2, inf_nan_mode="null").decode() + "\n",
        )

    def _weights_checksum(self) -> str | None:
        newest = self.checkpoints.latest()
        # reads one weight after another
        return checksum(LowRank(newest[1], {})) if newest else None


def _fingerprints_in(path: Path) -> dict[str, str]:
    """The digest of each split's data, by split, of an earlier launch."""
    try:
        found = json.loads(path.read_text())
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(one, str) for one in found.values()):
        raise ConfigError(
            f"{path} cannot be read, which tells whether the tasks' data are those that the run "
            "began with: restore it from a copy, or remove it if you know that they are"
        )
    return found


def _interval(row: Mapping[str, float]) -> list[float] | None:
    """The 95 % interval of an evaluation's success."""
    return (
        [row["eval/success_low"], row["eval/success_high"]] if "eval/success_low" in row else None
    )


def _ends(tested: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The results before the first step and after the last one that has some, of those in order of
    steps; what there is none of is empty.
    """
    before = [row for row in tested if _step(row) == 0]
    after = [row for row in tested if _step(row) > 0]
    return before[-1] if before else {}, after[-1] if after else {}


def _steps_made(rows: Sequence[Mapping[str, Any]]) -> int:
    """The steps of a run. Those of recipes that learn from files have no reward."""
    return sum("reward" in row for row in rows) or sum("loss" in row for row in rows)


def _step(row: Mapping[str, Any]) -> int:
    return int(row["step"])


def _of_suite(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, Mapping[str, float]]:
    """The results of a suite before and after training, without the prefix of the metrics."""
    prefix = f"eval/{name}/"
    tested = sorted((row for row in rows if f"{prefix}success" in row), key=_step)
    ends = zip(("before", "after"), _ends(tested), strict=True)
    return {
        when: {
            key.removeprefix(prefix): value for key, value in row.items() if key.startswith(prefix)
        }
        for when, row in ends
        if row
    }


def check_model(config: RunConfig, *, pinned: bool = True) -> None:
    """Check that the model to start from exists and can be trained, and the model of each frozen
    agent.

    `pinned`: one on the hub is that of the commit which the run has begun with. A model on the hub
    is downloaded: first what describes it, and its weights when that has been checked.

    Raises:
        ConfigError: a model or a part of it is missing, or the model to start from is none that
        writes text.
    """
    model = config.model
    if model.name not in SIZES:
        revision = _revision(config) if pinned else config.model.revision
        described = description_folder(model.name, revision)
        check_architecture(described, trust_remote_code=model.trust_remote_code)
        check_vocabulary(renderer_of(described, model), described)
        check_fit(
            model_folder(model.name, revision),
            model.name,
            trust_remote_code=model.trust_remote_code,
        )
    elif model.revision is not None or model.trust_remote_code:
        written = "revision" if model.revision is not None else "trust_remote_code"
        raise ConfigError(
            f"model.{written}: {model.name!r} is made here, and has none: leave it out, or name a "
            "model"
        )
    for agent, route in config.env.agents.items():
        if (
            isinstance(route, FrozenRoute)
            and route.model
            and not (route.model / "config.json").exists()
        ):
            raise ConfigError(
                f"env.agents.{agent}.model: {str(route.model)!r} is not the folder of a Hugging "
                "Face model (no config.json in it); a run's checkpoints are such folders"
            )


def check_goes_on(checkpoint: Path, config: RunConfig, *, new_model: bool) -> None:
    """Check that a run can go on from a checkpoint, which another config may have made.

    Raises:
        ConfigError: it has no critic where one is needed, adapters for weights or the other way
            round, or a model of another shape.
    """
    way_out = (
        "so the run cannot go on from it. Leave the change out, or start a new run from its "
        f"weights: model={checkpoint} run_dir=ANOTHER"
    )
    if config.critic is not None and not (checkpoint / CRITIC_FOLDER).is_dir():
        needs = f"{config.algorithm.name} needs a critic, and {checkpoint} has none"
        raise ConfigError(f"algorithm.name: {needs}, {way_out}")
    adapters = getattr(config.trainer.settings, "lora", None) is not None
    saved, ours = (checkpoint / _ADAPTERS).is_dir(), (checkpoint / _TRAINER_STATE).is_file()
    if ours and adapters != saved:
        asked, there = ("adapters", "whole weights") if adapters else ("whole weights", "adapters")
        raise ConfigError(
            f"trainer.lora: the run trains {asked}, and {checkpoint} is of {there}, {way_out}"
        )
    if new_model and not _same_shape(checkpoint, config):
        name = config.model.name
        raise ConfigError(
            f"model.name: {checkpoint} has other shapes than the model {name!r}, {way_out}"
        )


def _same_shape(checkpoint: Path, config: RunConfig) -> bool:
    """Whether the configured model, which is another than that of a checkpoint, has weights of the
    same shapes.
    """
    if config.model.name in SIZES:
        return False
    folders = checkpoint, description_folder(config.model.name, config.model.revision)
    old, new = (json.loads((folder / "config.json").read_text()) for folder in folders)
    old, new = ({**one, **one.get("text_config", {})} for one in (old, new))
    return all(old.get(key) == new.get(key) for key in _SHAPE)


def check_vocabulary(renderer: Renderer, folder: Path) -> None:
    """Check that the model has embeddings of the tokens that its template writes.

    Raises:
        ConfigError: the template writes others.
    """
    vocab = vocabulary_size(folder)
    highest = int(renderer.conversation().prompt([Message("user", "Hello.")]).ids.max())
    if vocab is not None and highest >= vocab:
        raise ConfigError(
            f"model.name: the chat template in {folder} writes the token {highest}, and the model "
            f"has {vocab} tokens (vocab_size in its config.json): take tokenizer, template and "
            "weights from the same model, or enlarge the model with transformers' "
            "resize_token_embeddings"
        )


def _revision(config: RunConfig) -> str | None:
    """The revision of a model on the hub: the run's first one, or the configured one."""
    pinned = config.run_dir / _COMMIT
    return pinned.read_text().strip() if pinned.exists() else config.model.revision


def was_begun(loaded: LoadedConfig, *, change: bool = False) -> bool:
    """Whether the run of this config has begun already.

    Raises:
        ConfigError: its folder holds a run of another config, and `change` does not allow that.
            Only `steps` may differ, if that run had fewer.
    """
    folder = loaded.config.run_dir
    if not (folder / "config.yaml").exists():
        return False
    changes = [
        one
        for one in ConfigHistory(folder).changes(loaded)
        if one.key != "steps" or one.new < one.old
    ]
    if changes and not change:
        differing = "\n".join(f"  {change}" for change in changes)
        raise ConfigError(
            f"{folder} holds a run of another config:\n{differing}\nWrite run_dir=ANOTHER for a "
            f"new run, or resume that one with `agentrl train --resume {folder}`; add the "
            "settings to change, if any, to this command"
        )
    return True
