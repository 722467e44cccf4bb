"""Which experts a mixture of experts has chosen for its tokens.

Engine and trainer compute the same router in different batches, so where two experts are nearly as likely they may
choose different ones, and the token's logprob then differs by more than rounding ("Rollout Routing Replay",
arXiv:2510.11370). `Routing` records the choices of both, to be compared.

Dimension suffixes: S tokens of a sequence, N tokens asked about, P tokens that the last layer computes
(`agentrl/last_layer.py`), L layers with experts, K experts of a token.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class Routing:
    """The experts that each layer of a transformers model chose in its last forward pass."""

    def __init__(self, model: Any) -> None:
        """Watch a model, from now on. One without experts has `layers` 0."""
        self._chosen_SK: dict[int, Tensor] = {}
        experts = [module for name, module in model.named_modules() if name.split(".")[-1] == "experts"]
        for layer, module in enumerate(experts):
            module.register_forward_pre_hook(partial(self._record, layer), with_kwargs=True)
        self.layers = len(experts)

    def _record(self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """transformers calls the experts of a layer with hidden states, the chosen experts, and their weights."""
        given = [*args, *kwargs.values()]
        chosen = [one for one in given if isinstance(one, Tensor) and one.dim() == 2 and not one.is_floating_point()]
        if len(chosen) == 1:
            self._chosen_SK[layer] = chosen[0]

    def chosen(self, at_N: Tensor, tokens: int, needed_P: Tensor | None) -> Tensor | None:
        """The experts of the tokens `at_N` in the last pass, which had so many `tokens`; shape (N, L, K).

        `needed_P`: the tokens that the last layer computed, in order, if it left others out; `at_N` are among them.
        None if the model does not say which it chose.
        """
        found_NK: list[Tensor] = []
        for layer in range(self.layers):
            chosen_SK = self._chosen_SK.get(layer)
            if chosen_SK is None:
                return None
            if len(chosen_SK) == tokens:
                found_NK.append(chosen_SK.index_select(0, at_N))
            elif needed_P is not None and len(chosen_SK) == len(needed_P):
                found_NK.append(chosen_SK.index_select(0, torch.searchsorted(needed_P, at_N)))
            else:
                return None
        return torch.stack(found_NK, dim=1) if found_NK else None


def differing(chosen_NLK: Tensor, other_NLK: Tensor) -> Tensor:
    """The share of each token's chosen experts that the other did not choose; shape N. Their order does not matter."""
    both_NLK = (chosen_NLK[..., None] == other_NLK[..., None, :]).any(-1)
    return 1 - both_NLK.float().mean((1, 2))


__all__ = ["Routing", "differing"]
