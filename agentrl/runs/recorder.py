"""`Recorder`: all that a run records of its steps and evaluations.

Metrics go to `metrics.jsonl` and the trackers, episodes to `trajectories/` and `untrained/`,
training samples to `samples/`, warnings to `warnings.jsonl`, and the most important to the
terminal.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cached_property
from types import TracebackType
from typing import Any, Self

from rich.markup import escape

from agentrl.algorithms.samples import TracedBatch
from agentrl.cluster.worker_registry import worker_metrics
from agentrl.config.run_config import RunConfig
from agentrl.errors import describe
from agentrl.files.disk_errors import storage_problem
from agentrl.files.durable import append_line, remove_left
from agentrl.flow import elapsed, run_to_completion
from agentrl.ledger.ledger import Ledger
from agentrl.observe.ending import Ending
from agentrl.observe.evaluation import Evaluation
from agentrl.observe.falls import Alarm
from agentrl.observe.health import batch_health, episode_health
from agentrl.observe.metrics import MetricsFile, masked_shares, rollout_metrics
from agentrl.observe.progress import ProgressDisplay
from agentrl.observe.reports import HELD_OUT
from agentrl.observe.samples import TrainedBatch, drawn_groups, write_samples
from agentrl.observe.silence import Silence, conditions
from agentrl.observe.step_report import StepReport
from agentrl.observe.tracking import Tracking, sample_of
from agentrl.observe.trajectories import episodes_of_step, write_trajectories
from agentrl.protocols import AlgorithmOffers, Trainer
from agentrl.protocols.metrics import Metrics, merge_metrics
from agentrl.rollout.seeds import derive_seed
from agentrl.runs.scribe import Scribe
from agentrl.runs.status import RunStatus
from agentrl.trajectory import Group, Score, Trajectory

logger = logging.getLogger(__name__)


class Recorder:
    """Records the steps and evaluations of a run in its folder. A context manager: metrics are sent
    to the trackers while it is entered.

    `settings`: those of the run, by name, for the trackers.
    """

    def __init__(
        self,
        config: RunConfig,
        settings: Mapping[str, Any],
        ledger: Ledger,
        status: RunStatus,
        display: ProgressDisplay,
    ) -> None:
        self.metrics = MetricsFile(config.run_dir / "metrics.jsonl")
        self._config = config
        self._settings = settings
        self._folder = config.run_dir
        self._ledger = ledger
        self._status = status
        self._display = display
        self._tracking: Tracking | None = None
        self._ending: Ending | None = None
        self._silence = new_silence(config)
        self.scribe = Scribe()
        """Reads the episodes of steps."""

    def __enter__(self) -> Self:
        self._tracking = Tracking(
            self._config.trackers,
            self._folder,
            self._settings,
            self.warn,
            tags=self._config.observe.tags,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._tracking is None:
            return
        ending = self._ending
        if ending is None or ending.how == "killed":
            self._tracking.end("failed", "nothing tells why")
        else:
            self._tracking.end(ending.how, ending.why)

    def end(self, ending: Ending) -> None:
        """Record how the run ends, for the trackers."""
        self._ending = ending

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a row of metrics to the run's file and its trackers, and warn of what it shows."""
        row = {"step": step, **metrics}
        self.metrics.append(row)
        if self._tracking is not None:
            self._tracking.log(step, metrics)
        self.warn_of(row)

    async def record_step(self, report: StepReport) -> None:
        """Record the results of a step.

        Raises:
            MetricNameError: two parts of the run report a metric of the same name.
        """
        step, groups = report.step, report.groups
        self._status.begin_phase(step, "record")
        path = self._folder / "untrained" / f"step_{step:06d}.parquet"
        if report.untrained:
            await run_to_completion(
                self.scribe.call(write_trajectories, path, report.untrained, self._epoch)
            )
        else:
            remove_left(path)  # from an earlier launch that also made this step
        # In turn and shielded from cancellation: a stopped run keeps whole files only.
        path = self._folder / "trajectories" / f"step_{step:06d}.parquet"
        await run_to_completion(
            self.scribe.call(write_trajectories, path, episodes_of_step(groups), self._epoch)
        )
        envs = [entry.run_name for entry in self._config.env.mixture]
        oldest_version = self._config.rollout.oldest_trained(step)
        episodes, health = await self.scribe.call(
            metrics_of_step, groups, step, oldest_version, envs
        )
        tokens = episodes["sampled_tokens"] + episodes["prompt_tokens"]
        speed = tokens / max(sum(report.seconds.values()), 1e-9)
        metrics = report.metrics(
            episodes=episodes,
            episode_health=health,
            workers=worker_metrics(),
            throughput={"tokens_per_second": speed},
        )
        self.write(step, metrics)
        if (step + 1) % self._config.checkpoint.every == 0:
            first = [(group.trajectories[0], group.scores[0]) for group in groups]
            self.track_samples("train", step, first)
        self._display.step(step, metrics, groups)

    async def record_samples(
        self, step: int, groups: Sequence[Group], made: TracedBatch, trainer: Trainer
    ) -> Mapping[str, float]:
        """Record the batch of these groups that the trainer has just made step `step` on, what it
        computed of its tokens, and which episodes carried no loss.

        Returns metrics of the batch: what was masked, and its health.
        """
        self._ledger.masked(step, made.masked, made.masked_segments)
        batch = made.batch
        count = self._config.observe.token_groups
        token_logprobs = await trainer.token_logprobs() if count else None
        detailed = drawn_groups(batch, count, derive_seed(self._config.seed, "token_groups", step))
        path = self._folder / "samples" / f"step_{step:06d}.parquet"
        trained = TrainedBatch(batch, made.origins, token_logprobs)
        await run_to_completion(asyncio.to_thread(write_samples, path, step, trained, detailed))
        health = await asyncio.to_thread(batch_health, trained, step)
        return merge_metrics({"masked": masked_shares(groups, made), "health": health})

    async def record_episodes(
        self, name: str, step: int, played: Sequence[tuple[Trajectory, Score]]
    ) -> None:
        """Write the episodes, also failed ones, of an evaluation after `step` steps."""
        path = self._folder / "trajectories" / f"{name}_{step:06d}.parquet"
        await run_to_completion(self.scribe.call(write_trajectories, path, played, self._epoch))

    def record_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Record an evaluation of the weights after `step` steps."""
        metrics = evaluation.metrics()
        self.write(step, metrics)
        if evaluation.name == HELD_OUT:
            self._display.held_out(step, metrics["eval/success"], len(evaluation.failed))
        self._display.say(evaluation.result(step, self._folder))

    def track_samples(
        self, name: str, step: int, scored: Sequence[tuple[Trajectory, Score]]
    ) -> None:
        """Send some of these episodes to the trackers: always the first ones, of an evaluation thus
        of the same tasks.

        `name`: that of the evaluation, or "train".
        """
        if self._tracking is not None:
            samples = [sample_of(*pair) for pair in scored[: self._config.observe.tracked_episodes]]
            self._tracking.log_samples(name, step, samples)

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
            step, phase = self._status.step, self._status.phase
            if step is not None and phase != "record" and (left := take_all()):
                path = self._folder / "untrained" / f"step_{step:06d}.parquet"
                try:
                    self._status.check_place()
                    await run_to_completion(
                        asyncio.to_thread(write_trajectories, path, left, self._epoch)
                    )
                except Exception as error:  # such as the full disk that ends the run
                    why = storage_problem(error) or describe(error)
                    logger.warning(
                        "the episodes of the step that ends here cannot be kept: %s", why
                    )
            raise

    def note(self, step: int, text: str, *metrics: str) -> None:
        """Note an effect of the settings that their author may not expect, and keep it with the
        warnings about these metrics.
        """
        self._display.say(f"[yellow]note:[/yellow] {escape(text)}")
        self._keep_warning(step, Alarm(text, metrics))

    def warn_of(self, row: Mapping[str, Any]) -> None:
        """Warn of what a row of metrics shows."""
        for alarm in self._silence.read(row):
            self._display.warn(row["step"], alarm.text)
            self._keep_warning(row["step"], alarm)

    def warn(self, text: str) -> None:
        """Warn of something that no metric shows."""
        self._display.say(f"[yellow]warning:[/yellow] {escape(text)}")
        self._keep_warning(len(self.metrics.values("reward")), Alarm(text, ()))

    def _keep_warning(self, step: int, alarm: Alarm) -> None:
        """Keep what was said. That it cannot be kept ends no run, and hides no other error."""
        path = self._folder / "warnings.jsonl"
        try:
            append_line(path, json.dumps({"step": step, **asdict(alarm)}))
        except OSError as error:
            logger.warning("a warning cannot be written into %s: %s", path, error)

    @cached_property
    def _epoch(self) -> float:
        """The Unix time when the event loop's clock, gaps included, showed 0. Read once, for equal
        times of all parts of an episode.
        """
        return datetime.now(UTC).timestamp() - elapsed()


def metrics_of_step(
    groups: Sequence[Group], step: int, oldest_version: int, envs: Sequence[str]
) -> tuple[Metrics, Metrics]:
    """The metrics of a step's episodes (`rollout_metrics`), and their signs of health."""
    return rollout_metrics(groups, step, oldest_version, envs), episode_health(groups)


def new_silence(config: RunConfig) -> Silence:
    """The warnings of a run with this config."""
    # With a critic, an episode is compared with what was expected of it, and not with its group.
    offers = [AlgorithmOffers.of(algorithm) for _, algorithm in config.trained_with()]
    compares_groups = config.rollout.group_size > 1 and all(
        offered.compares_members and not offered.credits_turns and not offered.beyond_rewards
        for offered in offers
    )
    sampling = config.rollout.sampling
    extends = config.model.history == "extend"
    budget = config.rollout.budget
    return Silence(
        conditions(sampling.max_tokens, budget, compares_groups=compares_groups, extends=extends)
    )
