"""The trainer of one process and one device: packed rows, exact accumulation, AdamW."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from agentrl.batch import TrainBatch
from agentrl.errors import AgentRLError, ConfigError
from agentrl.protocols import Loss
from agentrl.trainers.settings import TrainerSettings

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.trainers.local_core import LocalCore

R = TypeVar("R")


class LocalTrainer:
    """Weights and optimizer in this process; implements `agentrl.protocols.Trainer`.

    The model computes in a thread of its own, one call after another, so that the event loop goes on meanwhile; a
    step whose caller is cancelled is finished all the same. The same batches give bitwise the same weights on the
    same machine, as far as the device's kernels are deterministic (those of a CPU are).

    `temperature` is the one the engine samples with: logprobs are of the distribution that was sampled from.
    `total_steps` is what the schedule ends at. `model` is a Hugging Face folder.

    Raises:
        ConfigError: on entering: the model folder is missing or is of a kind that cannot be trained exactly.
    """

    class Config(TrainerSettings):
        """Everything a trainer has, and where it computes."""

        device: str = "auto"
        """A torch device, or "auto": the first GPU, else the CPU."""

    def __init__(self, config: Config, model: Path, *, total_steps: int, temperature: float = 1.0) -> None:
        if temperature <= 0:
            raise ConfigError(f"cannot train on samples of temperature {temperature}: greedy choices have no gradient")
        self.config = config
        self._origin = model
        self._total_steps = total_steps
        self._temperature = temperature
        self._worker: ThreadPoolExecutor | None = None
        self._core: LocalCore | None = None

    @property
    def row_tokens(self) -> int:
        """How long the rows are that batches should be packed into."""
        return self.config.row_tokens

    async def __aenter__(self) -> Self:
        from agentrl.trainers.local_core import LocalCore

        self._worker = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        try:
            self._core = await self._run(
                lambda: LocalCore.open(self.config, self._origin, self._total_steps, self._temperature)
            )
        except BaseException:
            self._worker.shutdown(wait=False)
            self._worker = None
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        worker, self._worker, self._core = self._worker, None, None
        if worker is not None:
            try:
                # Stands in line behind a step that is still computing, and lets the event loop go on meanwhile.
                await asyncio.get_running_loop().run_in_executor(worker, lambda: None)
            finally:
                worker.shutdown(wait=False)

    async def step(self, batch: TrainBatch, loss: Loss, normalizer: float) -> Mapping[str, float]:
        """One pass over the batch, in `minibatches` optimizer steps.

        Metrics: `loss` (summed token losses / normalizer), `grad_norm` (before clipping, largest of the minibatches),
        `lr`, `loss_tokens`, `tokens` (without padding), `packing` (share of places that are no padding),
        `logprob_gap_mean` and `logprob_gap_max` (|engine's - trainer's logprob|, in nats), the seconds of each phase
        and the means of the loss's own metrics.

        Raises:
            TrainingError: no loss token, a normalizer that is not above zero, or a loss or gradient that is not
                finite. The weights are then as the last good minibatch left them.
        """
        core = self._entered
        return await self._run(lambda: core.step(batch, loss, normalizer))

    async def weights(self) -> Mapping[str, "Tensor"]:
        """The float32 weights themselves, not a copy; of tied weights the first name only."""
        core = self._entered
        return await self._run(core.weights)

    async def save(self, folder: Path) -> None:
        """Write a Hugging Face folder with the tokenizer, and `trainer.pt`: optimizer and step.

        Whoever needs all or nothing writes to a temporary folder and renames it.
        """
        core = self._entered
        await self._run(lambda: core.save(folder))

    async def load(self, folder: Path) -> None:
        """Take up exactly where `save` left off; settings (learning rate, decay, ...) stay those of this run."""
        core = self._entered
        await self._run(lambda: core.load(folder))

    @property
    def _entered(self) -> "LocalCore":
        if self._core is None:
            raise AgentRLError("the trainer is not running: use it inside `async with trainer:`")
        return self._core

    async def _run(self, work: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)
