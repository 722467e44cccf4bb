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
  engines/           requests of `agentrl engines`, and changes.jsonl: the engines that were added,
                     removed or lost
  logs/              engine-0.log ...: what each engine itself logs, if it does (engine=vllm)
  checkpoints/       step_000010/ ... (each a Hugging Face folder with the optimizer beside it)
  model_commit       the commit of a model that was taken from the hub
  overridden_model/  links to the model's files, and its config.json with model.hf_overrides
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
import logging
import os
import sqlite3
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from os.path import samestat
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic_core import to_json
from rich.console import Console
from rich.markup import escape

from agentrl.config.history import ConfigHistory, SettingChange
from agentrl.config.learning_rates import jumps_of_schedules, notes_of_schedules
from agentrl.config.loading import LoadedConfig
from agentrl.config.run_config import unused_by
from agentrl.errors import AgentRLError, ConfigError, StorageError, describe
from agentrl.files.disk_errors import storage_problem
from agentrl.files.durable import remove_unfinished, remove_unfinished_folders, write_whole
from agentrl.flow import Flow, run_to_completion
from agentrl.ledger.ledger import Ledger
from agentrl.models.overrides import overridden_folder
from agentrl.models.source import commit_of, model_folder
from agentrl.observe.curve import draw_curve
from agentrl.observe.ending import ending_of, how_to_go_on, resume_command
from agentrl.observe.launches import record_launch
from agentrl.observe.progress import ProgressDisplay
from agentrl.protocols import Savable
from agentrl.runs.checkpoint import Checkpoints, set_aside
from agentrl.runs.engine_requests import EngineRequests
from agentrl.runs.evaluation_log import EvaluationLog
from agentrl.runs.lock import RunLock
from agentrl.runs.preflight import (
    MODEL_COMMIT,
    check_changes,
    check_checkpoint,
    check_config,
    check_data,
    check_folder,
    make_folder,
    model_revision,
)
from agentrl.runs.recorder import Recorder, new_silence
from agentrl.runs.status import RunStatus
from agentrl.runs.summary import count_steps, summarise
from agentrl.runs.temp import RunTemp
from agentrl.trajectory import Task
from agentrl.weights.low_rank import LowRank
from agentrl.weights.publisher import checksum

logger = logging.getLogger(__name__)


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
        self._here = os.stat(".")
        self.resumed = resume
        check_folder(self.folder, resumed=resume)
        self._changes: tuple[SettingChange, ...] = ()
        if resume:
            self._changes = tuple(check_changes(loaded, change=change))
        keys = {changed.key for changed in self._changes}
        self._new_model = bool(keys & {"model.name", "model.revision"})
        data = check_config(loaded, new_model=self._new_model)
        make_folder(self.folder)
        with ExitStack() as opened:
            self._lock = opened.enter_context(RunLock(self.folder))
            # Another process may have started and ended before the folder was locked.
            check_folder(self.folder, resumed=resume)
            opened.enter_context(RunTemp(self.folder))
            remove_unfinished(self.folder)
            EngineRequests(self.folder).clear()
            kept = self.config.checkpoint
            self.checkpoints = Checkpoints(
                self.folder / "checkpoints", kept.keep, kept.keep_best if kept.best else 0
            )
            if resume:
                check_checkpoint(
                    self.checkpoints,
                    self.config,
                    step,
                    lambda text: console.print(text, highlight=False, soft_wrap=True),
                    new_model=self._new_model,
                )
            check_data(self.folder, data, resumed=resume, change=change)
            self.ledger = opened.enter_context(Ledger(self.folder / "ledger.sqlite"))
            self.display = ProgressDisplay(console, self.config.steps, str(self.folder))
            self.status = RunStatus(
                self.folder,
                self.display,
                profiled=self.config.observe.profile,
                check_place=self._check_files,
            )
            settings = {key: value for key, value, _ in loaded.rows()}
            self.recorder = Recorder(self.config, settings, self.ledger, self.status, self.display)
            self.metrics = self.recorder.metrics
            if resume:
                self.metrics.mend()
            self.evaluations = EvaluationLog.of_run(self.folder)
            self._checkpoint_flow = Flow("checkpoints")
            self._begun_checkpoint: asyncio.Task[Path] | None = None
            self._summary: Mapping[str, Any] | None = None
            if resume and step is not None:  # last: what is refused changes nothing
                self.checkpoints.go_back_to(step)
            self._open = opened.pop_all()

    def __enter__(self) -> Self:
        with self._open as opened:
            opened.enter_context(self.recorder)
            opened.enter_context(self.display)
            opened.enter_context(self.status)
            record_launch(self.folder, resumed=self.resumed)
            self._keep_config()
            self._open = opened.pop_all()
        return self

    def _keep_config(self) -> None:
        """Keep the config, and show its changes and warnings before the work begins."""
        newest = self.checkpoints.latest()
        start = newest[0] if newest and self.resumed else 0
        if self._changes:
            self.display.say(f"resuming after {start} steps with changes:")
            for change in self._changes:
                self.display.say(f"  {escape(str(change))}")
        if start and start >= self.config.steps:
            self.display.say(
                f"all {self.config.steps} steps are done; `{resume_command(self.folder)}"
                f" steps={2 * start}` goes on"
            )
        # Models made from another starting model would be taken for this one's.
        if self._new_model:
            self._set_aside_models()
        # The history is read before it is extended: `newest` is the config of the last launch.
        history = ConfigHistory(self.folder)
        notes = list(notes_of_schedules(self.config))
        if self._changes:
            notes += jumps_of_schedules(history.newest().config, self.config, start)
        history.keep(self._loaded, self._changes, start)
        for text in notes:
            self.recorder.note(start, text, "lr")
        if not self.resumed:
            self._note_unused_sections()
        # A resumed run begins with the model that has imitated already.
        elif (self.folder / "demonstrations").exists():
            late = [
                change.key
                for change in self._changes
                if change.key.startswith("recipe.demonstrations")
            ]
            if late:
                self.recorder.note(
                    start,
                    f"{', '.join(late)}: changes nothing any more, as demonstrations/ is made "
                    "already",
                )

    def _set_aside_models(self) -> None:
        """Rename the models that were made from the previous starting model, so that they are made
        again from the new one.
        """
        (self.folder / MODEL_COMMIT).unlink(missing_ok=True)
        for made in (self.folder / "model", self.folder / "demonstrations"):
            if made.exists():
                self.display.say(
                    f"{made} is of the model before: it is set aside as "
                    f"{set_aside(made, 'left').name}"
                )

    def _note_unused_sections(self) -> None:
        """Name the sections of the config that the recipe does not use, although they were set."""
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
            if error is not None:
                try:
                    self._check_place()
                except StorageError:  # so nothing can be kept there
                    if not isinstance(error, Exception):
                        return
                    raise
            self._end(error)

    def _check_place(self) -> None:
        """Check that the run is in its folder: what is written now could land in another one.

        Raises:
            StorageError: it is not.
        """
        if not self._lock.is_in_place or not (self.folder / "config.yaml").exists():
            if not self.folder.is_absolute() and not samestat(os.stat("."), self._here):
                raise StorageError(
                    f"the current folder of this process was changed, so that {self.folder} is no"
                    " longer the run's folder. Probably an environment calls os.chdir: write"
                    " env.isolation=process, or a run_dir that begins with /. `agentrl train"
                    " --resume` goes on with the run"
                )
            raise StorageError(
                f"the folder {self.folder} was moved or deleted while its run went on, which ends"
                " with this. If it was moved, `agentrl train --resume` goes on where it is now"
            )

    def _check_files(self) -> None:
        """Check that the run and its ledger are in the folder.

        Raises:
            StorageError: they are not.
        """
        self._check_place()
        self.ledger.check_place()

    def _end(self, error: BaseException | None) -> None:
        """Record why the run ends. Failing to record it must not hide the reason itself."""
        try:
            if isinstance(error, Exception):
                # Half a checkpoint may have taken the last room on the disk, also for the reason.
                remove_unfinished_folders(self.folder)
            newest = self.checkpoints.latest()
            steps = count_steps(self.metrics.rows())
            ending = ending_of(
                error, self.folder, steps=steps, checkpoint=newest[0] if newest else None
            )
            # A `ConfigError` says itself what to write.
            if error is not None and not isinstance(error, ConfigError):
                error.add_note(how_to_go_on(self.folder, ending.checkpoint))
            self.recorder.end(ending)
            self.status.end(ending)
            if self._summary is None:
                self._summary = self.summarise()
            summary = {**self._summary, "ended": ending.as_row()}
            write_whole(
                self.folder / "summary.json",
                to_json(summary, indent=2, inf_nan_mode="null").decode() + "\n",
            )
        except (OSError, sqlite3.Error, AgentRLError) as problem:
            logger.warning(
                "why the run in %s has ended cannot be written there: %s", self.folder, problem
            )

    def source_model(self) -> Path:
        """The folder of the configured model. One on the hub stays at the commit that the run began
        with.

        Raises:
            ConfigError: it is not there any more.
        """
        name = self.config.model.name
        folder = model_folder(name, model_revision(self.config))
        if (commit := commit_of(folder)) is not None and not Path(name).is_dir():
            write_whole(self.folder / MODEL_COMMIT, f"{commit}\n")
        return overridden_folder(
            folder, self.config.model.hf_overrides, self.folder / "overridden_model"
        )

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

    async def save_checkpoint(self, step: int, state: Savable) -> None:
        """Save the state after `step` steps. The ledger is flushed to disk first, as a resumed run
        relies on it.
        """
        self.status.begin_phase(step, "checkpoint")
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
                await self._await_begun_checkpoint()
                raise

    async def begin_checkpoint(self, step: int, state: Savable) -> None:
        """Save the state after `step` steps in the background; it may change when this returns. It
        is begun also if the run is stopped meanwhile.
        """
        await run_to_completion(self._begin_checkpoint(step, state))

    async def _begin_checkpoint(self, step: int, state: Savable) -> None:
        if self._begun_checkpoint is not None:
            await self._begun_checkpoint
        self.status.begin_phase(step, "checkpoint")
        await asyncio.to_thread(self.ledger.sync)
        begun = await self.checkpoints.begin(step, state, self._values())
        self._begun_checkpoint = self._checkpoint_flow.start(begun.finish(), name=f"step {step}")

    async def _await_begun_checkpoint(self) -> None:
        """Wait until the checkpoint that has been begun is finished or has failed, which its owner
        reports.
        """
        if self._begun_checkpoint is not None:
            await asyncio.wait({self._begun_checkpoint})

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
            await self._await_begun_checkpoint()
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

    async def finish(self) -> None:
        """Draw the curve, and summarise the run with the checksum of the weights in its newest
        checkpoint.

        `summary.json` is written when the run is left.
        """
        await asyncio.to_thread(
            draw_curve, self.metrics.rows(), self.folder / "reward_curve.png", self.folder.name
        )
        newest, weights_sha256 = self.checkpoints.latest(), None
        if newest is not None:
            # `LowRank` reads one weight after another, so the model need not fit into memory.
            weights_sha256 = await asyncio.to_thread(checksum, LowRank(newest[1], {}))
        self._summary = {**self.summarise(), "weights_sha256": weights_sha256}

    def summarise(self) -> dict[str, Any]:
        """The summary of the run so far, without the checksum of its weights."""
        rows = self.metrics.rows()
        return summarise(self.config, rows, self.ledger, new_silence(self.config))
