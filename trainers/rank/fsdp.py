"""The torch code of a rank of `FsdpTrainer`."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from agentrl.placement.mesh import Mesh
from agentrl.protocols.weight_source import in_format
from agentrl.trainers.compute.context import ContextGroup, check_heads
from agentrl.trainers.compute.forward import DeviceMicroBatch
from agentrl.trainers.compute.fp8 import use_fp8
from agentrl.trainers.compute.recomputation import blocks_of
from agentrl.trainers.rank.checkpoint import Moments
from agentrl.trainers.rank.expert_shards import ExpertShards, check_experts, divide_experts
from agentrl.trainers.rank.gradient_norms import squares
from agentrl.trainers.rank.host_buffers import HostBuffers
from agentrl.trainers.rank.mesh_groups import MeshGroups
from agentrl.trainers.rank.model import (
    Predictor,
    begin,
    check_context_parallel,
    in_bfloat16,
    make_model,
)
from agentrl.trainers.rank.optimizer import (
    adamw,
    apply,
    check_moments,
    make_state,
    moments_of,
    set_moments,
)
from agentrl.trainers.rank.process_group import (
    RowLayout,
    broadcast,
    gather_rows,
    join,
    max_of_ranks,
    sum_of_ranks,
)
from agentrl.trainers.rank.tensor_files import Part
from agentrl.trainers.rank.tensor_shards import TensorShards, check_matrices, divide_matrices
from agentrl.trainers.rank.trainable import TrainableParameters, model_tensors, trainable_tensors
from agentrl.trainers.spec import RankInfo, TrainerSpec

if TYPE_CHECKING:
    from agentrl.trainers.fsdp import FsdpTrainer


def open_sharding(spec: TrainerSpec, rank_info: RankInfo) -> "FullyShard":
    """Make the model, shard it before it has any memory, read the shards, make the optimizer."""
    config: FsdpTrainer.Config = spec.config
    model, trainable, origin = make_model(spec)
    text = model.model.config.get_text_config()
    mesh = rank_info.mesh
    check_matrices(model.model, mesh.tensor)
    check_heads(text.num_attention_heads // mesh.tensor, mesh.context, type(model.model).__name__)
    check_experts(model.model, mesh, config.activation_checkpointing)
    device = join(rank_info)
    groups = MeshGroups.of(mesh, rank_info.rank, device)
    experts = divide_experts(model.model, groups.expert, groups.tensor)
    matrices = divide_matrices(model.model, groups.tensor)
    model.tensor = groups.tensor
    if config.fp8:
        use_fp8(model.model, device)
    _shard(model, config, device, groups, experts)
    home = torch.device("cpu") if config.optimizer_offload else device
    _take_memory(model, home, device)
    sharding = FullyShard(
        rank_info.rank,
        groups,
        device,
        home,
        model,
        trainable,
        adamw(model, config),
        config.keep_gradients,
        experts,
        matrices,
    )
    begin(sharding, origin)
    return sharding


def _shard(
    model: Predictor,
    config: "FsdpTrainer.Config",
    device: torch.device,
    groups: MeshGroups,
    experts: ExpertShards,
) -> None:
    """Shard each block of the model alone, and the rest (embeddings, head) together, so that tied
    weights stay tied. Experts that are sharded apart are so over the ranks that have the same ones.
    """
    low = in_bfloat16(config, device)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if low else None, reduce_dtype=torch.float32 if low else None
    )
    options: dict[str, Any] = {
        "mesh": groups.weights,
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type != "cpu")
        if config.optimizer_offload
        else OffloadPolicy(),
        "reshard_after_forward": config.reshard_after_forward,
    }
    for of_layer in experts.modules:
        # The router's weights of experts stay as precise as it made them.
        own = {"mesh": groups.experts, "mp_policy": replace(policy, cast_forward_inputs=False)}
        fully_shard(of_layer, **{**options, **own})
    for block in blocks_of(model.model):
        # A frozen tower has no backward pass, for which its blocks could stay.
        trains = any(parameter.requires_grad for parameter in block.parameters())
        own = {} if trains or config.lora else {"reshard_after_forward": True}
        fully_shard(block, **{**options, **own})
    # The backward pass begins with the head: what is outside of blocks stays until then.
    fully_shard(model, **{**options, "reshard_after_forward": False})
    for module in _fsdp_modules(model):
        # The gradients of the ranks are summed, not averaged.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _take_memory(model: Predictor, home: torch.device, device: torch.device) -> None:
    """Give the shards memory on `home`, without values, and move the buffers, which have theirs, to
    the device.
    """
    buffers = [
        (owner, name, one)
        for owner in model.modules()
        for name, one in owner.named_buffers(recurse=False)
    ]
    model.to_empty(device=home)
    for owner, name, buffer in buffers:
        setattr(owner, name, buffer.to(device))


def _fsdp_modules(model: Predictor) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _reshard(model: Predictor) -> None:
    for module in _fsdp_modules(model):
        module.reshard()


@dataclass(frozen=True, slots=True)
class FullyShard:
    """`Sharding` with FSDP2. `home`: the device of its shards while it is awake."""

    rank: int
    groups: MeshGroups
    device: torch.device
    home: torch.device
    model: Predictor
    trainable: TrainableParameters
    optimizer: torch.optim.Optimizer
    keep_gradients: bool
    experts: ExpertShards
    matrices: TensorShards
    host: HostBuffers = field(default_factory=HostBuffers)

    @property
    def mesh(self) -> Mesh:
        """See `Sharding`."""
        return self.groups.mesh

    @property
    def context(self) -> ContextGroup | None:
        """See `Sharding`."""
        return self.groups.context

    def prepare(self) -> None:
        """See `Sharding`."""
        with torch.no_grad():
            self.model(None)
        _reshard(self.model)
        if self.context is not None:
            check_context_parallel(self.model.model, self.predict, self.device, self.context)

    def predict(self, samples: DeviceMicroBatch, *, entropy: bool = False) -> Tensor:
        """See `Sharding`."""
        predicted: Tensor = self.model(samples, entropy=entropy)
        if not torch.is_grad_enabled():  # otherwise the backward pass frees the gathered weights
            _reshard(self.model)
        return predicted

    def clear(self) -> None:
        """See `Sharding`."""
        self.optimizer.zero_grad(set_to_none=True)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """See `Sharding`. Gradients are summed over a replica's ranks after each micro-batch, or
        after the last one; and over the replicas, and the ranks that have copies of what is not
        divided, after the last one.
        """
        root = self.model
        assert isinstance(root, FSDPModule)  # `fully_shard` has made it one
        root.set_requires_gradient_sync(last or not self.keep_gradients)
        root.set_requires_all_reduce(last)
        loss.backward()  # type: ignore[no-untyped-call]
        if last:
            self._sum_copies()

    def sum(self, values: Tensor) -> Tensor:
        """See `Sharding`."""
        return sum_of_ranks(values)

    def max(self, value: Tensor) -> Tensor:
        """See `Sharding`."""
        return max_of_ranks(value)

    def gradient_squares(self) -> Mapping[str, Tensor]:
        """See `Sharding`. What several ranks have counts on the first of them."""
        own: dict[str, Tensor | None] = {}
        tensor = self.groups.tensor
        is_first = tensor is None or tensor.rank == 0
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                counts = self.groups.replica == 0 and (is_first or not self._is_copied(name))
                own[name] = gradient.to_local() if counts else None
            elif parameter.requires_grad:
                own[name] = gradient if self.rank == 0 else None
        return squares(own, self.device)

    def update(self, lr: float, largest: float | None) -> float:
        """See `Sharding`."""
        own = torch.stack(list(self.gradient_squares().values()))
        norm = math.sqrt(float(self.sum(own.sum())))
        apply(self.optimizer, norm, lr, largest)
        return norm

    def gather_all(self, *, everywhere: bool = False) -> Mapping[str, Tensor]:
        """See `Sharding`."""
        whole: dict[str, Tensor] = {}
        # One at a time, so that a device holds one whole tensor and not the whole model.
        to = range(self.mesh.world_size) if everywhere else (0,)
        for name in trainable_tensors(self.trainable):
            gathered = self.gather((name,), to, None)
            whole |= {name: tensor.cpu() for name, tensor in gathered.items()}
        return whole

    def gather(
        self, names: Sequence[str], to: Collection[int], dtype: torch.dtype | None
    ) -> Mapping[str, Tensor]:
        """See `Sharding`. Shards are converted before they are sent, and stay in their replica."""
        tensors = model_tensors(self.trainable.model)
        whole: dict[str, Tensor] = {}
        for name in names:
            tensor = tensors[name].detach()
            if isinstance(tensor, DTensor):
                local = in_format(tensor.to_local(), dtype)
                layout = self._layout(name, tensor)
                found = gather_rows(local, layout, to, self.groups.shards)
                whole |= {} if found is None else {name: found}
            elif self.rank in to:
                whole[name] = in_format(tensor, dtype)
        return whole

    def broadcast(self, tensor: Tensor) -> Tensor:
        """See `Sharding`."""
        return broadcast(tensor)

    def local_parts(self, names: Iterable[str]) -> Mapping[str, Part]:
        """See `Sharding`."""
        tensors = model_tensors(self.trainable.model)
        return {name: self._part(name, tensors[name]) for name in names}

    def after_load(self) -> None:
        """See `Sharding`. Nothing depends on the weights."""

    def moments(self) -> Moments:
        """See `Sharding`."""
        return moments_of(self.optimizer, trainable_tensors(self.trainable), self._part)

    def new_moments(self, names: Sequence[str]) -> Moments:
        """See `Sharding`."""
        make_state(self.optimizer)
        return check_moments(self.moments(), names)

    def set_moments(self, moments: Moments) -> None:
        """See `Sharding`."""
        set_moments(self.optimizer, trainable_tensors(self.trainable), moments)

    def sleep(self) -> None:
        """See `Sharding`."""
        self.clear()
        _reshard(self.model)
        if self.home.type != "cpu":
            self.host.sleep(self.model, self.optimizer)

    def wake(self) -> None:
        """See `Sharding`."""
        if self.home.type != "cpu":
            self.host.wake(self.model, self.optimizer, self.home)

    def close(self) -> None:
        """See `Sharding`."""
        dist.destroy_process_group()

    def _is_copied(self, name: str) -> bool:
        of_model = name.removeprefix("model.")
        return of_model not in self.experts.names and self.matrices.is_copied(of_model)

    def _sum_copies(self) -> None:
        """Sum the gradients of what each rank of a tensor group has."""
        if self.groups.tensor is None:
            return
        shares = [
            parameter.grad.to_local()
            for name, parameter in self.model.named_parameters()
            if self._is_copied(name) and isinstance(parameter.grad, DTensor)
        ]
        if not shares:
            return
        # Offloaded ones are in the memory of the host.
        flat = torch.cat([share.flatten() for share in shares]).to(self.device)
        dist.all_reduce(flat, group=self.groups.tensor.group)
        totals = torch.split(flat, [share.numel() for share in shares])
        for share, total in zip(shares, totals, strict=True):
            share.copy_(total.view_as(share))

    def _part(self, name: str, tensor: Tensor) -> Part:
        if not isinstance(tensor, DTensor):
            return Part(tensor.shape, 0, tensor.detach(), self.rank, self.mesh.world_size)
        own, groups = tensor.to_local().detach(), self.groups
        layout = self._layout(name, tensor)
        return layout.part(groups.shard, own, groups.replica, self.mesh.replicate)

    def _layout(self, name: str, tensor: Tensor) -> RowLayout:
        """Which rows, or columns of rows, of a tensor the ranks of a replica have."""
        rows, *others = tensor.shape
        ranks, matrices = self.groups.shards.size(), self.matrices
        if name in matrices.columns:
            columns = torch.Size((rows, others[0] * matrices.ranks))
            return RowLayout(columns, ranks, columns=matrices.ranks)
        is_expert = name in self.experts.names
        if not is_expert and matrices.is_copied(name):
            return RowLayout(tensor.shape, ranks, copies=matrices.ranks)
        stacks = self.experts.ranks if is_expert else matrices.ranks
        return RowLayout(torch.Size((rows * stacks, *others)), ranks, stacks)
