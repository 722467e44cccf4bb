"""AdamW, its step, and its state by the names of parameters."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.errors import CheckpointError
from agentrl.trainers.rank import low_precision
from agentrl.trainers.rank.checkpoint import Moments
from agentrl.trainers.rank.tensor_files import Part
from agentrl.trainers.settings import TrainerSettings


def adamw(module: nn.Module, settings: TrainerSettings) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters. Matrices decay, norms and biases do not.

    Its fused kernel takes each parameter once, on CPUs, GPUs and over shards. Others keep results
    between their steps, which together are as large as the parameters.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if _is_matrix(p)], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if not _is_matrix(p)], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    options: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps}
    if settings.moments == "float32":
        return torch.optim.AdamW(groups, **options, fused=True)
    return low_precision.LowPrecisionAdamW(groups, getattr(torch, settings.moments), **options)


def _is_matrix(parameter: Any) -> bool:
    # ZeRO 3 leaves an empty vector of a parameter.
    return len(getattr(parameter, "ds_shape", parameter.shape)) >= 2


def apply(optimizer: torch.optim.Optimizer, norm: float, lr: float, largest: float | None) -> None:
    """One step, with gradients of norm `norm` scaled down to `largest` if they exceed it.

    If the norm is not finite, no weight changes, and the gradients are dropped.
    """
    if not math.isfinite(norm):
        optimizer.zero_grad(set_to_none=True)
        return
    # 1e-6 as in torch's `clip_grad_norm_`, so that other trainers scale alike.
    scale = 1.0 if largest is None else min(1.0, largest / (norm + 1e-6))
    for group in optimizer.param_groups:
        group["lr"] = lr
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
    optimizer.step()


def moments_of(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, Tensor],
    part: Callable[[str, Tensor], Part],
) -> Moments:
    """The moments and the updates of each parameter; none of parameters without an update.

    `part`: of the parameter with this name, the part that a tensor of its shape is. Moments that
    are kept in codes are copies; `set_moments` writes them back.
    """
    parts: dict[str, dict[str, Part]] = {}
    updates: dict[str, float] = {}
    for name, parameter in parameters.items():
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if not value.ndim:  # AdamW's `step`
                updates[name] = float(value)
            elif key + low_precision.SCALE in state:
                decoded = low_precision.whole(state, key)
                parts.setdefault(key, {})[name] = replace(
                    part(name, parameter), values=decoded, copied=True
                )
            elif not key.endswith(low_precision.SCALE):
                parts.setdefault(key, {})[name] = part(name, value)
    return Moments(parts, updates)


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state of an optimizer without an update: by one that changes nothing."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def set_moments(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], moments: Moments
) -> None:
    """Set the moments of `moments_of`, after they have been filled, and how many updates each
    parameter has had.
    """
    for name, parameter in parameters.items():
        state = optimizer.state[parameter]
        for key, value in state.items():
            if not value.ndim:
                value.fill_(moments.updates.get(name, 0.0))
            elif key + low_precision.SCALE in state:
                low_precision.set_whole(state, key, moments.parts[key][name].values)


def check_moments(moments: Moments, names: Sequence[str]) -> Moments:
    """The moments, if they have these names.

    Raises:
        CheckpointError: they have others.
    """
    if moments.parts.keys() != set(names):
        raise CheckpointError(
            f"the checkpoint has the moments {', '.join(sorted(names))}, and this optimizer"
            f" {', '.join(sorted(moments.parts))}: resume with the trainer settings that it was"
            " saved with"
        )
    return moments
