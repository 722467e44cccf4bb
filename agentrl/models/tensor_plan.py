"""transformers' plan for a model: how its matrices are divided over ranks that compute the same
tokens (`base_model_tp_plan`).
"""

import re
from collections.abc import Iterator
from typing import Any

from agentrl.models.routing import expert_modules

GATHERED = "colwise_gather_output"
"""Cut by rows, and its outputs are gathered."""
BY_ROWS = ("colwise", GATHERED)
"""The plan's names for matrices that are cut by rows (transformers means their transposes)."""
SPLIT = "rowwise_split_input"
"""Cut by columns, and its inputs are whole."""
BY_COLUMNS = ("rowwise", SPLIT)
"""Its names for matrices that are cut by columns."""
WHOLE = ("replicated_with_grad_allreduce",)
"""Its names for what is not cut."""
KNOWN = (*BY_ROWS, *BY_COLUMNS, *WHOLE)


def planned(model: Any) -> Iterator[tuple[str, Any, str]]:
    """The modules of the layers for which transformers has a plan, with their names and what it
    says; except experts, which are not cut.
    """
    experts = {name for name, _ in expert_modules(model)}
    plan = {
        name: style
        for name, style in (getattr(model, "_tp_plan", None) or {}).items()
        if ".layers." in f".{name}"
    }
    for name, module in model.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is not None and name not in experts:
            yield name, module, style


def gathered_numbers(model: Any) -> int | None:
    """Numbers of a token that ranks gather in all layers, if they divide the model's matrices; None
    if these cannot be divided.
    """
    found = list(planned(model))
    if not found or any(style not in KNOWN for _, _, style in found):
        return None
    return int(sum(module.out_features for _, module, style in found if style == GATHERED))


__all__ = [
    "BY_COLUMNS",
    "BY_ROWS",
    "GATHERED",
    "KNOWN",
    "SPLIT",
    "WHOLE",
    "gathered_numbers",
    "planned",
]
