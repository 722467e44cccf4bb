"""The experts that a mixture of experts has chosen for its tokens.

Engine and trainer compute the same router in different batches, so where two experts are nearly as
likely they may choose different ones, and the token's logprob then differs by more than rounding
("Rollout Routing Replay", arXiv:2510.11370). `Routing` records the choices of both, to be compared.

`Balance` is for a loss that lets the routers use all experts equally.

Dimension suffixes: S tokens of a sequence, N tokens asked about, P tokens that the last layer
computes (`agentrl/models/last_layer.py`), L layers with experts, E experts of a layer, K experts of
a token.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.models.optional_fields import optional_field


class Routing:
    """The experts that each layer of a transformers model chose in its last forward pass."""

    def __init__(self, model: Any) -> None:
        """Watch a model, from now on. One without experts has `layers` 0."""
        self._chosen_SK: dict[int, Tensor] = {}
        experts = [
            module for name, module in model.named_modules() if name.split(".")[-1] == "experts"
        ]
        for layer, module in enumerate(experts):
            module.register_forward_pre_hook(partial(self._record, layer), with_kwargs=True)
        self.layers = len(experts)

    def _record(
        self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """transformers calls the experts of a layer with hidden states, the chosen experts, and
        their weights.
        """
        given = [*args, *kwargs.values()]
        chosen = [
            one
            for one in given
            if isinstance(one, Tensor) and one.dim() == 2 and not one.is_floating_point()
        ]
        if len(chosen) == 1:
            self._chosen_SK[layer] = chosen[0]

    def chosen_experts(self, at_N: Tensor, tokens: int, needed_P: Tensor | None) -> Tensor | None:
        """The experts of the tokens `at_N` in the last pass, which had so many `tokens`; shape (N,
        L, K).

        `needed_P`: the tokens that the last layer computed, in order, if it left others out; `at_N`
        are among them. None if the model does not say which it chose.
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
    """The share of each token's chosen experts that the other did not choose; shape N. Their order
    does not matter.
    """
    both_NLK = (chosen_NLK[..., None] == other_NLK[..., None, :]).any(-1)
    return 1 - both_NLK.float().mean((1, 2))


class Balance:
    """The balance of experts: how a transformers model's routers divide the tokens of a forward
    pass.

    Raises:
        ValueError: transformers names no routers of the model.
    """

    def __init__(self, model: Any) -> None:
        """Watch a model, from now on."""
        self._logits_SE: dict[int, Tensor] = {}
        self._recording = False
        self._chosen = int(
            optional_field(model.config.get_text_config(), "num_experts_per_tok") or 0
        )
        routers = list(_routers(model))
        if not routers or not self._chosen:
            raise ValueError(f"transformers names no routers of {type(model).__name__}")
        for layer, (router, place) in enumerate(routers):
            router.register_forward_hook(partial(self._record, layer, place))
        self.layers = len(routers)

    def _record(
        self, layer: int, place: int, module: nn.Module, args: tuple[Any, ...], output: Any
    ) -> None:
        # A layer that is computed again in the backward pass has been recorded before.
        if self._recording:
            self._logits_SE[layer] = output[place] if isinstance(output, tuple) else output

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the routers' logits in the block."""
        self._logits_SE, self._recording = {}, True
        try:
            yield
        finally:
            self._recording = False

    def sums(self, times_S: Tensor) -> Tensor:
        """Of each expert, the tokens that were assigned to it, and their probabilities; shape (2,
        E), float32.

        Both are summed over the layers and the tokens, of which each counts so many times. Only the
        second has a gradient. Both are those of transformers' `load_balancing_loss_func`: the K
        likeliest experts by a softmax over the router's logits, whatever the model itself makes of
        them.
        """
        found_2E: Tensor | None = None
        for layer in range(self.layers):
            logits_SE = self._logits_SE.pop(layer).reshape(len(times_S), -1)
            probabilities_SE = logits_SE.float().softmax(-1)
            chosen_SK = probabilities_SE.detach().topk(self._chosen, dim=-1).indices
            assigned_SE = torch.zeros_like(probabilities_SE).scatter_(1, chosen_SK, 1.0)
            of_layer_2E = torch.stack([times_S @ assigned_SE, times_S @ probabilities_SE])
            found_2E = of_layer_2E if found_2E is None else found_2E + of_layer_2E
        assert found_2E is not None
        return found_2E


def balance_loss(totals_2E: Tensor, probabilities_E: Tensor) -> Tensor:
    """E sum_e (assigned_e / R) (probability_e / R), for R tokens times layers: K if all experts are
    used equally.

    Eq. (4) of "Switch Transformers" (Fedus et al., arXiv:2101.03961), as transformers'
    `load_balancing_loss_func` has it for K experts of a token. `totals_2E` are the sums over a
    whole batch (`Balance.sums`), and `probabilities_E` those of a part of it: what was assigned has
    no gradient, so loss and gradient are sums over the parts.
    """
    assigned_E, rows = totals_2E[0].detach(), totals_2E[1].detach().sum().round()
    return len(assigned_E) * (assigned_E * probabilities_E).sum() / rows.square()


def without_router_logits(config: Any) -> dict[str, bool]:
    """Arguments of a model's call, so that it collects no routers' logits for a loss of its own,
    whatever its config says: without layers there are none, and elsewhere nobody would read them.
    """
    return (
        {"output_router_logits": False}
        if optional_field(config, "output_router_logits", False)
        else {}
    )


def _routers(model: Any) -> Iterator[tuple[Any, int]]:
    """The routers of a model by layer, and the place of the logits in their output."""
    named = getattr(model.base_model, "_can_record_outputs", None) or {}
    recorders = named.get("router_logits", ())
    for name, module in model.base_model.named_modules():
        for recorder in recorders if isinstance(recorders, list | tuple) else [recorders]:
            kind, within, index = recorder, None, 0
            if not isinstance(recorder, type):  # transformers' `OutputRecorder`
                kind, within, index = recorder.target_class, recorder.layer_name, recorder.index
            if (
                isinstance(kind, type)
                and isinstance(module, kind)
                and (within is None or within in name)
            ):
                yield module, int(index)


__all__ = ["Balance", "Routing", "balance_loss", "differing", "without_router_logits"]
