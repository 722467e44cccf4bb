"""The trainer for many ranks with FSDP2: each rank has an equal part of weights, gradients and
optimizer.
"""

from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from agentrl.placement.footprint import TrainerLayout
from agentrl.placement.mesh import Mesh
from agentrl.trainers.group import GroupTrainer
from agentrl.trainers.settings import TrainerSettings


class FsdpTrainer(GroupTrainer):
    """PyTorch's `fully_shard` (FSDP2) on `world_size` ranks, each a worker of the cluster."""

    sharding: ClassVar[str] = "agentrl.trainers.rank.fsdp:open_sharding"
    joins_a_group: ClassVar[bool] = True

    class Config(TrainerSettings):
        """The settings of every trainer, and how this one is sharded."""

        world_size: int = Field(1, ge=1)
        """Number of ranks, with one device each."""
        reshard_after_forward: bool = True
        """Free a layer's gathered weights after its forward pass, and gather them again for the
        backward pass (ZeRO 3). Otherwise keep them until then (ZeRO 2), which is faster but takes
        more memory."""
        keep_gradients: bool = False
        """Keep the gradients of all weights whole on each rank until the last micro-batch, and sum
        them over the ranks once: less traffic, for 4 bytes of memory for each parameter. Otherwise
        each micro-batch's are summed at once, and each rank keeps its part."""
        optimizer_offload: bool = False
        """Keep the shards of weights, gradients and moments in CPU memory, and update the weights
        there, if the devices are GPUs."""

        def layout(self) -> TrainerLayout:
            """See `TrainerSettings.layout`. Weights are cast before they are gathered."""
            return replace(
                super().layout(),
                precision=self.dtype or "float32",
                mesh=Mesh(shard=self.world_size),
                grows=True,
                shards=3,
                sums_blocks=True,
                keeps_gathered=not self.reshard_after_forward,
                accumulates_whole=self.keep_gradients,
                offload=self.optimizer_offload,
            )

    @property
    def mesh(self) -> Mesh:
        """See `GroupTrainer`: all ranks shard one copy of the model."""
        return Mesh(shard=self.config.world_size)
