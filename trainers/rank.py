"""One rank of a trainer, as a worker: it is told where the ranks meet, and then does what its core does."""

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Literal

from agentrl.arrays import FloatArray
from agentrl.cluster.workers import own_address
from agentrl.errors import AgentRLError
from agentrl.placement.time_share import free_on_cpu, free_on_gpus
from agentrl.protocols import Loss
from agentrl.trainers.batch_shards import BatchShard
from agentrl.trainers.settings import TrainerSettings
from agentrl.weights.bundle import BundlePlace

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.trainers.core import TrainerCore


Head = Literal["policy", "value"]
"""What a model says of a token: its logprob, or the reward that is to be expected when all before it are there."""


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """What all ranks are made from. `core` is the "module:function" that makes a rank's `TrainerCore`; `head` says what
    the model is to say of a token.
    """

    core: str
    config: TrainerSettings
    origin: Path
    total_steps: int
    temperature: float
    head: Head = "policy"


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Where a rank stands among `world_size`; they meet at the `address`, "host:port" of rank 0."""

    rank: int
    world_size: int
    address: str


class TrainerRank:
    """The worker of a rank. `open` comes first."""

    def __init__(self, spec: TrainerSpec, rank: int) -> None:
        self._spec = spec
        self._rank = rank
        self._core: TrainerCore | None = None

    def address(self) -> str:
        """A free address of this machine."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{own_address()}:{probe.getsockname()[1]}"

    def open(self, world_size: int, address: str) -> None:
        """Meet the other ranks, load the model, make the optimizer."""
        make = resolve_name(self._spec.core)
        self._core = make(self._spec, RankInfo(self._rank, world_size, address))

    def close(self) -> None:
        """Leave the other ranks, and hold the model no longer. All have to."""
        core, self._core = self._core, None
        if core is not None:
            core.close()

    @property
    def core(self) -> "TrainerCore":
        """What computes here."""
        if self._core is None:
            raise AgentRLError("this rank of the trainer has not met the others yet: call open first")
        return self._core

    def step(self, shard: BatchShard, loss: Loss, normalizer: float, loss_tokens: int) -> Mapping[str, float]:
        """See `TrainerCore.step`."""
        return self.core.step(shard, loss, normalizer, loss_tokens)

    def predict(self, shard: BatchShard) -> list[FloatArray]:
        """See `TrainerCore.predict`; of all micro-batches of the shard."""
        return self.core.predict([micro_batch for part in shard for micro_batch in part])

    def weights(self) -> Mapping[str, "Tensor"]:
        """See `TrainerCore.weights`."""
        return self.core.weights()

    def write_weights(self, place: BundlePlace) -> "Mapping[str, Tensor]":
        """Publish the weights: all ranks gather them, the first one writes, where it can see the place.

        Returns the bundle, or the weights themselves, which are then written by the caller; of other ranks nothing.
        """
        weights = self.core.weights()
        if self._rank > 0:
            return {}
        return place.write(weights) if place.folder.parent.is_dir() else weights

    def save(self, folder: Path) -> None:
        """See `TrainerCore.save`."""
        self.core.save(folder)

    def load(self, folder: Path) -> None:
        """See `TrainerCore.load`."""
        self.core.load(folder)

    def sleep(self) -> None:
        """See `TrainerCore.sleep`."""
        self.core.sleep()

    def wake(self) -> None:
        """See `TrainerCore.wake`."""
        self.core.wake()

    def free(self) -> int:
        """Bytes that are free on this rank's device."""
        on_gpu = self.core.sharding.device.type == "cuda"
        return asyncio.run(free_on_gpus() if on_gpu else free_on_cpu())
