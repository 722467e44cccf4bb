"""A trainer whose ranks are workers: cuts each batch into shards for them, and asks them all at the same time."""

import asyncio
import math
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from agentrl.arrays import FloatArray
from agentrl.batch import TrainBatch
from agentrl.cluster.processes import start_local
from agentrl.cluster.workers import StartWorkers, WorkerGroup
from agentrl.errors import AgentRLError, ConfigError, TrainingError, WorkerDiedError
from agentrl.protocols import Loss
from agentrl.trainers.batch_shards import gather, shard_batch
from agentrl.trainers.rank import Head, TrainerRank, TrainerSpec
from agentrl.trainers.settings import TrainerSettings
from agentrl.weights.bundle import BundlePlace, WeightBundle

if TYPE_CHECKING:
    from torch import Tensor

_LEAVE_SECONDS = 5.0
"""How long the ranks may take to leave each other and give back what they hold, before they are stopped."""


class GroupTrainer:
    """What all trainers have in common; implements `agentrl.protocols.Trainer`.

    `core` names the function that makes a rank's `TrainerCore`, as "module:function": it loads torch, and is loaded
    where the rank lives. Calls are answered in order, the event loop goes on meanwhile, and a step whose caller is
    cancelled is finished all the same.

    `temperature` is the one the engine samples with: logprobs are of the distribution that was sampled from.
    `total_steps` is what the schedule ends at. `model` is a Hugging Face folder. `start` says where the ranks live.
    `role` is what they are called; with the `head` "value" the model is a critic, whose losses are of its values.

    Raises:
        ConfigError: on entering: the model folder is missing or is of a kind that cannot be trained exactly.
    """

    core: ClassVar[str]
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
    ) -> None:
        if temperature <= 0:
            raise ConfigError(f"cannot train on samples of temperature {temperature}: greedy choices have no gradient")
        self.config = config
        self._spec = TrainerSpec(self.core, config, model, total_steps, temperature, head)
        self._role = role
        self._start = start
        self._ranks: WorkerGroup | None = None

    @property
    def world_size(self) -> int:
        """Ranks."""
        return 1

    @property
    def row_tokens(self) -> int:
        """How long the rows are that batches should be packed into."""
        rows: int = self.config.row_tokens
        return rows

    async def __aenter__(self) -> Self:
        ranks = await self._start(self._role, partial(TrainerRank, self._spec), self.world_size)
        try:
            await ranks.all("open", len(ranks), await ranks.one("address"))
        except BaseException:
            await ranks.stop()
            raise
        self._ranks = ranks
        return self

    async def __aexit__(self, *exc: Any) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is None:
            return
        if not isinstance(exc[1], WorkerDiedError):  # those who are left would wait for the dead one
            with suppress(AgentRLError, TimeoutError):  # one that is stuck is stopped all the same
                async with asyncio.timeout(_LEAVE_SECONDS):
                    await ranks.all("close")
        await ranks.stop()

    async def step(self, batch: TrainBatch, loss: Loss, normalizer: float) -> Mapping[str, float]:
        """One pass over the batch, in `minibatches` optimizer steps.

        Metrics: `loss` (summed token losses / normalizer), `grad_norm` (before clipping, largest of the minibatches),
        `lr`, `loss_tokens`, `tokens` (without padding), `packing` (share of the rows that is no padding),
        `logprob_gap_mean` and `logprob_gap_max` (|engine's - trainer's logprob|, in nats), the seconds of each phase
        and the means of the loss's own metrics.

        Raises:
            TrainingError: no loss token, a normalizer that is not above zero, or a loss or gradient that is not
                finite. The weights are then as the last good minibatch left them.
            WorkerDiedError: a rank is gone.
        """
        ranks = self._entered
        if batch.num_loss_tokens < 1 or not 0 < normalizer < math.inf:
            raise TrainingError(
                f"cannot train on {batch.num_loss_tokens} loss tokens with the normalizer {normalizer}: a batch needs "
                "a sampled token, and a normalizer above zero"
            )
        shards = shard_batch(
            batch,
            ranks=len(ranks),
            micro_batch_tokens=self.config.micro_batch_tokens,
            minibatch_count=self.config.minibatches,
        )
        args = (loss, normalizer, batch.num_loss_tokens)
        metrics = await ranks.scatter("step", [(shard, *args) for shard in shards])
        computed = [one.rows for shard in shards for part in shard for one in part if one.counts]
        tokens = sum(int((rows.segment_ids_BT > 0).sum()) for rows in computed)
        size = sum(rows.tokens_BT.size for rows in computed)
        return {**metrics[0], "tokens": float(tokens), "packing": tokens / size}

    async def predict(self, batch: TrainBatch) -> FloatArray:
        """See `SupportsPredict`."""
        ranks = self._entered
        tokens = self.config.micro_batch_tokens
        shards = shard_batch(batch, ranks=len(ranks), micro_batch_tokens=tokens, minibatch_count=1)
        return gather(batch, shards, await ranks.scatter("predict", [(shard,) for shard in shards]))

    async def weights(self) -> Mapping[str, "Tensor"]:
        """The float32 weights, whole; of tied weights the first name only. With one rank in this process not copied."""
        weights: Mapping[str, Tensor] = (await self._entered.all("weights"))[0]
        return weights

    async def write_weights(self, place: BundlePlace) -> WeightBundle:
        """See `SupportsWriteWeights`: rank 0 writes them, and nothing is sent here but where they are.

        From a machine that does not see the place they are sent here all the same, and written here.
        """
        written: Mapping[str, Tensor] = (await self._entered.all("write_weights", place))[0]
        return written if isinstance(written, WeightBundle) else await asyncio.to_thread(place.write, written)

    async def save(self, folder: Path) -> None:
        """Write a Hugging Face folder with the tokenizer, and the optimizer's state and step beside it.

        Whoever needs all or nothing writes to a temporary folder and renames it.
        """
        await self._entered.all("save", folder)

    async def load(self, folder: Path) -> None:
        """Take up exactly where `save` left off; settings (learning rate, decay, ...) stay those of this run."""
        await self._entered.all("load", folder)

    async def sleep(self) -> None:
        """See `Sleeper` (agentrl/placement/time_share.py): all ranks give their devices' memory back."""
        await self._entered.all("sleep")

    async def wake(self) -> None:
        """See `Sleeper`."""
        await self._entered.all("wake")

    async def free(self) -> int:
        """Bytes that are free on the fullest of the ranks' devices."""
        return int(min(await self._entered.all("free")))

    @property
    def _entered(self) -> WorkerGroup:
        if self._ranks is None:
            raise AgentRLError("the trainer is not running: use it inside `async with trainer:`")
        return self._ranks
