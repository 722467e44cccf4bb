"""AdamW, and one step of it."""

import math
from typing import Any

import torch
from torch import nn

from agentrl.trainers.settings import TrainerSettings


def adamw(module: nn.Module, settings: TrainerSettings, **kernel: bool) -> torch.optim.AdamW:
    """AdamW over what trains: matrices decay, norms and biases do not. `kernel` says how torch computes it."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, **kernel)


def move(module: nn.Module, optimizer: torch.optim.AdamW, device: torch.device) -> None:
    """Weights and moments to another device, without gradients. Counters of steps stay where the kernel has them."""
    optimizer.zero_grad(set_to_none=True)
    module.to(device)
    for state in optimizer.state.values():
        state.update({name: value.to(device) for name, value in state.items() if value.ndim})
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what is free is for who shares the device


def apply(optimizer: torch.optim.AdamW, norm: float, lr: float, largest: float | None) -> None:
    """One step, by gradients of this norm that are scaled down to the `largest`. A norm that is not finite changes no
    weight, and the gradients are forgotten.
    """
    if not math.isfinite(norm):
        optimizer.zero_grad(set_to_none=True)
        return
    scale = 1.0 if largest is None else min(1.0, largest / (norm + 1e-6))
    for group in optimizer.param_groups:
        group["lr"] = lr
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
    optimizer.step()
