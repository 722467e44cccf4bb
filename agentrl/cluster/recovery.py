"""A trainer that outlives its ranks.

The weights of a rank that dies are gone with it, and no other rank can go on without them. So all ranks are restarted
from the run's last checkpoint, and train once more on the batches since, which are kept here until the next
checkpoint: the run goes on at the step where it was, with the weights that it had. Nothing else in the run notices:
no episode is lost, no engine is set back. Where kernels are deterministic (those of a CPU are) the weights are the same
bit for bit.
"""

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar, cast

from agentrl.arrays import FloatArray
from agentrl.batch import TrainBatch
from agentrl.errors import AgentRLError, StallError, WorkerDiedError
from agentrl.protocols import Loss, SupportsPredict, Trainer
from agentrl.weights.bundle import BundlePlace, WeightBundle
from agentrl.weights.publisher import write_weights

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)
T = TypeVar("T")


class _Step(NamedTuple):
    """What one step was made of."""

    batch: TrainBatch
    loss: Loss
    normalizer: float


class RecoveringTrainer:
    """`Trainer` over one that `make` makes, and makes again when a rank has died: `restarts` times without a step.

    `latest` are the run's newest (steps done, checkpoint), if there is one: what `load` takes, and what is taken up
    after a death. `deadline`: seconds for any one call; a trainer that misses it is not dead and not to be helped.

    Raises:
        WorkerDiedError: ranks have died more than `restarts` times, and no step was made between.
        StallError: a call has missed the deadline.
    """

    def __init__(
        self,
        make: Callable[[], Trainer],
        latest: Callable[[], tuple[int, Path] | None],
        *,
        restarts: int = 8,
        deadline: float = 3600.0,
    ) -> None:
        self._make = make
        self._latest = latest
        self._restarts = self._restarts_left = restarts
        self._deadline = deadline
        self._trainer: Trainer | None = None
        self._since: dict[int, _Step] = {}  # by number: what a checkpoint may not hold yet
        self._done = 0
        self.row_tokens = make().row_tokens
        """See `Trainer`."""

    async def __aenter__(self) -> Self:
        await self._with_recovery(lambda trainer: _nothing())
        return self

    async def __aexit__(self, *exc: object) -> None:
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            await trainer.__aexit__(*exc)

    async def step(self, batch: TrainBatch, loss: Loss, normalizer: float) -> Mapping[str, float]:
        """See `Trainer.step`."""
        step = _Step(batch, loss, normalizer)
        metrics = await self._with_recovery(lambda trainer: trainer.step(*step))
        self._since[self._done] = step
        self._done += 1
        self._restarts_left = self._restarts
        return metrics

    async def predict(self, batch: TrainBatch) -> FloatArray:
        """See `SupportsPredict`."""
        return await self._with_recovery(lambda trainer: cast(SupportsPredict, trainer).predict(batch))

    async def weights(self) -> Mapping[str, "Tensor"]:
        """See `Trainer.weights`."""
        return await self._with_recovery(lambda trainer: trainer.weights())

    async def write_weights(self, place: BundlePlace) -> WeightBundle:
        """See `SupportsWriteWeights`."""
        return await self._with_recovery(lambda trainer: write_weights(trainer, place))

    async def sleep(self) -> None:
        """See `Sleeper` (agentrl/placement/time_share.py)."""
        await self._with_recovery(lambda trainer: cast(Any, trainer).sleep())

    async def wake(self) -> None:
        """See `Sleeper`."""
        await self._with_recovery(lambda trainer: cast(Any, trainer).wake())

    async def free(self) -> int:
        """Bytes that are free on the fullest of the trainer's devices."""
        free: int = await self._with_recovery(lambda trainer: cast(Any, trainer).free())
        return free

    async def save(self, folder: Path) -> None:
        """See `Trainer.save`. What a trainer that died in it had written is removed."""

        async def save(trainer: Trainer) -> None:
            shutil.rmtree(folder, ignore_errors=True)
            await trainer.save(folder)

        self._drop_saved_steps()  # by the last checkpoint; of this one it is not known yet whether it will be whole
        await self._with_recovery(save)

    async def load(self, folder: Path) -> None:
        """Take up the newest checkpoint.

        Raises:
            CheckpointError: as `Trainer.load`.
            ValueError: it is not the newest, which alone would be found again.
        """
        newest = self._latest()
        if newest is None or newest[1] != folder:
            raise ValueError(f"{folder} is not the newest checkpoint of the run, which is {newest}")
        await self._with_recovery(lambda trainer: trainer.load(folder))
        self._done = newest[0]

    async def _with_recovery(self, call: Callable[[Trainer], Awaitable[T]]) -> T:
        """What the trainer answers, or the one that takes its place."""
        while True:
            try:
                async with asyncio.timeout(self._deadline):
                    return await call(self._trainer or await self._begin())
            except WorkerDiedError as error:
                if _is_cancelled():  # what ends the run may end the ranks too, and the death was seen first
                    raise asyncio.CancelledError from error
                if self._restarts_left == 0:
                    raise
                self._restarts_left -= 1
                logger.warning("%s; restarting all ranks", error)
                await self.__aexit__(type(error), error, error.__traceback__)
            except TimeoutError as error:
                raise StallError(
                    f"the trainer did not answer within {self._deadline:g} s (rollout.deadlines.train), and none of "
                    "its ranks is dead: give it more time, or smaller batches"
                ) from error

    async def _begin(self) -> Trainer:
        """A trainer in the state of the steps done."""
        trainer = self._trainer = self._make()
        try:
            await trainer.__aenter__()
        except BaseException:
            self._trainer = None
            raise
        newest = self._latest() if self._done else None
        if newest is not None:
            await trainer.load(newest[1])
        for number in range(newest[0] if newest else 0, self._done):
            if number not in self._since:
                raise AgentRLError(f"step {number} is neither in the checkpoint {newest} nor remembered")
            await trainer.step(*self._since[number])
        return trainer

    def _drop_saved_steps(self) -> None:
        newest = self._latest()
        saved = newest[0] if newest else 0
        self._since = {number: step for number, step in self._since.items() if number >= saved}


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _nothing() -> Any:
    """Being there is all that is asked."""
