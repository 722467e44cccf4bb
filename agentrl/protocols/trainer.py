"""Trainers: the owners of weights and optimizers.

Dimension suffix: N loss tokens of a batch.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

from agentrl.batch import TrainBatch
from agentrl.errors import ConfigError
from agentrl.flow.completion import run_to_completion
from agentrl.protocols.algorithm import Loss
from agentrl.protocols.weight_source import SendWeights, WholeWeights
from agentrl.tokens.arrays import FloatArray

if TYPE_CHECKING:
    from torch import Tensor


T = TypeVar("T")

LatestCheckpoint = Callable[[], tuple[int, Path] | None]
"""Returns (steps done, folder) of a run's newest checkpoint, or `None`."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """The recovery of a trainer when its ranks die: its keyword argument `recovery`.

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
    """State to save in a checkpoint: a trainer, or everything that a run trains. A class that names
    it as its base needs only `save`.
    """

    async def save(self, folder: Path) -> None:
        """Write all state that training continues from into a new folder."""
        ...

    async def begin_save(self, folder: Path) -> None:
        """Copy what `save` writes, and begin to write it; training may continue meanwhile. By
        default, it is written before this returns.
        """
        await self.save(folder)

    async def saved(self) -> None:
        """Wait until what `begin_save` began is written.

        Raises:
            OSError: it cannot be written.
        """
        return


class Trainer(Savable, Protocol):
    """Owns weights and optimizer. An async context manager, as `Engine`.

    A trainer has all of these methods (`missing_methods`). A class that names `Trainer` as its base
    inherits simple versions of those that have one here, and writes `predict`, `step`, `weights`,
    `save` and `load`.
    """

    async def __aenter__(self) -> Self:
        """Load the model."""
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Free everything."""
        return

    async def predict(self, batch: TrainBatch) -> FloatArray:
        """The model's prediction for each loss token, in the order of the batch, shape N, without
        training: what a reference or a critic is asked for.

        It is the token's logprob at the sampling temperature; a critic predicts the expected return
        before the token.
        """
        ...

    async def step(self, batch: TrainBatch, loss: Loss, normalizer: float) -> Mapping[str, float]:
        """Train for one pass over a batch, and return its metrics (loss, grad_norm, lr, logprob
        gaps, ...).
        """
        ...

    async def token_logprobs(self) -> FloatArray | None:
        """The numbers that the last step computed for its loss tokens, in the order of the batch,
        shape (3, N); None if there are none.

        The first row has the logprobs before the step's first update, the second those at the
        update of the token's minibatch: exp(second - first) is the ratio that the loss saw. The
        third has the policy's entropies before the tokens, at that update, for a loss that
        `uses_entropy`; else NaN. By default, None: a run's samples lack these columns.
        """
        return None

    async def weights(self) -> Mapping[str, "Tensor"]:
        """The current weights, by Hugging Face names; valid until the next `step`."""
        ...

    async def send_weights(self, send: SendWeights[T]) -> Sequence[T]:
        """Call `send` with the current weights, and return what it returns. A trainer of several
        processes calls it in each of them, with what that has; the answers are by rank.

        Raises:
            OSError: they cannot be sent from there.
        """
        source = WholeWeights(await self.weights())
        return [await run_to_completion(asyncio.to_thread(send, source))]

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

    async def sleep(self) -> int | None:
        """Release all device memory that can be released. A sleeping trainer can still provide its
        weights. Repeating it changes nothing. If this raises, the trainer is awake as before.

        Returns the bytes of its own that this freed, on the device where it freed most; None if it
        cannot tell, or was asleep already.

        Raises:
            ConfigError: it has no way to sleep here, as by default.
        """
        raise ConfigError(f"{type(self).__name__} cannot sleep: give it devices of its own")

    async def wake(self) -> None:
        """Allocate the memory again. If this raises, the trainer is asleep as before."""
        return

    async def free_step_memory(self) -> int | None:
        """Release what only a step needs, gradients and all that its allocator keeps unused, since
        the weights of the engines take room beside the trainer now. From here to its next `wake`,
        ranks that die are not started again beside those. By default, nothing is released.

        Returns the bytes that this freed, on the device where it freed most; None if it cannot
        tell.
        """
        return None

    def take_turns(self, turn: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        """Note that it shares its devices: inside a `turn()` it is awake, and what it shares them
        with is asleep. A trainer that starts its ranks again enters one to do so while it sleeps.
        By default, nothing is noted.
        """
        return

    async def free(self) -> int | None:
        """Free bytes on the fullest of its devices; None while its ranks are dead.

        Raises:
            ConfigError: it cannot tell, as by default.
        """
        raise ConfigError(f"{type(self).__name__} cannot tell how much memory is free")


def missing_methods(trainer: object) -> list[str]:
    """The methods of `Trainer` that a trainer, or its class, lacks."""
    names = [name for name in [*vars(Trainer), *vars(Savable)] if not name.startswith("_")]
    names += ["__aenter__", "__aexit__"]
    return [name for name in names if not callable(getattr(trainer, name, None))]


def check_trainer(section: str, name: str, trainer: object) -> None:
    """Check that a trainer, or its class, has all methods of `Trainer`. `section`: the one of the
    config that names it.

    Raises:
        ConfigError: it lacks some.
    """
    if missing := missing_methods(trainer):
        listed = ", ".join(f"`{method}`" for method in missing)
        raise ConfigError(
            f"{section}.name: the trainer {name!r} has no method {listed}, which a {section} needs:"
            " write it, or inherit from agentrl.Trainer, which has a simple version of"
            " all that a trainer need not do"
        )
