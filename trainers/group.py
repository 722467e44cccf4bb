"""A trainer whose ranks are workers: it cuts each batch into shards for them, and restarts them when one has died."""

import asyncio
import logging
import math
import shutil
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from agentrl.arrays import FloatArray
from agentrl.batch import TrainBatch
from agentrl.cluster.processes import start_local
from agentrl.cluster.workers import StartWorkers, WorkerGroup
from agentrl.errors import AgentRLError, ConfigError, StallError, TrainingError, WorkerDiedError
from agentrl.protocols import Loss, Recovery
from agentrl.trainers.batch_shards import BatchShard, gather, shard_batch
from agentrl.trainers.replay import ReplayLog, TrainingStep
from agentrl.trainers.settings import TrainerSettings
from agentrl.trainers.spec import Head, TrainerSpec
from agentrl.weights.bundle import BundlePlace, WeightBundle

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)
T = TypeVar("T")

_LEAVE_SECONDS = 5.0
"""How long the ranks may take to leave each other and give back what they hold, before they are stopped."""


class GroupTrainer:
    """What all trainers have in common; implements `agentrl.protocols.Trainer`.

    `sharding` names the function that makes a rank's `Sharding`, as "module:function": it loads torch, and is loaded
    where the rank lives. The event loop goes on during a call, and a step that the ranks have begun is finished though
    its caller is cancelled.

    `temperature` is the one the engine samples with: logprobs are of the distribution that was sampled from.
    `total_steps` is what the schedule ends at. `model` is a Hugging Face folder. `start` says where the ranks live.
    `role` is what they are called; with the `head` "value" the model is a critic, whose losses are of its values.
    `recovery` says how often ranks are restarted, and from what.

    Raises:
        ConfigError: on entering: the model folder is missing or is of a kind that cannot be trained exactly.
        WorkerDiedError: of any call: ranks have died more than `recovery.restarts` times, and no step was made between.
        StallError: of any call: it has missed `recovery.deadline`.
    """

    sharding: ClassVar[str]
    Config: ClassVar[type[TrainerSettings]]

    def __init__(
        self,
        config: Any,
        model: Path,
        *,
        total_steps: int,
        temperature: float = 1.0,
        start: StartWorkers = start_local,
        role: str = "trainer",
        head: Head = "policy",
        recovery: Recovery | None = None,
    ) -> None:
        if temperature <= 0:
            raise ConfigError(f"cannot train on samples of temperature {temperature}: greedy choices have no gradient")
        self.config = config
        self._spec = TrainerSpec(self.sharding, config, model, total_steps, temperature, head)
        self._role = role
        self._start = start
        self._recovery = recovery or Recovery()
        self._restarts_left = self._recovery.restarts
        self._log = ReplayLog(self._recovery.latest)
        self._running = False
        self._ranks: WorkerGroup | None = None

    @property
    def world_size(self) -> int:
        """Ranks."""
        return 1

    async def __aenter__(self) -> Self:
        self._running = True
        await self._ask(_nothing)
        return self

    async def __aexit__(self, *exc: Any) -> None:
        self._running = False
        await self._leave(exc[1])

    async def step(self, batch: TrainBatch, loss: Loss, normalizer: float) -> Mapping[str, float]:
        """One pass over the batch, in `minibatches` optimizer steps.

        Metrics: `loss` (summed token losses / normalizer), `grad_norm` (before clipping, largest of the minibatches),
        `lr`, `loss_tokens`, `tokens` (without padding), `packing` (share of the rows that is no padding),
        `logprob_gap_mean` and `logprob_gap_max` (|engine's - trainer's logprob|, in nats), the seconds of each phase
        and the means of the loss's own metrics.

        Raises:
            TrainingError: no loss token, a normalizer that is not above zero, or a loss or gradient that is not
                finite. The weights are then as the last good minibatch left them.
        """
        if batch.num_loss_tokens < 1 or not 0 < normalizer < math.inf:
            raise TrainingError(
                f"cannot train on {batch.num_loss_tokens} loss tokens with the normalizer {normalizer}: a batch needs "
                "a sampled token, and a normalizer above zero"
            )
        step = TrainingStep(batch, loss, normalizer)
        metrics = await self._ask(lambda ranks: self._make(ranks, step))
        self._log.record(step)
        self._restarts_left = self._recovery.restarts
        return metrics

    async def predict(self, batch: TrainBatch) -> FloatArray:
        """What the model says of each loss token, in the order of the batch, shape N."""

        async def predict(ranks: WorkerGroup) -> FloatArray:
            shards = await asyncio.to_thread(shard_batch, batch, self.config, ranks=len(ranks))
            predictions = await ranks.scatter("predict", [(shard,) for shard in shards])
            return await asyncio.to_thread(gather, batch, shards, predictions)

        return await self._ask(predict)

    async def weights(self) -> Mapping[str, "Tensor"]:
        """The float32 weights, whole; of tied weights the first name only. With one rank in this process not copied."""
        weights: Mapping[str, Tensor] = (await self._ask(lambda ranks: ranks.all("weights")))[0]
        return weights

    async def write_weights(self, place: BundlePlace) -> WeightBundle:
        """Rank 0 writes the weights, and nothing is sent here but where they are.

        From a machine that does not see the place they are sent here all the same, and written here.
        """
        written: Mapping[str, Tensor] = (await self._ask(lambda ranks: ranks.all("write_weights", place)))[0]
        return written if isinstance(written, WeightBundle) else await asyncio.to_thread(place.write, written)

    async def save(self, folder: Path) -> None:
        """Write a Hugging Face folder with the tokenizer, and the optimizer's state and step beside it.

        For all or nothing, write to a temporary folder and rename it. What a rank that died in it had
        written is removed.
        """

        async def save(ranks: WorkerGroup) -> None:
            shutil.rmtree(folder, ignore_errors=True)
            await ranks.all("save", folder)

        self._log.drop_saved()  # by the last checkpoint; of this one it is not known yet whether it will be whole
        await self._ask(save)

    async def load(self, folder: Path) -> None:
        """Take up exactly where `save` left off; settings (learning rate, decay, ...) stay those of this run.

        Raises:
            CheckpointError: the folder is missing or incomplete.
            ValueError: it is not the run's newest checkpoint, which alone would be found again.
        """
        checkpoint = self._log.checked(folder)
        await self._ask(lambda ranks: ranks.all("load", folder))
        self._log.begin_at(checkpoint)

    async def sleep(self) -> None:
        """All ranks give their devices' memory back (`Sleeper` of agentrl/placement/time_share.py)."""
        await self._ask(lambda ranks: ranks.all("sleep"))

    async def wake(self) -> None:
        """They take it again."""
        await self._ask(lambda ranks: ranks.all("wake"))

    async def free(self) -> int:
        """Bytes that are free on the fullest of the ranks' devices."""
        return int(min(await self._ask(lambda ranks: ranks.all("free"))))

    async def _make(self, ranks: WorkerGroup, step: TrainingStep) -> Mapping[str, float]:
        """Let the ranks make a step."""
        batch, loss, normalizer = step
        shards = await asyncio.to_thread(
            shard_batch, batch, self.config, ranks=len(ranks), minibatches=self.config.minibatches
        )
        args = (loss, normalizer, batch.num_loss_tokens)
        metrics = await ranks.scatter("step", [(shard, *args) for shard in shards])
        return {**metrics[0], **_packing(shards)}

    async def _ask(self, call: Callable[[WorkerGroup], Awaitable[T]]) -> T:
        """What the ranks answer, or those that take their place."""
        if not self._running:
            raise AgentRLError("the trainer is not running: use it inside `async with trainer:`")
        while True:
            try:
                async with asyncio.timeout(self._recovery.deadline):
                    return await call(self._ranks or await self._begin())
            except WorkerDiedError as error:
                if _is_cancelled():  # what ends the run may end the ranks too, and the death was seen first
                    raise asyncio.CancelledError from error
                if self._restarts_left == 0:
                    raise
                self._restarts_left -= 1
                logger.warning("%s; restarting all ranks", error)
                await self._leave(error)
            except TimeoutError as error:
                raise StallError(
                    f"the {self._role} did not answer within {self._recovery.deadline:g} s (rollout.deadlines.train), "
                    "and none of its ranks is dead: give it more time, or smaller batches"
                ) from error

    async def _begin(self) -> WorkerGroup:
        """Ranks in the state of the steps done."""
        ranks = await self._start(self._role, self._spec.make_rank, self.world_size)
        try:
            await ranks.all("open", len(ranks), await ranks.one("address"))
        except BaseException:
            await ranks.stop()
            raise
        self._ranks = ranks
        checkpoint = self._log.checkpoint()
        if checkpoint is not None:
            await ranks.all("load", checkpoint[1])
        for step in self._log.since(checkpoint[0] if checkpoint else 0):
            await self._make(ranks, step)
        return ranks

    async def _leave(self, error: BaseException | None) -> None:
        """End the ranks. `error`: why, where there is a reason."""
        ranks, self._ranks = self._ranks, None
        if ranks is None:
            return
        if not isinstance(error, WorkerDiedError):  # those who are left would wait for the dead one
            with suppress(AgentRLError, TimeoutError):  # one that is stuck is stopped all the same
                async with asyncio.timeout(_LEAVE_SECONDS):
                    await ranks.all("close")
        await ranks.stop()


def _packing(shards: list[BatchShard]) -> dict[str, float]:
    """What was computed, without padding, and its share of the rows."""
    computed = [one for shard in shards for part in shard for one in part if one.counts]
    tokens = sum(int(one.samples.lengths_M.sum()) for one in computed)
    return {"tokens": float(tokens), "packing": tokens / sum(one.cost for one in computed)}


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _nothing(ranks: WorkerGroup) -> None:
    """Being there is all that is asked."""
