"""Trainers: the owners of weights and optimizers.

Dimension suffix: N loss tokens of a batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

from agentrl.arrays import FloatArray
from agentrl.batch import TrainBatch
from agentrl.protocols.algorithm import Loss

if TYPE_CHECKING:
    from torch import Tensor


LatestCheckpoint = Callable[[], tuple[int, Path] | None]
"""Returns (steps done, folder) of a run's newest checkpoint, or `None`."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """How a trainer recovers when its ranks die: its keyword argument `recovery`.

    `latest` returns the run's newest checkpoint, if any; restarted ranks load it, as `load` does.
    `restarts`: how often in a row ranks may be restarted without a step or an answer between.
    `deadline`: seconds per call; by default the trainer allows more for more tokens. A call that
    takes longer ends the run: its ranks are alive, so a restart would not help. `start_seconds`:
    how long the ranks may take to load their model, which then ends the run too.
    """

    latest: LatestCheckpoint = lambda: None
    restarts: int = 8
    deadline: float | None = None
    start_seconds: float = 1800.0


class Savable(Protocol):
    """State to save in a checkpoint: a trainer, or everything that a run trains."""

    async def save(self, folder: Path) -> None:
        """Write all state that training continues from into a new folder."""
        ...


@runtime_checkable
class SavesInBackground(Savable, Protocol):
    """State that is copied first, and written while it goes on to change."""

    async def begin_save(self, folder: Path) -> None:
        """Copy all state that training continues from, and begin to write it into a new folder."""
        ...

    async def saved(self) -> None:
        """Wait until what `begin_save` began is written."""
        ...


async def begin_save(state: Savable, folder: Path) -> None:
    """Begin to save a state, or save it if it cannot be written in the background."""
    if isinstance(state, SavesInBackground):
        await state.begin_save(folder)
    else:
        await state.save(folder)


async def saved(state: Savable) -> None:
    """Wait until what `begin_save` began is written."""
    if isinstance(state, SavesInBackground):
        await state.saved()


class Trainer(Protocol):
    """Owns weights and optimizer. An async context manager, as `Engine`."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def step(self, batch: TrainBatch, loss: Loss, normalizer: float) -> Mapping[str, float]:
        """Train for one pass over a batch, and return its metrics (loss, grad_norm, lr, logprob
        gaps, ...).
        """
        ...

    async def weights(self) -> Mapping[str, "Tensor"]:
        """The current weights, by Hugging Face names; valid until the next `step`."""
        ...

    async def save(self, folder: Path) -> None:
        """Write weights (a Hugging Face folder with the tokenizer), optimizer and schedule into a
        new folder.
        """
        ...

    async def load(self, folder: Path) -> None:
        """Restore exactly the state that `save` wrote.

        Raises:
            CheckpointError: the folder is missing or incomplete.
        """
        ...


@runtime_checkable
class SupportsPredict(Trainer, Protocol):
    """A trainer whose model can be evaluated without training, as references and critics need."""

    async def predict(self, batch: TrainBatch) -> FloatArray:
        """The model's prediction for each loss token, in the order of the batch, shape N.

        It is the token's logprob at the sampling temperature; a critic predicts the expected return
        before the token.
        """
        ...


@runtime_checkable
class SupportsTokenLogprobs(Trainer, Protocol):
    """A trainer that keeps what it computed for each token of its last step."""

    async def token_logprobs(self) -> FloatArray | None:
        """What it computed for the loss tokens of its last step, in the order of the batch, shape
        (3, N); else None.

        The first row has the logprobs before the step's first update, the second those at the
        update of the token's minibatch: exp(second - first) is the ratio that the loss saw. The
        third has the policy's entropies before the tokens, at that update, for a loss that
        `uses_entropy`; else NaN.
        """
        ...


@runtime_checkable
class SchedulesLearningRate(Protocol):
    """Settings of a trainer whose learning rate follows a schedule."""

    lr: float
    warmup_steps: int
    schedule: str

    def learning_rate(self, step: int, total_steps: int) -> float:
        """The rate of step `step`, counted from 0 in calls of `Trainer.step`, of so many."""
        ...
