"""The experts of a model, divided over ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from agentrl.errors import ConfigError
from agentrl.models.routing import expert_modules
from agentrl.trainers.compute.experts import DividedExperts, ExpertGroup


@dataclass(frozen=True, slots=True)
class ExpertShards:
    """The modules with a rank's experts, and the names of their tensors: stacks of `ranks` equal
    parts of experts, of which this rank has number `rank`.
    """

    modules: tuple[nn.Module, ...] = ()
    names: frozenset[str] = frozenset()
    rank: int = 0
    ranks: int = 1


def check_experts(model: Any, ranks: int) -> None:
    """Refuse a model whose experts cannot be divided over so many ranks.

    Raises:
        ConfigError: it has none, or not of transformers' common form, or their number cannot be
            divided.
    """
    if ranks == 1:
        return
    found, kind = [module for _, module in expert_modules(model)], type(model).__name__
    where = f"trainer.expert_parallel={ranks} divides the experts of a layer over as many ranks"
    if not found:
        raise ConfigError(f"{where}, and {kind} has none: leave the setting out")
    for module in found:
        stacked = _stacked(module)
        if stacked is None:
            raise ConfigError(
                f"{where}, and those of {kind} are not of the form that transformers computes by"
                f" `use_experts_implementation`: write trainer.expert_parallel=1"
            )
        if stacked % ranks:
            ways = ", ".join(str(n) for n in range(1, stacked + 1) if stacked % n == 0)
            raise ConfigError(f"{where}, and {kind} has {stacked}: write one of {ways}")


def divide_experts(model: Any, group: ExpertGroup | None) -> ExpertShards:
    """Leave a model that was made `on_meta` only this rank's experts, which then compute the tokens
    of all ranks of the group.
    """
    if group is None:
        return ExpertShards()
    names: list[str] = []
    modules: Sequence[tuple[str, Any]] = expert_modules(model)
    for name, module in modules:
        count = module.num_experts // group.ranks
        for own, whole in list(module.named_parameters(recurse=False)):
            part = torch.empty(count, *whole.shape[1:], dtype=whole.dtype, device=whole.device)
            setattr(module, own, nn.Parameter(part, requires_grad=whole.requires_grad))
            names.append(f"{name}.{own}")
        module.num_experts = count
        module.forward = DividedExperts(module.forward, count, group)
    return ExpertShards(
        tuple(module for _, module in modules), frozenset(names), group.rank, group.ranks
    )


def _stacked(experts: Any) -> int | None:
    """The number of experts in a module that computes them as transformers' common functions do:
    all of its tensors are stacks of them. None for another module.
    """
    count = getattr(experts, "num_experts", None)
    of_common_form = hasattr(experts, "is_transposed") and hasattr(experts, "has_gate")
    tensors = [*experts.parameters(), *experts.buffers()]
    if not of_common_form or not tensors or any(len(one) != count for one in tensors):
        return None
    return len(tensors[0])
