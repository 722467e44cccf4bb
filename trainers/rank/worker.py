"""One rank of a trainer, as a worker. Its steps are the same for every sharding.

A step first computes the old logprobs of all minibatches but the first, whose new logprobs are also
the old ones (with `old_logprobs=engine` it takes the engine's instead). Then, for each minibatch,
it accumulates micro-batches into the gradient of sum(token losses) / normalizer over all ranks, and
updates the weights once.
"""

import asyncio
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import TypeVar

import torch
from torch import Tensor

from agentrl.errors import AgentRLError, TrainingError
from agentrl.models.routing import balance_loss, layers_with_experts
from agentrl.models.source import here
from agentrl.models.vision import Vision, sees
from agentrl.net.interfaces import LOOPBACK, own_address
from agentrl.placement.mesh import Mesh
from agentrl.placement.time_share import free_on_cpu, free_on_gpus
from agentrl.protocols import Loss, LossTokens, uses_entropy
from agentrl.protocols.metrics import merge_metrics
from agentrl.protocols.weight_source import SendWeights
from agentrl.tokens.arrays import FloatArray
from agentrl.trainers.batch_shards import BatchShard
from agentrl.trainers.compute.forward import DeviceMicroBatch, RoutedLayers, to_device
from agentrl.trainers.compute.pictures import PictureReader
from agentrl.trainers.packing import MicroBatch
from agentrl.trainers.rank import checkpoint
from agentrl.trainers.rank.gradient_norms import norms_of
from agentrl.trainers.rank.loss_output import check_output
from agentrl.trainers.rank.sharding import Sharding
from agentrl.trainers.rank.weights import RankWeights
from agentrl.trainers.spec import RankInfo, TrainerSpec

T = TypeVar("T")
_WRITER_NICENESS = 5
"""Of the thread that writes a checkpoint: where a step keeps all cores busy, the thread gets a
third of its share.
"""


class TrainerRank:
    """The worker of a rank. Call `open` first; make the same calls in order on all ranks."""

    def __init__(self, spec: TrainerSpec, rank: int) -> None:
        self._spec = spec
        self._rank = rank
        self._sharding: Sharding | None = None
        self._routed: RoutedLayers | None = None
        self._reader: PictureReader | None = None
        self._meeting: socket.socket | None = None
        self._steps_done = 0
        self._logprobs: Sequence[FloatArray] = ()
        self._writer = ThreadPoolExecutor(
            1, thread_name_prefix="checkpoint", initializer=_lower_thread_priority
        )
        self._snapshot: checkpoint.Snapshot | None = None
        self._copying: Future[None] | None = None
        self._writing: Future[None] | None = None

    def machine(self) -> str:
        """A name of this machine: the same for ranks that can meet on the loopback interface."""
        return f"{socket.gethostname()} {own_address()}"

    def reserve(self, loopback: bool) -> str:
        """Reserve an address on which the ranks can meet: of the loopback interface if they share a
        machine.
        """
        host = LOOPBACK if loopback else own_address()
        self._meeting = socket.socket()
        self._meeting.bind((host, 0))
        return f"{host}:{self._meeting.getsockname()[1]}"

    def open(self, mesh: Mesh, address: str) -> None:
        """Join the other ranks, load the model, make the optimizer."""
        make = resolve_name(self._spec.sharding)
        meeting, self._meeting = self._meeting, None
        with meeting or nullcontext():  # a rank that is alone on its device does not use it
            self._sharding = make(self._spec, RankInfo(self._rank, mesh, address, meeting))
        model = self.sharding.trainable.model
        if sees(model.config):
            self._reader = PictureReader(Vision(model, here(self._spec.origin)))
        if self._spec.routing != "off":
            self._routed = RoutedLayers(
                layers_with_experts(model),
                int(model.config.get_text_config().num_hidden_layers),
                replays=self._spec.routing == "replay",
            )

    def close(self) -> None:
        """Leave the other ranks, and free the model. All ranks have to do so."""
        sharding, self._sharding = self._sharding, None
        self._writer.shutdown()
        if sharding is not None:
            sharding.close()

    @property
    def sharding(self) -> Sharding:
        """This rank's sharding."""
        if self._sharding is None:
            raise AgentRLError(
                "this rank of the trainer has not joined the others yet: call open first"
            )
        return self._sharding

    def step(
        self, shard: BatchShard, loss: Loss, normalizer: float, loss_tokens: int
    ) -> Mapping[str, float]:
        """One pass over this rank's shard. The metrics are of all ranks, except the seconds, which
        are of this one.
        """
        lr = self._spec.config.learning_rate(self._steps_done, self._spec.total_steps)
        tally = _Tally()
        # No update comes before the first minibatch, so its own logprobs are the old ones.
        olds: list[list[Tensor | None]] = [
            [None for _ in shard[0]],
            *(self._old_logprobs(micro_batches, tally) for micro_batches in shard[1:]),
        ]
        for number, (micro_batches, old) in enumerate(zip(shard, olds, strict=True)):
            # Each minibatch is divided by the same share of the normalizer, so a token weighs the
            # same in each.
            tally.before_updates = number == 0
            self._accumulate(micro_batches, old, loss, normalizer / len(shard), tally)
            self._update(lr, tally)
        self._steps_done += 1
        of_loss, means = self._means(tally, loss_tokens)
        if self._balances:  # without its weight
            means["router_aux_loss"] = float(self.sharding.sum(tally.balance)) / len(shard)
        self._logprobs = [rows_3N.float().cpu().numpy() for rows_3N in tally.logprobs]
        own = {
            "loss": tally.loss / len(shard),
            "grad_norm": tally.grad_norm,
            **tally.grad_norms,
            "lr": lr,
            "loss_tokens": float(loss_tokens),
            **means,
            "logprob_gap_max": tally.gap_max,
            **{f"seconds_{phase}": seconds for phase, seconds in tally.seconds.items()},
        }
        return merge_metrics({"the trainer": own, "the loss": of_loss})

    def predict(self, shard: BatchShard) -> list[FloatArray]:
        """The model's outputs for the loss tokens of each micro-batch. Nothing is kept for a
        backward pass.
        """
        with torch.no_grad():
            predictions = [
                self.sharding.predict(self._on_device(one))
                for minibatch in shard
                for one in minibatch
            ]
        return [numbers_N.float().cpu().numpy() for numbers_N in predictions]

    def token_logprobs(self) -> Sequence[FloatArray]:
        """For each micro-batch of the last step, in order, the rows of `Trainer.token_logprobs`;
        shape (3, N).
        """
        return self._logprobs

    def weights(self) -> Mapping[str, Tensor]:
        """All weights, whole, by Hugging Face names, on rank 0; tied weights only under their first
        name.
        """
        whole = self.sharding.gather_all()
        return self.sharding.trainable.weights(whole) if self._rank == 0 else {}

    def send_weights(self, send: SendWeights[T]) -> T:
        """Call `send` with the weights as this rank has them. All ranks have to do so."""
        return send(self._weights)

    @cached_property
    def _weights(self) -> RankWeights:
        return RankWeights(self.sharding)

    def begin_save(self, folder: Path) -> None:
        """Begin to write this rank's part of weights, optimizer and steps done into a folder.

        Further steps do not change what is written: their first update copies what is not copied
        yet.
        """
        if self._writing is not None:
            self._writing.exception()  # of an attempt that was given up
        snapshot = checkpoint.Snapshot.of(self.sharding, self.sharding.trainable, self._steps_done)
        copying = self._writer.submit(snapshot.copy)
        self._writing = self._writer.submit(_write_copied, copying, snapshot, folder)
        self._copying, self._snapshot = copying, snapshot

    def saved(self) -> bool:
        """True if what `begin_save` began is written.

        Raises:
            OSError: it cannot be written.
        """
        if self._writing is None or not self._writing.done():
            return self._writing is None
        writing, self._writing = self._writing, None
        self._copying = self._snapshot = None
        writing.result()
        return True

    def load(self, folder: Path) -> None:
        """Load what `begin_save` wrote."""
        self._finish_copying()
        self._steps_done = checkpoint.load(self.sharding, self.sharding.trainable, folder)

    def sleep(self) -> int | None:
        """Free the device's memory; returns the bytes freed there, None on a CPU, or if it was
        freed already.
        """
        self._finish_copying()
        device = self.sharding.device
        if device.type != "cuda":
            self.sharding.sleep()
            return None
        before = torch.cuda.memory_reserved(device)
        self.sharding.sleep()
        return before - torch.cuda.memory_reserved(device) or None

    def free_step_memory(self) -> int | None:
        """Drop the gradients, and give back all memory that no tensor uses; returns the bytes of
        that, None on a CPU, or if there are none.
        """
        self.sharding.clear()
        device = self.sharding.device
        if device.type != "cuda":
            return None
        before = torch.cuda.memory_reserved(device)
        torch.cuda.empty_cache()
        return before - torch.cuda.memory_reserved(device) or None

    def wake(self) -> None:
        """Move everything back to the device."""
        self.sharding.wake()

    def free(self) -> int:
        """Free bytes on this rank's device."""
        on_gpu = self.sharding.device.type == "cuda"
        return asyncio.run(free_on_gpus() if on_gpu else free_on_cpu())

    def _finish_copying(self) -> None:
        """Copy what a checkpoint that was begun still needs of the weights. `saved` tells whether
        the writer failed.
        """
        copying, snapshot = self._copying, self._snapshot
        self._copying = self._snapshot = None
        if copying is not None and snapshot is not None:
            snapshot.help()
            wait([copying])

    @property
    def _takes_engine_logprobs(self) -> bool:
        return bool(self._spec.config.old_logprobs == "engine")

    def _on_device(self, micro_batch: MicroBatch, *, balance: bool = False) -> DeviceMicroBatch:
        device, context = self.sharding.device, self.sharding.context
        if micro_batch.sees and self._reader is None:
            raise TrainingError(
                f"the batch has pictures, and {self._spec.origin} is loaded without a tower: train"
                " a model that sees"
            )
        return to_device(
            micro_batch,
            device,
            balance=balance,
            context=context,
            routed=self._routed,
            reader=self._reader,
        )

    def _old_logprobs(
        self, micro_batches: Sequence[MicroBatch], tally: "_Tally"
    ) -> list[Tensor | None]:
        """The trainer's logprobs before the first update on this batch; None where the engine's
        stand for them.
        """
        if self._takes_engine_logprobs:
            return [None for _ in micro_batches]
        found: list[Tensor | None] = []
        with tally.phase("old_logprobs"), torch.no_grad():
            for micro_batch in micro_batches:
                samples = self._on_device(micro_batch)
                found.append(self.sharding.predict(samples))
                self._compare_routing(samples, float(micro_batch.counts), tally)
        return found

    def _accumulate(
        self,
        micro_batches: Sequence[MicroBatch],
        old: list[Tensor | None],
        loss: Loss,
        normalizer: float,
        tally: "_Tally",
    ) -> None:
        """Sum the gradients of sum(weight * token loss) / normalizer of a minibatch, however it is
        cut and sharded.
        """
        with tally.phase("forward_backward"):
            self.sharding.clear()
            with_entropy = self._spec.head == "policy" and uses_entropy(loss)
            totals_2E = self._balance_totals(micro_batches)
            for i, (micro_batch, old_N) in enumerate(zip(micro_batches, old, strict=True)):
                samples = self._on_device(micro_batch, balance=self._balances)
                predicted, sums_2E = _split_balance_sums(
                    self.sharding.predict(samples, entropy=with_entropy),
                    samples,
                    entropy=with_entropy,
                )
                if tally.before_updates:
                    self._compare_routing(samples, float(micro_batch.counts), tally)
                logprobs_N, entropies_N = predicted if with_entropy else (predicted, None)
                # Without old ones, no update has come before this minibatch, or the loss takes the
                # engine's.
                before_N = logprobs_N.detach() if old_N is None else old_N
                tokens = LossTokens(
                    samples.rollout_logprobs_N if self._takes_engine_logprobs else before_N,
                    samples.rollout_logprobs_N,
                    samples.reference_logprobs_N,
                    samples.advantages_N,
                    samples.samples_N,
                    entropies_N,
                )
                output = check_output(loss(logprobs_N, tokens), logprobs_N)
                weight = float(micro_batch.counts)
                reported = weight * self._reports
                part = (output.loss_N * samples.weights_N).sum() / normalizer * weight
                whole = part
                if sums_2E is not None:
                    # Without totals, this is all of the minibatch.
                    balanced = (
                        balance_loss(sums_2E if totals_2E is None else totals_2E, sums_2E[1])
                        * weight
                    )
                    tally.balance = balanced.detach() + tally.balance.to(balanced.device)
                    whole = part + self._spec.config.router_aux_loss_coef * balanced
                # The factor is 1. For a loss that is not finite it is NaN, and no update applies
                # such a gradient.
                self.sharding.backward(
                    whole * (1 + 0 * part.detach()), last=i == len(micro_batches) - 1
                )
                tally.add(part.detach() * self._reports, output.metrics, reported)
                # Logprobs of updated weights would not measure the gap to the engine.
                if old_N is not None or tally.before_updates:
                    tally.compare((before_N - samples.rollout_logprobs_N).abs(), reported)
                known_N = (
                    torch.full_like(before_N, torch.nan)
                    if entropies_N is None
                    else entropies_N.detach()
                )
                tally.logprobs.append(
                    torch.stack([tokens.old_logprobs_N, logprobs_N.detach(), known_N])
                )

    @property
    def _reports(self) -> float:
        """The factor of this rank's sums in those of all ranks: 0 if another rank reports the same
        loss tokens, as ranks that share samples do; else 1.
        """
        return float(self.sharding.rank in self.sharding.mesh.data_parallel_leaders)

    @property
    def _balances(self) -> bool:
        """True if the routers of a mixture of experts are balanced by a loss."""
        return self._spec.head == "policy" and self._spec.config.router_aux_loss_coef > 0

    def _balance_totals(self, micro_batches: Sequence[MicroBatch]) -> Tensor | None:
        """`Balance.sums` of a minibatch, over all ranks, from a pass before the one with gradients.

        None if nothing is balanced, or if a single pass computes all of the minibatch.
        """
        alone = len(micro_batches) == 1 and self.sharding.mesh.world_size == 1
        if not self._balances or alone:
            return None
        found: list[Tensor] = []
        with torch.no_grad():
            for micro_batch in micro_batches:
                samples = self._on_device(micro_batch, balance=True)
                _, sums_2E = _split_balance_sums(
                    self.sharding.predict(samples), samples, entropy=False
                )
                assert sums_2E is not None
                found.append(sums_2E * float(micro_batch.counts))
        return self.sharding.sum(torch.stack(found).sum(0))

    def _compare_routing(self, samples: DeviceMicroBatch, weight: float, tally: "_Tally") -> None:
        """Compare the experts that the routers liked best in the last pass with those that the
        engine chose, where these are known.
        """
        if self._routed is None:
            return
        routing = samples.routing
        known_N = (
            torch.zeros_like(samples.targets_N, dtype=torch.bool)
            if routing is None
            else routing.is_known_N
        )
        share_N = torch.zeros(()) if routing is None else routing.difference_N
        tally.compare_routing(share_N * known_N, known_N, weight)

    def _update(self, lr: float, tally: "_Tally") -> None:
        with tally.phase("optimizer"):
            loss = float(self.sharding.sum(tally.part))
            tally.gap_max = max(tally.gap_max, float(self.sharding.max(tally.part_gap)))
            squares = self.sharding.gradient_squares()
            whole = self.sharding.sum(torch.stack(list(squares.values()))) if squares else ()
            by_group = norms_of(dict(zip(squares, whole, strict=True)))
            # The update changes what a checkpoint that was begun may not have copied yet.
            self._finish_copying()
            grad_norm = self.sharding.update(lr, self._spec.config.max_grad_norm)
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                raise TrainingError(
                    f"step {self._steps_done}: the loss is {loss} and the gradient norm"
                    f" {grad_norm}; the weights were left as they were (largest gap between engine"
                    f" and trainer: {tally.gap_max:.3g} nats)"
                )
            tally.updated(loss, grad_norm, by_group)

    def _means(
        self, tally: "_Tally", loss_tokens: int
    ) -> tuple[dict[str, float], dict[str, float]]:
        """The mean of each metric of the loss over the loss tokens of all ranks; and the means of
        the gaps over those that were compared.
        """
        names = sorted(tally.sums)
        gaps = [
            tally.gap,
            tally.compared,
            tally.routing.to(tally.gap.device),
            tally.routed.to(tally.gap.device),
            tally.routable.to(tally.gap.device),
        ]
        found = self.sharding.sum(
            torch.stack([*(tally.sums[name] for name in names), *gaps])
        ).tolist()
        *totals, gap, compared, routing, routed, routable = found
        of_loss = {name: total / loss_tokens for name, total in zip(names, totals, strict=True)}
        own = {"routing_difference": routing / routed} if routed else {}
        own |= {"routing_known": routed / routable} if routable else {}
        return of_loss, {**own, "logprob_gap_mean": gap / compared}


def _split_balance_sums(
    predicted: Tensor, samples: DeviceMicroBatch, *, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """The outputs of a predictor for the loss tokens, and `Balance.sums` if these were asked for:
    `Predictor.forward` returns both in one flat tensor.
    """
    if samples.times_S is None:
        return predicted, None
    count = len(samples.weights_N) * (1 + entropy)
    outputs, sums = predicted[:count], predicted[count:]
    return outputs.reshape(2, -1) if entropy else outputs, sums.reshape(2, -1)


def _write_copied(copying: "Future[None]", snapshot: checkpoint.Snapshot, folder: Path) -> None:
    copying.result()
    snapshot.write(folder)


def _lower_thread_priority() -> None:
    """Let this thread write in the pauses of the steps, where the operating system knows priorities
    of threads.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _WRITER_NICENESS)


@dataclass(slots=True)
class _Tally:
    """Sums of a step. `part` and `part_gap` are of this rank and the current minibatch, on the
    device.

    `gap`: the sum of |engine's - trainer's logprob| of the tokens that were `compared`, before any
    update. `routing`: the sum of the shares of experts that differ, over the `routed` tokens whose
    experts were compared, of the `routable` ones. `balance`: the sum of the balance losses of the
    minibatches. `logprobs`: of each micro-batch, the old and the new ones, and the entropies, shape
    (3, N).
    """

    part: Tensor = field(default_factory=lambda: torch.zeros(()))
    part_gap: Tensor = field(default_factory=lambda: torch.zeros(()))
    gap: Tensor = field(default_factory=lambda: torch.zeros(()))
    compared: Tensor = field(default_factory=lambda: torch.zeros(()))
    routing: Tensor = field(default_factory=lambda: torch.zeros(()))
    routed: Tensor = field(default_factory=lambda: torch.zeros(()))
    routable: Tensor = field(default_factory=lambda: torch.zeros(()))
    balance: Tensor = field(default_factory=lambda: torch.zeros(()))
    before_updates: bool = True
    sums: dict[str, Tensor] = field(default_factory=dict)
    loss: float = 0.0
    gap_max: float = 0.0
    grad_norm: float = 0.0
    grad_norms: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    logprobs: list[Tensor] = field(default_factory=list)

    def add(self, part: Tensor, metrics: Mapping[str, Tensor], weight: float) -> None:
        """Count one micro-batch."""
        self.part = part + self.part.to(part.device)
        for name, values_N in metrics.items():
            self.sums[name] = values_N.detach().sum() * weight + self.sums.get(name, 0.0)

    def compare(self, gap_N: Tensor, weight: float) -> None:
        """Count differences between the engine's and the trainer's logprobs of a micro-batch."""
        self.part_gap = torch.maximum(gap_N.max() * weight, self.part_gap.to(gap_N.device))
        self.gap = gap_N.sum() * weight + self.gap.to(gap_N.device)
        self.compared = gap_N.new_tensor(len(gap_N) * weight) + self.compared.to(gap_N.device)

    def compare_routing(self, share_N: Tensor, known_N: Tensor, weight: float) -> None:
        """Count the shares of experts that engine and trainer chose differently for the tokens of a
        micro-batch, which are 0 where the engine's are not known.
        """
        self.routing = share_N.sum() * weight + self.routing.to(share_N.device)
        self.routed = known_N.sum() * weight + self.routed.to(known_N.device)
        self.routable = self.routable + len(known_N) * weight

    def updated(self, loss: float, grad_norm: float, by_group: Mapping[str, float]) -> None:
        """Record that a minibatch has been trained on."""
        self.loss += loss
        self.grad_norm = max(self.grad_norm, grad_norm)
        self.grad_norms |= {
            name: max(norm, self.grad_norms.get(name, 0.0)) for name, norm in by_group.items()
        }
        self.part, self.part_gap = torch.zeros(()), torch.zeros(())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the wall time of the block to the phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
