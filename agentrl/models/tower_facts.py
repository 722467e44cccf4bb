"""What the tower and the projector of a model that sees keep for their backward pass."""

from typing import Any

from agentrl.models.vision import part_of
from agentrl.models.vision_families import FAMILIES

_SHARED = ("k_proj", "v_proj")
"""Matrices whose input is that of `q_proj`."""


def kept_of_tower(model: Any) -> int:
    """The numbers that autograd keeps for each token of a picture: inputs and outputs of matrices,
    and inputs of norms, twice. 0 for families that are not known.

    A token stands for several of the tower's patches, and for one input of the projector.
    """
    family = FAMILIES.get(model.config.model_type)
    if family is None:
        return 0
    of_part = {"tower": 0, "projector": 0}
    for name, module in model.named_modules():
        part = part_of(f"{name}.weight")
        if part != "language":
            of_part[part] += _kept(name, module)
    return round(of_part["tower"] * family.patches(model.config) + of_part["projector"])


def _kept(name: str, module: Any) -> int:
    import torch

    if isinstance(module, torch.nn.Linear):
        shared = name.rpartition(".")[2] in _SHARED
        return module.out_features + (0 if shared else module.in_features)
    if isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d):
        return module.weight[0].numel() + module.out_channels
    if "norm" in type(module).__name__.lower():
        return 2 * max((one.numel() for one in module.parameters() if one.ndim == 1), default=0)
    return 0


__all__ = ["kept_of_tower"]
