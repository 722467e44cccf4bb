"""The trainer for many ranks with FSDP2: each rank of a replica has an equal part of weights,
gradients and optimizer.
"""

from dataclasses import replace
from typing import ClassVar, Self

from pydantic import Field, model_validator

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
        replicas: int = Field(1, ge=1)
        """Copies of the model, each sharded over an equal number of neighbouring ranks, which
        compute other samples. With as many as there are machines, weights are gathered inside of a
        machine, and between machines gradients are summed, once for each update. Divides
        `world_size`; each rank has a larger part of the model then."""
        context_parallel: int = Field(1, ge=1)
        """Neighbouring ranks that compute the same samples, each a slice of the tokens, and
        exchange heads for attention: for samples whose activations are too large for one rank.
        Divides `world_size / replicas` and the model's attention heads; weights stay divided over
        all ranks of a replica."""
        tensor_parallel: int = Field(1, ge=1)
        """Neighbouring ranks over which each matrix of a model is divided, except those of experts,
        and which compute the same samples together: for layers that are too large for one rank, or
        take longer to gather than to compute. In each layer they sum the hidden states of all
        tokens, so they belong inside of one machine. Divides
        `world_size / replicas / context_parallel`, the heads of keys, the layers' hidden units and
        the vocabulary. Of the experts of a mixture each rank computes a slice of the tokens; let
        `expert_parallel` be a multiple of this number, so that no rank gathers them all."""
        expert_parallel: int = Field(1, ge=1)
        """Of a mixture of experts: neighbouring ranks over which the experts of a layer are
        divided. Tokens go to the ranks that have their experts, and only these ranks gather the
        experts' weights. The ranks compute samples of their own, or slices of them. Divides
        `world_size / replicas` and the number of experts. Not with selective recomputation."""
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

        @model_validator(mode="after")
        def _check_mesh(self) -> Self:
            group = self.context_parallel * self.tensor_parallel
            each = self.replicas * group
            if self.world_size % each:
                more = each * (self.world_size // each + 1)
                raise ValueError(
                    f"{self.world_size} ranks (world_size) cannot be divided equally into"
                    f" {self.replicas} replicas (replicas) of groups of {group} (context_parallel"
                    f" x tensor_parallel): write world_size: {more}, or other numbers of these"
                )
            if self.compile and self.tensor_parallel > 1:
                raise ValueError(
                    "compile makes one program of a layer, and the ranks of tensor_parallel"
                    " exchange hidden states inside of it: leave one of them out"
                )
            if self.fp8 and self.tensor_parallel > 1:
                raise ValueError(
                    "fp8 replaces linear layers, which tensor_parallel cuts: leave one of them out"
                )
            of_replica = self.world_size // self.replicas
            if of_replica % self.expert_parallel:
                ways = ", ".join(str(n) for n in range(1, of_replica + 1) if of_replica % n == 0)
                raise ValueError(
                    f"the {of_replica} ranks of a replica (world_size, replicas) cannot be divided"
                    f" equally into groups of {self.expert_parallel} (expert_parallel): write one"
                    f" of {ways}"
                )
            if self.expert_parallel > 1 and self.activation_checkpointing == "selective":
                raise ValueError(
                    "expert_parallel shards experts inside of a layer, whose gathering cannot be"
                    " told from the products that activation_checkpointing: selective keeps: write"
                    " full or none"
                )
            return self

        @property
        def mesh(self) -> Mesh:
            """The grid of the ranks."""
            context, tensor = self.context_parallel, self.tensor_parallel
            shard = self.world_size // self.replicas // context // tensor
            return Mesh(self.replicas, shard, context, tensor, self.expert_parallel)

        @property
        def ranks_of_a_sample(self) -> int:
            """See `TrainerSettings`."""
            return self.context_parallel

        def layout(self) -> TrainerLayout:
            """See `TrainerSettings.layout`. Weights are cast before they are gathered."""
            return replace(
                super().layout(),
                precision=self.dtype or "float32",
                mesh=self.mesh,
                grows=True,
                shards=3,
                sums_blocks=True,
                keeps_gathered=not self.reshard_after_forward,
                accumulates_whole=self.keep_gradients,
                offload=self.optimizer_offload,
            )

    @property
    def mesh(self) -> Mesh:
        """See `GroupTrainer`."""
        mesh: Mesh = self.config.mesh
        return mesh
