"""The experts of a model, divided over ranks, or computed for slices of the tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from agentrl.errors import ConfigError
from agentrl.models.routing import expert_modules
from agentrl.placement.footprint import Recompute
from agentrl.placement.mesh import Mesh
from agentrl.trainers.compute.experts import DividedExperts, ExpertGroup
from agentrl.trainers.compute.tensor import ExpertsOfSlices, TensorGroup


@dataclass(frozen=True, slots=True)
class ExpertShards:
    """The modules with a rank's experts, if these are sharded apart from their layer, and the names
    of their tensors: stacks of `ranks` equal parts of experts, of which this rank has number
    `rank`.
    """

    modules: tuple[nn.Module, ...] = ()
    names: frozenset[str] = frozenset()
    rank: int = 0
    ranks: int = 1


def check_experts(model: Any, mesh: Mesh, recompute: Recompute | None = None) -> None:
    """Refuse a model whose experts cannot be computed on such a mesh.

    Raises:
        ConfigError: experts are to be divided, and it has none, or their number cannot be divided;
            or they are not of transformers' common form; or only parts of layers are to be computed
            again.
    """
    found, kind = [module for _, module in expert_modules(model)], type(model).__name__
    ranks, setting = mesh.expert, "expert_parallel"
    where = f"trainer.expert_parallel={ranks} divides the experts of a layer over as many ranks"
    if ranks == 1:
        if mesh.tensor == 1 or not found:
            return
        setting = "tensor_parallel"
        where = (
            f"trainer.tensor_parallel={mesh.tensor} divides the tokens of a mixture's experts over"
            f" as many ranks"
        )
        if recompute == "selective":
            raise ConfigError(
                f"{where}, which shards them apart from their layer, and their gathering cannot be"
                " told from the products that activation_checkpointing=selective keeps: write full"
                " or none"
            )
    if not found:
        raise ConfigError(f"{where}, and {kind} has none: leave the setting out")
    for module in found:
        stacked = _stack_size(module)
        if stacked is None:
            raise ConfigError(
                f"{where}, and those of {kind} are not of the form that transformers computes by"
                f" `use_experts_implementation`: write trainer.{setting}=1"
            )
        if stacked % ranks:
            ways = ", ".join(str(n) for n in range(1, stacked + 1) if stacked % n == 0)
            raise ConfigError(f"{where}, and {kind} has {stacked}: write one of {ways}")


def divide_experts(
    model: Any, group: ExpertGroup | None, tensor: TensorGroup | None
) -> ExpertShards:
    """Leave a model that was made `on_meta` only this rank's experts, which then compute the tokens
    of all ranks of the group; all experts without one. Of ranks that have copies of the same
    tokens (`tensor`), each asks for the experts of a slice.
    """
    modules: Sequence[tuple[str, Any]] = expert_modules(model)
    if (group is None and tensor is None) or not modules:
        return ExpertShards()
    names = frozenset(
        f"{name}.{own}" for name, module in modules for own, _ in module.named_parameters()
    )
    for _, module in modules:
        if group is not None:
            _keep_own_experts(module, group)
        if tensor is not None:
            module.forward = ExpertsOfSlices(module.forward, tensor)
    kept = tuple(module for _, module in modules)
    return ExpertShards(kept, names, *((0, 1) if group is None else (group.rank, group.ranks)))


def _keep_own_experts(module: Any, group: ExpertGroup) -> None:
    """Leave a module its part of the experts."""
    count = module.num_experts // group.ranks
    for own, whole in list(module.named_parameters(recurse=False)):
        part = torch.empty(count, *whole.shape[1:], dtype=whole.dtype, device=whole.device)
        setattr(module, own, nn.Parameter(part, requires_grad=whole.requires_grad))
    module.num_experts = count
    module.forward = DividedExperts(module.forward, count, group)


def _stack_size(experts: Any) -> int | None:
    """The number of experts in a module that computes them as transformers' common functions do:
    all of its tensors are stacks of them. None for another module.
    """
    count = getattr(experts, "num_experts", None)
    of_common_form = hasattr(experts, "is_transposed") and hasattr(experts, "has_gate")
    tensors = [*experts.parameters(), *experts.buffers()]
    if not of_common_form or not tensors or any(len(one) != count for one in tensors):
        return None
    return len(tensors[0])
