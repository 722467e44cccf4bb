"""The experts that a mixture of experts chooses for its tokens.

Engine and trainer compute the same router in different batches, so where two experts are nearly as
likely they may choose different ones, and the token's logprob then differs by more than rounding.
`Routing` records the choices of an engine, and `TokenRouting` has a trainer compute with them
("Rollout Routing Replay", arXiv:2510.11370), or compares them with its own.

`Balance` is for a loss that lets the routers use all experts equally.

Dimension suffixes: S tokens of a sequence, N tokens asked about, P tokens that the last layer
computes (`agentrl/models/last_layer.py`), L layers with experts, E experts of a layer, K experts of
a token.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from agentrl.models.optional_fields import optional_field

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_EXPERTS = "experts"
"""transformers' name of the module with the experts of a layer."""


class Routing:
    """The experts that each layer of a transformers model chose in its last forward pass."""

    def __init__(self, model: Any) -> None:
        """Watch a model, from now on. One without experts has `layers` 0."""
        self._chosen_SK: dict[int, Tensor] = {}
        self._hooks = [
            module.register_forward_pre_hook(partial(self._record, layer), with_kwargs=True)
            for layer, (_, module) in enumerate(expert_modules(model))
        ]
        self.layers = len(self._hooks)

    def stop(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()

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

    def chosen_experts(self, tokens: int, needed_P: Tensor | None) -> Tensor | None:
        """The experts of all tokens of the last pass, which had so many `tokens`; int16, shape (S,
        L, K). They are -1 where a layer did not compute a token.

        `needed_P`: the tokens that the last layer computed, in order, if it left others out. None
        if the model does not say which it chose.
        """
        found_SK: list[Tensor] = []
        for layer in range(self.layers):
            chosen_SK = self._chosen_SK.get(layer)
            if chosen_SK is None:
                return None
            chosen_SK = chosen_SK.to(torch.int16)
            if len(chosen_SK) != tokens:
                if needed_P is None or len(chosen_SK) != len(needed_P):
                    return None
                unknown_SK = chosen_SK.new_full((tokens, chosen_SK.shape[1]), -1)
                chosen_SK = unknown_SK.index_copy(0, needed_P, chosen_SK)
            found_SK.append(chosen_SK)
        return torch.stack(found_SK, dim=1) if found_SK else None


class TokenRouting:
    """The experts that engines chose for the tokens of a forward pass. The layers of a model that
    `take_choices` has prepared are called with it, as `token_routing`.

    With `replays`, a layer computes each token by these experts, as if its router had chosen them:
    their weights are its scores of them, and have its gradient. A token of which nothing is known
    has the router's own. Without, all have.
    """

    def __init__(
        self,
        chosen_SLK: Tensor,
        predictors_N: Tensor,
        needed_P: Tensor | None,
        *,
        replays: bool = True,
    ) -> None:
        """`chosen_SLK`: by layer with experts; -1 where nothing is known. `predictors_N`: the
        tokens that are compared. `needed_P`: those that the last layer computes, if it may leave
        others out.
        """
        self.replays = replays
        self._chosen_SLK = chosen_SLK
        self._predictors_N = predictors_N
        self._needed_P = needed_P
        self._differing_N: dict[int, Tensor] = {}
        self.is_known_N = (chosen_SLK.index_select(0, predictors_N) >= 0).all(2).all(1)

    def choose(self, layer: int, own_SK: Tensor) -> Tensor:
        """The experts of the tokens in a layer, shape (S, K) or (P, K), given those that its router
        likes best.
        """
        given_SK, compared_N = self._chosen_SLK[:, layer].long(), self._predictors_N
        if own_SK.shape[1] != given_SK.shape[1]:
            return own_SK
        if len(own_SK) != len(given_SK):
            needed_P = self._needed_P
            if needed_P is None or len(own_SK) != len(needed_P):
                return own_SK
            given_SK = given_SK.index_select(0, needed_P)
            compared_N = torch.searchsorted(needed_P, compared_N)
        with torch.no_grad():
            self._differing_N[layer] = differing(
                own_SK.index_select(0, compared_N), given_SK.index_select(0, compared_N)
            )
        return torch.where(given_SK < 0, own_SK, given_SK) if self.replays else own_SK

    @property
    def difference_N(self) -> Tensor:
        """The share of the engine's experts that the routers did not choose in the last pass, by
        token that is compared; float32, shape N. It means something where they are known.
        """
        found = list(self._differing_N.values())
        return torch.stack(found).mean(0) if found else torch.zeros(len(self._predictors_N))


class _ChosenByEngine(TorchFunctionMode):
    """In its block, a layer's router chooses its best experts as `TokenRouting` says.

    All routers of transformers choose by `topk` over the scores of all experts, and weigh those
    that they have chosen by scores that they look up.
    """

    def __init__(self, layer: int, experts: int, routing: TokenRouting) -> None:
        super().__init__()
        self._layer, self._experts, self._routing = layer, experts, routing

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        output = func(*args, **given)
        if func not in (torch.topk, Tensor.topk):
            return output
        # A layer may call `topk` for other things (groups of experts): only the choice among all
        # experts is replaced.
        scores_SE = args[0] if args else given["input"]
        own_SK = output[1]
        if own_SK.dim() != 2 or scores_SE.shape[1] != self._experts:
            return output
        chosen_SK = self._routing.choose(self._layer, own_SK)
        if chosen_SK is own_SK:
            return output
        return torch.return_types.topk((scores_SE.gather(1, chosen_SK), chosen_SK))


def layers_with_experts(model: Any) -> tuple[int, ...]:
    """The numbers of the layers of a transformers model that have experts; none if it is no mixture
    of experts.
    """
    found = (_LAYER.search(f".{name}") for name, _ in expert_modules(model))
    return tuple(int(layer[1]) for layer in found if layer is not None)


def take_choices(model: Any) -> None:
    """Let the layers with experts of a transformers model take a keyword argument `token_routing`
    (`TokenRouting`).
    """
    numbers = layers_with_experts(model)
    for place, (number, (_, module)) in enumerate(zip(numbers, expert_modules(model), strict=True)):
        layer = model.base_model.layers[number]
        layer.forward = partial(_forward_with_choices, place, _num_experts(module), layer.forward)


def choices_are_taken(model: Any, run: Callable[[TokenRouting], object], tokens: int) -> bool:
    """True if a model that `take_choices` has prepared computes with experts that are given. `run`
    calls it with some `tokens`, all of which each layer computes.
    """
    experts = [_num_experts(module) for _, module in expert_modules(model)]
    watched = Routing(model)
    device = next(model.parameters()).device
    nobody_N = torch.zeros(0, dtype=torch.long, device=device)
    try:
        run(TokenRouting(nobody_N.new_full((tokens, watched.layers, 1), -1), nobody_N, None))
        own_SLK = watched.chosen_experts(tokens, None)
        if own_SLK is None:
            return False
        # Ask for the neighbours of the experts that the routers like best, and see which compute.
        others_SLK = (own_SLK + 1) % torch.tensor(experts, device=device)[:, None]
        run(TokenRouting(others_SLK, nobody_N, None))
        found_SLK = watched.chosen_experts(tokens, None)
        return found_SLK is not None and bool((found_SLK == others_SLK).all())
    finally:
        watched.stop()


def _forward_with_choices(
    place: int, experts: int, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """The `forward` of a layer with experts, the first of which has the `place` 0. It runs again
    where a layer is computed again in the backward pass.
    """
    routing = kwargs.pop("token_routing", None)
    if routing is None:
        return forward(*args, **kwargs)
    with _ChosenByEngine(place, experts, routing):
        return forward(*args, **kwargs)


def expert_modules(model: Any) -> list[tuple[str, Any]]:
    """The modules with the experts of a layer, by name, in order."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == _EXPERTS
    ]


def _num_experts(experts: Any) -> int:
    """The number of experts in a module: the first dimension of its stacked weights, of which a
    rank of a trainer may have a part.
    """
    stacked = [len(one) for one in experts.parameters() if one.dim() == 3]
    return stacked[0] if stacked else int(getattr(experts, "num_experts", 0))


def differing(chosen_NK: Tensor, other_NK: Tensor) -> Tensor:
    """The share of each token's experts that the other did not choose; shape N. Their order does
    not matter.
    """
    both_NK = (chosen_NK[..., None] == other_NK[..., None, :]).any(-1)
    return 1 - both_NK.float().mean(-1)


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


__all__ = [
    "Balance",
    "Routing",
    "TokenRouting",
    "balance_loss",
    "choices_are_taken",
    "differing",
    "expert_modules",
    "layers_with_experts",
    "take_choices",
    "without_router_logits",
]
