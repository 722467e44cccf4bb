"""The last layer's attention and feed-forward part, computed only for the tokens whose hidden
states are used.

A loss needs the last hidden states before its loss tokens, which are few among the tokens of a
conversation, and an engine needs that of the last token of each prompt. Attention mixes tokens, so
all of them go through the layers before. After the last attention nothing mixes them any more. What
is left out has no influence on the logprobs, so these and the gradients are the same.

Dimension suffixes: S tokens of the sequence, P needed ones, H hidden size.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.models.vision import language_model

MAX_NEEDED_SHARE = 0.75
"""It is worth leaving tokens out if at most this share of them is needed."""


def compute_only_needed(model: Any) -> None:
    """Let the last layer's `mlp` compute the tokens `needed_P` only, if the layer has such a
    module.

    `needed_P` is a keyword argument of the model's call; without it all tokens are computed. For
    the tokens that are left out, the output of the module is 0. Attention is called with
    `needed_only=True`, and may do the same.
    """
    layers: Any = getattr(language_model(model), "layers", None)
    if not layers:
        return
    last = layers[-1]
    mlp = dict(last.named_children()).get("mlp")
    if mlp is not None:
        hooks = _Hooks()
        last.forward = partial(hooks.layer, last.forward)
        mlp.register_forward_pre_hook(hooks.before_mlp)
        mlp.register_forward_hook(hooks.after_mlp)


class _Hooks:
    """The state shared by the calls of a layer and its `mlp`."""

    def __init__(self) -> None:
        self._needed_P: Tensor | None = None
        self._tokens = 0

    def layer(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The layer's `forward`. It runs again where a layer is computed again in the backward
        pass.
        """
        self._needed_P = kwargs.get("needed_P")
        return forward(*args, **kwargs, **({} if self._needed_P is None else {"needed_only": True}))

    def before_mlp(self, mlp: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor] | None:
        """(1, S, H) to (1, P, H). A module that takes anything else computes all tokens."""
        if self._needed_P is None:
            return None
        if (
            len(args) != 1
            or args[0].dim() != 3
            or not 0 < len(self._needed_P) <= MAX_NEEDED_SHARE * args[0].shape[1]
        ):
            self._needed_P = None
            return None
        self._tokens = args[0].shape[1]
        return (args[0].index_select(1, self._needed_P),)

    def after_mlp(self, mlp: nn.Module, args: tuple[Tensor, ...], output: Any) -> Any:
        """(1, P, H) to (1, S, H). Some models return more than hidden states, which is of no use
        here.
        """
        if self._needed_P is None:
            return None
        if isinstance(output, tuple):
            return (self._scatter(output[0]), *output[1:])
        return self._scatter(output)

    def _scatter(self, hidden_1PH: Tensor) -> Tensor:
        assert self._needed_P is not None
        hidden_1PH = hidden_1PH.reshape(1, len(self._needed_P), -1)
        empty_1SH = torch.zeros(
            1, self._tokens, hidden_1PH.shape[2], dtype=hidden_1PH.dtype, device=hidden_1PH.device
        )
        return empty_1SH.index_copy(1, self._needed_P, hidden_1PH)
