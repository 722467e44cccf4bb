"""What a rank of a trainer computes: the same steps, whatever way the weights lie over the ranks.

A step goes minibatch by minibatch. For each: the old logprobs (before the first update they are the new ones),
micro-batches accumulated into the gradient of sum(token losses) / normalizer over all ranks, one update.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from agentrl.arrays import FloatArray
from agentrl.errors import TrainingError
from agentrl.protocols import Loss, LossTokens
from agentrl.trainers.batch_shards import BatchShard, MicroBatch
from agentrl.trainers.forward import DeviceMicroBatch, to_device
from agentrl.trainers.schedule import learning_rate
from agentrl.trainers.settings import TrainerSettings


class Sharding(Protocol):
    """How weights, gradients and optimizer lie over the ranks. All ranks make the same calls in the same order."""

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        ...

    def predict(self, rows: DeviceMicroBatch) -> Tensor:
        """What the model says of the loss tokens, shape N (see `Predictor`); differentiable where gradients are on."""
        ...

    def clear(self) -> None:
        """Forget all gradients."""
        ...

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add this rank's gradients of `loss`; after the `last` micro-batch, those of all ranks are summed."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, the same on each."""
        ...

    def max(self, value: Tensor) -> Tensor:
        """The largest of all ranks, the same on each."""
        ...

    def update(self, lr: float, largest: float | None) -> float:
        """One step of the optimizer, by gradients that are scaled down where their norm is above the `largest`.

        Returns the norm of the whole gradient before that, the same on each rank. Where it is not finite, no weight
        has been changed, and the gradients are forgotten.
        """
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """All weights by Hugging Face names, whole, on rank 0; of tied weights the first name only."""
        ...

    def save(self, folder: Path, step: int) -> None:
        """Write weights, optimizer and `step` into a folder."""
        ...

    def load(self, folder: Path) -> int:
        """Take up what `save` wrote; returns the step."""
        ...

    def sleep(self) -> None:
        """Move all that is held to the CPU's memory; gradients are forgotten. Weights can still be asked for."""
        ...

    def wake(self) -> None:
        """Move it back."""
        ...

    def close(self) -> None:
        """Leave the other ranks."""
        ...


@dataclass(slots=True)
class TrainerCore:
    """One rank of a trainer."""

    config: TrainerSettings
    total_steps: int
    sharding: Sharding
    steps_done: int = 0

    def step(self, shard: BatchShard, loss: Loss, normalizer: float, loss_tokens: int) -> Mapping[str, float]:
        """One pass over this rank's shard. The metrics are of all ranks, but for the seconds, which are this one's."""
        lr = learning_rate(self.config, self.steps_done, self.total_steps)
        tally = _Tally()
        # Nothing is updated before the first minibatch: its logprobs are the old ones themselves.
        olds: list[list[Tensor | None]] = [
            [None for _ in shard[0]],
            *(self._old_logprobs(micro_batches, tally) for micro_batches in shard[1:]),
        ]
        for micro_batches, old in zip(shard, olds, strict=True):
            # Each minibatch is divided by an equal share, so a token weighs the same in whichever it falls.
            self._accumulate(micro_batches, old, loss, normalizer / len(shard), tally)
            self._update(lr, tally)
        self.steps_done += 1
        return {
            "loss": tally.loss / len(shard),
            "grad_norm": tally.grad_norm,
            "lr": lr,
            "loss_tokens": float(loss_tokens),
            **self._means(tally, loss_tokens),
            "logprob_gap_max": tally.gap_max,
            **{f"seconds_{phase}": seconds for phase, seconds in tally.seconds.items()},
        }

    def predict(self, micro_batches: Sequence[MicroBatch]) -> list[FloatArray]:
        """What the model says of the loss tokens of each micro_batch. Nothing is kept for a backward pass."""
        with torch.no_grad():
            predictions = [self.sharding.predict(to_device(p.rows, self.sharding.device)) for p in micro_batches]
        return [numbers_N.float().cpu().numpy() for numbers_N in predictions]

    def weights(self) -> Mapping[str, Tensor]:
        """See `Sharding.weights`."""
        return self.sharding.weights()

    def save(self, folder: Path) -> None:
        """See `Sharding.save`."""
        self.sharding.save(folder, self.steps_done)

    def load(self, folder: Path) -> None:
        """See `Sharding.load`."""
        self.steps_done = self.sharding.load(folder)

    def sleep(self) -> None:
        """See `Sharding.sleep`."""
        self.sharding.sleep()

    def wake(self) -> None:
        """See `Sharding.wake`."""
        self.sharding.wake()

    def close(self) -> None:
        """See `Sharding.close`."""
        self.sharding.close()

    def _old_logprobs(self, micro_batches: Sequence[MicroBatch], tally: "_Tally") -> list[Tensor | None]:
        """The trainer's logprobs before the first update on this batch."""
        with tally.phase("old_logprobs"), torch.no_grad():
            return [self.sharding.predict(to_device(p.rows, self.sharding.device)) for p in micro_batches]

    def _accumulate(
        self,
        micro_batches: Sequence[MicroBatch],
        old: list[Tensor | None],
        loss: Loss,
        normalizer: float,
        tally: "_Tally",
    ) -> None:
        """Sum the gradients of a minibatch: those of sum(token losses) / normalizer, however it is cut and sharded."""
        with tally.phase("forward_backward"):
            self.sharding.clear()
            for i, (micro_batch, old_N) in enumerate(zip(micro_batches, old, strict=True)):
                rows = to_device(micro_batch.rows, self.sharding.device)
                logprobs_N = self.sharding.predict(rows)
                before_N = logprobs_N.detach() if old_N is None else old_N
                tokens = LossTokens(
                    before_N,
                    rows.rollout_logprobs_N,
                    rows.reference_logprobs_N,
                    rows.advantages_N,
                    rows.segments_N,
                )
                output = loss(logprobs_N, tokens)
                weight = float(micro_batch.counts)
                part = output.loss_N.sum() / normalizer * weight
                # Times one; a loss that is not finite gets a gradient that is not either, which no update takes.
                self.sharding.backward(part * (1 + 0 * part.detach()), last=i == len(micro_batches) - 1)
                tally.add(part.detach(), output.metrics, (before_N - rows.rollout_logprobs_N).abs(), weight)

    def _update(self, lr: float, tally: "_Tally") -> None:
        with tally.phase("optimizer"):
            loss = float(self.sharding.sum(tally.part))
            tally.gap_max = max(tally.gap_max, float(self.sharding.max(tally.part_gap)))
            grad_norm = self.sharding.update(lr, self.config.max_grad_norm)
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                raise TrainingError(
                    f"step {self.steps_done}: the loss is {loss} and the gradient norm {grad_norm}; the weights were "
                    f"left as they were (largest gap between engine and trainer: {tally.gap_max:.3g} nats)"
                )
            tally.updated(loss, grad_norm)

    def _means(self, tally: "_Tally", loss_tokens: int) -> dict[str, float]:
        """Each metric per loss token of all ranks."""
        names = sorted(tally.sums)
        sums = self.sharding.sum(torch.stack([tally.sums[name] for name in names]))
        return {name: float(total) / loss_tokens for name, total in zip(names, sums, strict=True)}


@dataclass(slots=True)
class _Tally:
    """Sums of a step. `part` and `part_gap` are of this rank and the minibatch in hand, on the device."""

    part: Tensor = field(default_factory=lambda: torch.zeros(()))
    part_gap: Tensor = field(default_factory=lambda: torch.zeros(()))
    sums: dict[str, Tensor] = field(default_factory=dict)
    loss: float = 0.0
    gap_max: float = 0.0
    grad_norm: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, part: Tensor, metrics: Mapping[str, Tensor], gap_N: Tensor, weight: float) -> None:
        """Count one micro-batch."""
        self.part = part + self.part.to(part.device)
        self.part_gap = torch.maximum(gap_N.max() * weight, self.part_gap.to(gap_N.device))
        for name, values_N in {**metrics, "logprob_gap_mean": gap_N}.items():
            self.sums[name] = values_N.detach().sum() * weight + self.sums.get(name, 0.0)

    def updated(self, loss: float, grad_norm: float) -> None:
        """A minibatch has been trained on."""
        self.loss += loss
        self.grad_norm = max(self.grad_norm, grad_norm)
        self.part, self.part_gap = torch.zeros(()), torch.zeros(())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the wall time of what happens inside."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
