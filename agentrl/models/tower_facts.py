"""What the tower and the projector of a model that sees keep for their backward pass."""

from collections.abc import Mapping
from typing import Any

from agentrl.models.vision import part_of
from agentrl.models.vision_families import FAMILIES

_SHARED = ("k_proj", "v_proj")
"""Matrices whose input is that of `q_proj`."""
_OF_HEADS = {"q_norm": "q_proj", "k_norm": "k_proj", "v_norm": "v_proj"}
"""Norms of each head of what a matrix returns."""


def kept_of_tower(model: Any) -> int:
    """The numbers that autograd keeps for each token of a picture: inputs and outputs of matrices,
    and inputs of norms, twice. 0 for families that are not known.

    A token stands for several of the tower's patches, and for one input of the projector.
    """
    family = FAMILIES.get(model.config.model_type)
    if family is None:
        return 0
    of_part = {"tower": 0, "projector": 0}
    modules = dict(model.named_modules())
    for name, module in modules.items():
        part = part_of(f"{name}.weight")
        if part != "language" and "audio" not in name:
            of_part[part] += _kept(name, module) + _more_of_gemma_4(name, modules)
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


def _more_of_gemma_4(name: str, modules: Mapping[str, Any]) -> int:
    """Numbers that Gemma 4 keeps besides: inputs and outputs that are clipped once more, and norms
    of all heads, which are as large as one and may have no weights.
    """
    module, end = modules[name], name.rpartition(".")[2]
    if type(module).__name__ == "Gemma4ClippableLinear" and module.use_clipped_linears:
        return int(module.linear.in_features + module.linear.out_features)
    if type(module).__name__ == "Gemma4RMSNorm" and end in _OF_HEADS:
        matrix = modules[f"{name.removesuffix(end)}{_OF_HEADS[end]}"].linear
        return 2 * int(matrix.out_features) - _kept(name, module)
    return 0


__all__ = ["kept_of_tower"]
