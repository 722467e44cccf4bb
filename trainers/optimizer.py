"""AdamW and its step."""

import math
from typing import Any

import torch
from torch import nn

from agentrl.trainers.settings import TrainerSettings


def adamw(module: nn.Module, settings: TrainerSettings) -> torch.optim.AdamW:
    """AdamW over the trainable parameters. Matrices decay, norms and biases do not.

    Its fused kernel takes each parameter once, on CPUs, GPUs and over shards. Others keep results between their steps,
    which together are as large as the parameters.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)


def move(module: nn.Module, optimizer: torch.optim.AdamW, device: torch.device) -> None:
    """Move weights and moments to another device; drop gradients. Step counters stay where the kernel keeps them."""
    optimizer.zero_grad(set_to_none=True)
    module.to(device)
    for state in optimizer.state.values():
        state.update({name: value.to(device) for name, value in state.items() if value.ndim})
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # others on the device can use the memory


def apply(optimizer: torch.optim.AdamW, norm: float, lr: float, largest: float | None) -> None:
    """One step, with gradients of norm `norm` scaled down to `largest` if they exceed it.

    If the norm is not finite, no weight changes, and the gradients are dropped.
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
