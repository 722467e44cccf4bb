"""The trainer of many ranks by FSDP2: weights, gradients and optimizer in equal parts on each."""

from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from agentrl.placement.footprint import TrainerLayout
from agentrl.trainers.group import GroupTrainer
from agentrl.trainers.settings import TrainerSettings


class FsdpTrainer(GroupTrainer):
    """PyTorch's `fully_shard` (FSDP2) over `world_size` ranks, each a worker of the cluster."""

    sharding: ClassVar[str] = "agentrl.trainers.fsdp_sharding:open_sharding"

    class Config(TrainerSettings):
        """Everything a trainer has, and how it is sharded."""

        world_size: int = Field(1, ge=1)
        """Ranks: one device each."""
        reshard_after_forward: bool = True
        """Give back the gathered weights of a layer after its forward pass, and gather them again for the backward
        pass (ZeRO 3); otherwise they are kept until then (ZeRO 2): faster, and more memory."""
        cpu_offload: bool = False
        """Keep the shards and the optimizer in the CPU's memory, where the devices are GPUs."""

        def layout(self) -> TrainerLayout:
            """See `TrainerSettings.layout`. Weights are cast before they are gathered."""
            return replace(
                super().layout(),
                precision=self.dtype,
                ranks=self.world_size,
                grows=True,
                shards=3,
                keeps_gathered=not self.reshard_after_forward,
                accumulates_whole=True,
                offload=self.cpu_offload,
            )

    @property
    def world_size(self) -> int:
        """Ranks."""
        return int(self.config.world_size)
