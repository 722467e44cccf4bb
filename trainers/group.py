"""A trainer whose ranks are workers: it cuts each batch into shards for them, and restarts them
when one dies.
"""

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from agentrl.batch import TrainBatch
from agentrl.cluster.processes import start_local
from agentrl.cluster.supervised import Supervised
from agentrl.cluster.worker_registry import WorkerCount, register_workers
from agentrl.cluster.workers import InOwnProcess, Make, StartWorkers, WorkerGroup
from agentrl.errors import AgentRLError, ConfigError, StallError, TrainingError, WorkerDiedError
from agentrl.models.facts import model_facts
from agentrl.placement.mesh import ONE_RANK, Mesh
from agentrl.placement.rows import lockstep_ratio
from agentrl.protocols import Loss, Recovery, Trainer
from agentrl.protocols.metrics import merge_metrics
from agentrl.protocols.weight_source import SendWeights
from agentrl.tokens.arrays import FloatArray
from agentrl.trainers.batch_shards import (
    BatchShard,
    gather,
    gather_rows,
    row_costs,
    shard_batch,
)
from agentrl.trainers.recovery_log import ReplayLog, TrainingStep
from agentrl.trainers.settings import MOST_TOKENS, TrainerSettings
from agentrl.trainers.spec import Head, TrainerSpec

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)
T = TypeVar("T")

_CALL_SECONDS = 3600.0
"""How long a call may take, besides the time for its tokens."""
_SECONDS_PER_TOKEN = 0.01
"""Ranks that train slower count as hanging."""
_LOOK_SECONDS = 0.05
"""How often to look whether a checkpoint is written."""
_LEAVE_SECONDS = 5.0
"""How long the ranks may take to disconnect and free their memory before they are stopped."""


@dataclass(frozen=True, slots=True)
class _Saving:
    """A checkpoint that is being written: the state after `done` steps, into a folder."""

    folder: Path
    done: int


class GroupTrainer(Trainer):
    """The base of all trainers; implements `agentrl.Trainer`.

    `sharding` names the function that makes a rank's `Sharding`, as "module:function". It needs
    torch, so only the ranks import it. A call does not block the event loop. The ranks finish a
    step that they have begun, even if the caller is cancelled. Ranks that die asleep are started
    again when they wake; a call that needs them before has them woken (`take_turns`).

    `temperature` is the engine's sampling temperature: logprobs are of the distribution that was
    sampled from. `total_steps` is the end of the learning rate schedule. `model` is a Hugging Face
    folder. `start` starts the ranks, in this process or elsewhere. `role` is their name in
    messages. With the `head` "value" the model is a critic, whose losses are of its values.
    `recovery` says how often ranks are restarted, and from what.

    Raises:
        ConfigError: on entering: the model folder is missing, or its model cannot be trained
        exactly.
        WorkerDiedError: from any call: ranks have died more than `recovery.restarts` times in a
            row, with no step and no prediction between.
        StallError: from any call: it has missed `recovery.deadline`, or its ranks
        `recovery.start_seconds`.
    """

    sharding: ClassVar[str]
    joins_a_group: ClassVar[bool] = False
    """Its ranks join a group of torch.distributed, of which a process has one: a critic's ranks
    need processes of their own, even if there is one of each."""
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
            raise ConfigError(
                f"cannot train on samples of temperature {temperature}: greedy choices have no"
                " gradient"
            )
        self.config = config = config.within(longest_sample(model))
        self._spec = TrainerSpec(self.sharding, config, model, total_steps, temperature, head)
        self._role = role
        self._start = start
        self._recovery = recovery or Recovery()
        self._supervised = Supervised(
            f"the {role}",
            "a step",
            allowed=self._recovery.restarts,
            start_seconds=self._recovery.start_seconds,
        )
        self._registration = ExitStack()
        self._log = ReplayLog(self._recovery.latest)
        self._running = False
        self._ranks: WorkerGroup | None = None
        self._last_step: tuple[TrainBatch, Sequence[BatchShard]] | None = None
        self._starting = asyncio.Lock()
        self._waits = False  # asleep: dead ranks start at the trainer's next turn, not before
        self._turn: Callable[[], AbstractAsyncContextManager[None]] = self._turn_alone
        self._saving: _Saving | None = None
        self._attention = attention_share(model) if self.mesh.world_size > 1 else 0.0

    @property
    def mesh(self) -> Mesh:
        """The grid of the ranks."""
        return ONE_RANK

    def worker_count(self) -> WorkerCount:
        """How many ranks are alive, as far as is known. Any thread may ask."""
        ranks = self._ranks
        return WorkerCount(
            self._role,
            0 if ranks is None else len(ranks),
            self.mesh.world_size,
            self._supervised.restarts,
        )

    async def __aenter__(self) -> Self:
        self._running = True
        with ExitStack() as stack:
            stack.enter_context(register_workers(self.worker_count))
            await self._ask(_nothing)
            self._registration = stack.pop_all()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        self._running = False
        self._registration.close()
        await self._leave(exc[1])

    async def step(self, batch: TrainBatch, loss: Loss, normalizer: float) -> Mapping[str, float]:
        """One pass over the batch, in `minibatches` optimizer steps.

        Metrics: `loss` (summed token losses / normalizer), `grad_norm` (before clipping, largest of
        the minibatches), `lr`, `loss_tokens`, `tokens`, `tokens_computed` (a prefix that samples
        share counts once), `lockstep_ratio` with several ranks, `logprob_gap_mean` and
        `logprob_gap_max` (|engine's - trainer's logprob|, in nats), the seconds of each phase and
        the means of the loss's own metrics.

        Raises:
            TrainingError: no loss token, a normalizer that is not above zero, a loss that returns
                anything but a number for each token, or a loss or gradient that is not finite. The
                weights are then as the last good minibatch left them.
            MetricNameError: a metric of the loss has the name of one of the trainer's.
        """
        if batch.num_loss_tokens < 1 or not 0 < normalizer < math.inf:
            raise TrainingError(
                f"cannot train on {batch.num_loss_tokens} loss tokens with the normalizer"
                f" {normalizer}: a batch needs a sampled token, and a normalizer above zero"
            )
        step = TrainingStep(batch, loss, normalizer)
        metrics = await self._ask(lambda ranks: self._make(ranks, step), len(batch.tokens_S))
        self._log.record(step)
        self._supervised.progress()
        return metrics

    async def predict(self, batch: TrainBatch) -> FloatArray:
        """The model's logprob (a critic's value) of each loss token, in the order of the batch,
        shape N.
        """

        async def predict(ranks: WorkerGroup) -> FloatArray:
            shards = await asyncio.to_thread(
                shard_batch,
                self._without_unused(batch),
                self.config,
                parts=self.mesh.data_parallel_size,
                attention=self._attention,
            )
            answers = await ranks.scatter("predict", [(shard,) for shard in self._by_rank(shards)])
            return await asyncio.to_thread(gather, batch, shards, self._by_part(answers))

        predicted = await self._ask(predict, len(batch.tokens_S))
        self._supervised.progress()  # a reference makes no steps
        return predicted

    async def token_logprobs(self) -> FloatArray | None:
        """See `Trainer.token_logprobs`."""
        by_rank: Sequence[Sequence[FloatArray]] = await self._ask(
            lambda ranks: ranks.all("token_logprobs")
        )
        # Ranks that have been restarted after a checkpoint know of no step.
        if self._last_step is None or not all(by_rank):
            return None
        return await asyncio.to_thread(
            gather_rows, *self._last_step, self.config.minibatches, self._by_part(by_rank)
        )

    async def weights(self) -> Mapping[str, "Tensor"]:
        """The whole float32 weights; tied weights only under their first name.

        A single rank in this process returns the weights themselves, not a copy.
        """
        weights: Mapping[str, Tensor] = (await self._ask(lambda ranks: ranks.all("weights")))[0]
        return weights

    async def send_weights(self, send: SendWeights[T]) -> Sequence[T]:
        """See `Trainer.send_weights`. Ranks that die meanwhile are started again, and begin
        anew.
        """
        answers: Sequence[T] = await self._ask(lambda ranks: ranks.all("send_weights", send))
        return answers

    async def save(self, folder: Path) -> None:
        """Write a Hugging Face folder with the tokenizer, and the optimizer's state and step beside
        it.

        To save all or nothing, save to a temporary folder and rename it.
        """
        await self.begin_save(folder)
        await self.saved()

    async def begin_save(self, folder: Path) -> None:
        """Copy the state, and let the ranks write it while steps go on; `saved` waits for them.

        Ranks that are restarted meanwhile write it again, over what there is, when they have come
        to the same step.
        """
        if self._saving is not None:
            await self.saved()
        # Only the steps of the last complete checkpoint: this one may not become complete.
        self._log.drop_saved()
        saving = _Saving(folder, self._log.done)
        await self._ask(lambda ranks: ranks.all("begin_save", folder))
        self._saving = saving

    async def saved(self) -> None:
        """Wait until all ranks have written what `begin_save` began.

        Raises:
            OSError: they cannot write it.
        """
        if self._saving is None:
            return
        seconds = self._recovery.deadline or _CALL_SECONDS
        try:
            async with asyncio.timeout(seconds):
                # Steps go on meanwhile, so no call of a rank may wait for its writing.
                while not all(await self._ask(lambda ranks: ranks.all("saved"))):  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_SECONDS)
        except TimeoutError as error:
            raise self._stall_error("write its checkpoint", seconds, "a faster disk") from error
        finally:
            self._saving = None

    async def load(self, folder: Path) -> None:
        """Continue exactly where `save` left off; settings (learning rate, decay, ...) stay those
        of this run.

        Raises:
            CheckpointError: the folder is missing or incomplete.
            ValueError: it is not the run's newest checkpoint, the only one that a restart would
            find.
        """
        checkpoint = self._log.checked(folder)
        await self._ask(lambda ranks: ranks.all("load", folder))
        self._log.begin_at(checkpoint)

    async def sleep(self) -> int | None:
        """See `Trainer.sleep`. Frees all ranks' devices; those of dead ranks are free."""
        return await self._free("sleep")

    async def free_step_memory(self) -> int | None:
        """See `Trainer.free_step_memory`."""
        return await self._free("free_step_memory")

    async def _free(self, method: str) -> int | None:
        """Free memory of all ranks' devices, and start no ranks from here on."""
        # Before the call: ranks that die of it must not start on devices that others now use.
        waited, self._waits = self._waits, True
        try:
            freed_bytes: Sequence[int | None] | None
            freed_bytes = await self._ask_living(lambda ranks: ranks.all(method))
        except BaseException:
            self._waits = waited
            raise
        return max((freed for freed in freed_bytes or () if freed is not None), default=None)

    async def wake(self) -> None:
        """Move all ranks' state back to their devices, or start ranks in place of dead ones."""
        waited, self._waits = self._waits, False
        try:
            await self._ask(lambda ranks: ranks.all("wake"))
        except BaseException:
            self._waits = waited
            raise

    def take_turns(self, turn: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        """See `Trainer.take_turns`."""
        self._turn = turn

    async def free(self) -> int | None:
        """Free bytes on the fullest of the ranks' devices; None if the ranks are dead."""
        free = await self._ask_living(lambda ranks: ranks.all("free"))
        return None if free is None else int(min(free))

    def _by_rank(self, shards: Sequence[BatchShard]) -> list[BatchShard]:
        """The shard that each rank computes: ranks of one part of the batch have the same."""
        mesh = self.mesh
        return [shards[mesh.data_parallel_rank(rank)] for rank in range(mesh.world_size)]

    def _by_part(self, answers: Sequence[T]) -> list[T]:
        """The answer for each part of a batch, of the answers of all ranks."""
        return [answers[rank] for rank in self.mesh.data_parallel_leaders]

    def _without_unused(self, batch: TrainBatch) -> TrainBatch:
        """The batch as far as the ranks need it."""
        return batch.without_experts() if self._spec.routing == "off" else batch

    async def _make(self, ranks: WorkerGroup, step: TrainingStep) -> Mapping[str, float]:
        """Make a step on the ranks."""
        batch, loss, normalizer = step
        shards = await asyncio.to_thread(
            shard_batch,
            self._without_unused(batch),
            self.config,
            parts=self.mesh.data_parallel_size,
            minibatches=self.config.minibatches,
            attention=self._attention,
        )
        args = (loss, normalizer, batch.num_loss_tokens)
        metrics = await ranks.scatter("step", [(shard, *args) for shard in self._by_rank(shards)])
        self._last_step = batch, shards
        counted = [one for shard in shards for part in shard for one in part if one.counts]
        parts, costs = len(shards), row_costs(shards, self._attention)
        own = {
            "tokens": float(sum(one.tokens for one in counted)),
            "tokens_computed": float(sum(one.computed_tokens for one in counted)),
            **({"lockstep_ratio": lockstep_ratio(costs, parts)} if parts > 1 else {}),
        }
        return merge_metrics({"the loss": metrics[0], "the trainer": own})

    async def _ask(self, call: Callable[[WorkerGroup], Awaitable[T]], tokens: int = 0) -> T:
        """Make a call about so many tokens to the ranks, and return their answer.

        If ranks die, restart all of them, at their turn, and call again.
        """
        while not (answers := await self._attempt(call, tokens)):
            if self._waits:
                async with self._turn():
                    pass  # waking starts them
        return answers[0]

    async def _ask_living(self, call: Callable[[WorkerGroup], Awaitable[T]]) -> T | None:
        """The ranks' answer; None if they are dead while the trainer sleeps: this starts none."""
        answers = await self._attempt(call)
        return answers[0] if answers else None

    async def _attempt(
        self, call: Callable[[WorkerGroup], Awaitable[T]], tokens: int = 0
    ) -> Sequence[T]:
        """The ranks' answer in a tuple, which is empty if they have died, or are dead while the
        trainer sleeps. (An answer itself may be None.)
        """
        seconds = self._recovery.deadline or _CALL_SECONDS + _SECONDS_PER_TOKEN * tokens
        if not self._running:
            raise AgentRLError("the trainer is not running: use it inside `async with trainer:`")
        ranks = None
        try:
            async with asyncio.timeout(seconds):
                ranks = await self._living()
                return () if ranks is None else (await call(ranks),)
        except WorkerDiedError as error:
            if _is_cancelled():  # the ranks may have died because the run is ending
                raise asyncio.CancelledError from error
            await self._end_dead(ranks, error)
            return ()
        except TimeoutError as error:
            raise self._stall_error("answer", seconds, "smaller batches") from error

    def _stall_error(self, what: str, seconds: float, or_else: str) -> StallError:
        return StallError(
            f"the {self._role} did not {what} within {seconds:g} s (rollout.deadlines.train), "
            f"and none of its ranks is dead: give it more time, or {or_else}"
        )

    async def _living(self) -> WorkerGroup | None:
        """The ranks, which are started if there are none; None if they may not start now, as the
        trainer sleeps.
        """
        with self._supervised.outside_deadlines():
            async with self._starting:
                if self._ranks is None and not self._waits:
                    self._ranks = await self._begin()
                return self._ranks

    @asynccontextmanager
    async def _turn_alone(self) -> AsyncIterator[None]:
        """The turn of a trainer that sleeps though it shares its devices with nothing known."""
        await self.wake()
        try:
            yield
        finally:
            await self.sleep()

    async def _end_dead(self, ranks: WorkerGroup | None, error: WorkerDiedError) -> None:
        """End a group of ranks of which some have died, so that the next call starts others."""
        async with self._starting:
            if self._ranks is not ranks:  # another call has noticed it too
                return
            await self._leave(error)
            await self._supervised.recover(
                error,
                lambda reason: WorkerDiedError(
                    error.role, error.rank, f"{error.why}; all ranks were {reason}"
                ),
            )

    async def _begin(self) -> WorkerGroup:
        """Start ranks, and bring them to the state after the steps done. They save again what they
        had not saved.
        """
        make: Make = self._spec.make_rank
        ranks = await self._start(
            self._role,
            InOwnProcess(make) if self.joins_a_group else make,
            self.mesh.world_size,
        )
        try:
            checkpoint = await self._connect(ranks)
            done = checkpoint[0] if checkpoint else 0
            # A checkpoint that was being written may be of any of these steps.
            for number, step in enumerate(self._log.since(done), done):
                await self._save_again(ranks, number)
                await self._make(ranks, step)
            await self._save_again(ranks, self._log.done)
        except BaseException:
            await ranks.stop()
            raise
        return ranks

    async def _connect(self, ranks: WorkerGroup) -> tuple[int, Path] | None:
        """Let new ranks form their group and load the model, and then the checkpoint that this
        returns.
        """
        async with self._supervised.starting():
            one_machine = len(set(await ranks.all("machine"))) == 1
            # Rank 0 keeps the address bound, so that no other process takes its port meanwhile.
            address = await ranks.one("reserve", one_machine)
            await ranks.all("open", self.mesh, address)
            checkpoint = self._log.checkpoint()
            if checkpoint is not None:
                await ranks.all("load", checkpoint[1])
            return checkpoint

    async def _save_again(self, ranks: WorkerGroup, done: int) -> None:
        """Begin to save again, if these are the steps done in what was being saved."""
        if self._saving is not None and self._saving.done == done:
            await ranks.all("begin_save", self._saving.folder)

    async def _leave(self, error: BaseException | None) -> None:
        """End the ranks. `error`: the reason, if there is one."""
        ranks, self._ranks = self._ranks, None
        if ranks is None:
            return
        # The remaining ranks would wait for the dead one.
        if not isinstance(error, WorkerDiedError):
            with suppress(AgentRLError, TimeoutError):  # a stuck rank is stopped below anyway
                async with asyncio.timeout(_LEAVE_SECONDS):
                    await ranks.all("close")
        await ranks.stop()


def longest_sample(model: Path) -> int:
    """Most tokens of a sample of the model in a folder, by its config; `MOST_TOKENS` if it says
    nothing.
    """
    try:
        config = json.loads((model / "config.json").read_text())
    except FileNotFoundError:
        return MOST_TOKENS  # the ranks say what is missing
    positions = (config.get("text_config") or config).get("max_position_embeddings")
    return int(positions or MOST_TOKENS)


def attention_share(model: Path) -> float:
    """The work that attention to one token before adds to a token, as a share of its work in the
    matrix products.

    0 for models that cannot be counted: their samples cost as much as their tokens.
    """
    try:
        facts = model_facts(model)
    except ConfigError:
        return 0.0
    return facts.attention / (2 * facts.active)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _nothing(ranks: WorkerGroup) -> None:
    """The call of `__aenter__`, which only needs the ranks to be running."""
