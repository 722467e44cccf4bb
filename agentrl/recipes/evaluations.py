"""The times of evaluations: in turn with training; during it, on the same engines
(`evaluation.overlap`); or during it, on separate engines (`evaluation.engines`).
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentrl.assembly.rollouts import RolloutAssembly, token_budget
from agentrl.assembly.training import TrainingAssembly
from agentrl.engines.router import Router
from agentrl.errors import ConfigError
from agentrl.flow import Flow, run_to_completion
from agentrl.observe.evaluation import metric_prefix
from agentrl.placement.time_share import NoSharing
from agentrl.recipes.evaluate import evaluate_run, evaluations_left
from agentrl.runs.run import Run
from agentrl.weights.snapshots import Snapshots


class Evaluations(ABC):
    """Evaluates the weights of a run."""

    @abstractmethod
    async def evaluate(self, step: int, *, due: bool = False) -> None:
        """Evaluate the trainer's weights after `step` steps, unless that was done before; see
        `evaluate_run`.
        """
        ...

    async def before_update(self) -> None:
        """Wait until the engines of training may get new weights. By default, they may at any time:
        the evaluation is over when training goes on, or it has engines of its own.
        """
        return


@asynccontextmanager
async def evaluations(run: Run, parts: TrainingAssembly, start: int) -> AsyncIterator[Evaluations]:
    """The evaluations of a run that goes on after `start` steps. Leaving the block waits for those
    that go on.
    """
    run.evaluations.go_back_to(start)
    # The run may have ended between the row of a result and its entry in the log.
    for step in run.evaluations.pending_steps():
        for name in run.evaluations.pending(step):
            run.metrics.remove_rows(step, f"{metric_prefix(name)}success")
    if parts.evaluation_engine is None and not run.config.evaluation.overlap:
        yield _InTurn(run, parts)
        return
    if parts.evaluation_engine is None:
        if not isinstance(parts.sharing, NoSharing):
            raise ConfigError(
                "evaluation.overlap needs engines that are awake while the trainer works, and in"
                " this placement they share devices in turns: leave it out, or give each side"
                " devices of its own"
            )
        async with Flow("evaluations") as flow:
            yield _Overlapping(run, parts, flow)
        return
    async with Flow("evaluations") as flow:
        separate = _Separate(run, parts, parts.evaluation_engine, flow)
        separate.evaluate_leftovers(start)
        yield separate


class _InTurn(Evaluations):
    """Evaluates on the engines of training, which waits meanwhile."""

    def __init__(self, run: Run, parts: TrainingAssembly) -> None:
        self._run, self._parts = run, parts

    async def evaluate(self, step: int, *, due: bool = False) -> None:
        await evaluate_run(self._run, self._parts, step, due=due)


class _Overlapping(Evaluations):
    """Evaluates on the engines of training while it goes on, until they get new weights.

    The requests of evaluations come last (`agentrl.recipes.evaluate.EVALUATION_PRIORITY`). A run
    that is killed meanwhile has no result for its newest weights, and evaluates them when it is
    resumed.
    """

    def __init__(self, run: Run, parts: TrainingAssembly, flow: Flow) -> None:
        self._run, self._parts, self._flow = run, parts, flow
        self._playing: asyncio.Task[None] | None = None

    async def evaluate(self, step: int, *, due: bool = False) -> None:
        """Begin the evaluation, after the one before."""
        await self.before_update()
        if evaluations_left(self._run, step, due=due):
            self._run.checkpoints.awaited.add(step)
            self._playing = self._flow.start(self._play(step, due=due), name=f"step {step}")

    async def before_update(self) -> None:
        """Wait for the end of the evaluation that goes on, if any."""
        if self._playing is not None:
            await asyncio.wait({self._playing})

    async def _play(self, step: int, *, due: bool) -> None:
        await evaluate_run(self._run, self._parts, step, due=due, overlaps=True)
        self._run.checkpoints.awaited.discard(step)


class _Separate(Evaluations):
    """Evaluates snapshots of the weights one after another on separate engines, while training
    continues.

    A checkpoint whose result is pending is kept. Snapshots that a killed run has left are evaluated
    when it is resumed.
    """

    def __init__(self, run: Run, parts: TrainingAssembly, engine: Router, flow: Flow) -> None:
        self._run, self._trainer, self._engine, self._flow = run, parts.trainer, engine, flow
        self._rollouts = RolloutAssembly(
            parts.config,
            parts.model,
            engine,
            parts.runner,
            parts.reward,
            parts.frozen,
            token_budget(parts.config, engine),
        )
        self._snapshots = Snapshots(run.folder.absolute() / "evaluation_weights", 1, 1)
        self._last: asyncio.Task[None] | None = None

    def evaluate_leftovers(self, start: int) -> None:
        """Evaluate the snapshots that an earlier launch has left, of steps before `start`; later
        steps will be trained again.
        """
        self._snapshots.go_back_to(start)
        steps = {*self._snapshots.versions()}
        if 0 in self._run.evaluations.pending_steps():
            steps.add(0)  # which needs no snapshot: the engine begins with version 0
        for step in sorted(steps):
            if step < start:
                self._begin(step, due=True)

    async def evaluate(self, step: int, *, due: bool = False) -> None:
        """Take a snapshot of the weights and return; its evaluation follows earlier ones."""
        if not evaluations_left(self._run, step, due=due):
            return
        if step > 0:  # the engine began with version 0
            weights = await self._trainer.weights()
            await run_to_completion(asyncio.to_thread(self._snapshots.write, step, weights))
        # An earlier evaluation of this step may have ended meanwhile.
        left = evaluations_left(self._run, step, due=due)
        if not left:
            await run_to_completion(asyncio.to_thread(self._snapshots.remove, step))
            return
        self._run.evaluations.begin(step, left)
        self._begin(step, due=due)

    def _begin(self, step: int, *, due: bool) -> None:
        self._run.checkpoints.awaited.add(step)
        self._last = self._flow.start(self._play(step, self._last, due=due), name=f"step {step}")

    async def _play(self, step: int, before: asyncio.Task[None] | None, *, due: bool) -> None:
        if before is not None:
            await asyncio.wait({before})
        if step > self._engine.policy_version:
            await self._engine.update_weights(self._snapshots.open(step), step)
        await evaluate_run(self._run, self._rollouts, step, due=due, overlaps=True)
        self._run.checkpoints.awaited.discard(step)
        if step > 0:
            await run_to_completion(asyncio.to_thread(self._snapshots.remove, step))
