"""Where in a model the gradient is: its norm by group of layers."""

import math
import re
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

BLOCK_GROUPS = 4
"""The blocks of a model are told apart by quarters, counted from the embeddings on."""
_BLOCK = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")


@lru_cache
def layer_groups(names: tuple[str, ...]) -> Mapping[str, str]:
    """The group of each parameter: `embedding`, `blocks/1` to `blocks/4`, or `head` (all that
    follows the blocks).

    A tied head has the embedding's name. A model of fewer blocks has fewer groups of them.
    """
    numbers = {name: int(found[1]) for name in names if (found := _BLOCK.search(name))}
    count = max(numbers.values(), default=0) + 1
    groups = min(BLOCK_GROUPS, count)
    return {
        name: f"blocks/{numbers[name] * groups // count + 1}"
        if name in numbers
        else ("embedding" if "embed" in name or ".wte." in name or ".wpe." in name else "head")
        for name in names
    }


def squares(gradients: Mapping[str, Tensor | None], device: torch.device) -> dict[str, Tensor]:
    """The sum of the squares of each group's gradients, as scalars on `device`. Groups without a
    gradient are 0.
    """
    groups = layer_groups(tuple(gradients))
    found = {group: torch.zeros((), device=device) for group in sorted(set(groups.values()))}
    present = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    if present:
        norms = torch._foreach_norm([gradient.detach() for gradient in present.values()])
        by_group: dict[str, list[Tensor]] = {}
        for name, norm in zip(present, norms, strict=True):
            by_group.setdefault(groups[name], []).append(norm.float().to(device))
        found |= {group: torch.stack(own).square_().sum() for group, own in by_group.items()}
    return found


def norms_of(groups: Mapping[str, Tensor]) -> dict[str, float]:
    """The norms, as metrics, of sums of squares over all ranks."""
    if not groups:
        return {}
    values = torch.stack(list(groups.values())).tolist()
    return {
        f"grad_norm/{group}": math.sqrt(value) for group, value in zip(groups, values, strict=True)
    }
