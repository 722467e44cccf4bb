"""The trainer for many ranks with DeepSpeed's ZeRO."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from agentrl.package.distribution import install_command
from agentrl.placement.footprint import GRADIENTS_AT_ONCE, TrainerLayout
from agentrl.placement.mesh import Mesh
from agentrl.trainers.group import GroupTrainer
from agentrl.trainers.settings import TrainerSettings


class DeepSpeedTrainer(GroupTrainer):
    """DeepSpeed on `world_size` ranks, each a cluster's worker. Needs the extra `deepspeed`."""

    sharding: ClassVar[str] = "agentrl.trainers.rank.zero:open_sharding"
    joins_a_group: ClassVar[bool] = True

    class Config(TrainerSettings):
        """The settings of every trainer, and how this one is sharded."""

        sees: ClassVar[bool] = False
        world_size: int = Field(1, ge=1)
        """Number of ranks, with one device each."""
        zero_stage: Literal[1, 2, 3] = 2
        """What is sharded: the optimizer (1), also the gradients (2), also the weights (3);
        arXiv:1910.02054.
        """
        offload: bool = False
        """Keep the optimizer (and with stage 3 the weights) in CPU memory, if the devices are GPUs.
        """

        @model_validator(mode="after")
        def _check_deepspeed(self) -> Self:
            if self.moments != "float32":
                raise ValueError(
                    "DeepSpeed keeps the moments of many parameters as one float32 tensor, so it"
                    f" has no moments of {self.moments}: write trainer: fsdp (or local), or"
                    " moments: float32"
                )
            if self.compile:
                raise ValueError(
                    "DeepSpeed has hooks inside of layers, with which compile has not been tried:"
                    " write trainer: fsdp (or local), or leave compile out"
                )
            if self.fp8:
                raise ValueError(
                    "DeepSpeed has hooks in linear layers, which fp8 replaces: write trainer: fsdp"
                    " (or local), or leave fp8 out"
                )
            if self.zero_stage == 3 and self.activation_checkpointing == "selective":
                raise ValueError(
                    "ZeRO 3 gathers weights inside of a layer, and not the same ones when the layer"
                    " is computed again, so torch cannot tell what selective recomputation has"
                    " kept: write activation_checkpointing: full (or none), zero_stage: 2, or"
                    " trainer: fsdp"
                )
            return self

        def needs(self) -> Mapping[str, str]:
            """See `Settings`."""
            return {**super().needs(), "deepspeed": install_command("deepspeed")}

        def layout(self) -> TrainerLayout:
            """See `TrainerSettings.layout`. DeepSpeed updates a copy of the weights, also of
            float32 ones, and adds up the gradients of all ranks in a buffer.
            """
            return replace(
                super().layout(),
                mesh=Mesh(shard=self.world_size),
                grows=True,
                shards=self.zero_stage,
                offload=self.offload,
                copies_weights=True,
                gradients_at_once=GRADIENTS_AT_ONCE,
                sleeps=False,
            )

    @property
    def mesh(self) -> Mesh:
        """See `GroupTrainer`: all ranks shard one copy of the model."""
        return Mesh(shard=self.config.world_size)
