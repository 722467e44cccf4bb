"""The layers of the most common decoders, in fewer and larger operators than transformers has for
them.

A decoding step of a small model on a CPU is some hundred operators that each take microseconds: as
long as Python takes to call them one by one. Here the matrices that take the same input are one
product, queries and keys are normalised and rotated together, and no module is called. What is
computed is the same, and `PackedModel` compares it when it loads a model.

Dimension suffixes: N packed tokens, P kept ones, E the size of hidden states, H query heads, K
key/value heads, B heads of both, D head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

_FAMILIES = frozenset({"LlamaModel", "Qwen2Model", "Qwen3Model"})
Heads = tuple[Tensor, Tensor, Tensor]
"""Queries (N, H, D), keys and values (N, K, D)."""
Attend = Callable[[int, Heads, float, int | None], Tensor]
"""Attention of a layer, by its number, with its scale and window; its results are (N, H, D)."""


@dataclass(frozen=True, slots=True)
class _Product:
    """Linear layers of one input, as one. Their weights are parts of its own, so that an update of
    theirs is one of it.
    """

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, *parts: Any) -> Self:
        biases = [part.bias for part in parts if part.bias is not None]
        return cls(
            _concatenate_in_place([part.weight for part in parts]),
            _concatenate_in_place(biases) if biases else None,
        )

    def __call__(self, inputs: Tensor) -> Tensor:
        return linear(inputs, self.weight, self.bias)


def _concatenate_in_place(parts: Sequence[Tensor]) -> Tensor:
    """One tensor with these in it, from now on."""
    if len(parts) == 1:
        return parts[0]
    whole = torch.cat([part.data for part in parts])
    for part, own in zip(parts, torch.split(whole, [len(part) for part in parts]), strict=True):
        part.data = own
    return whole


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: Tensor
    eps: float

    @classmethod
    def of(cls, module: Any) -> Self:
        return cls(module.weight, module.variance_epsilon)

    def __call__(self, inputs: Tensor) -> Tensor:
        return rms_norm(inputs, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer: attention after a norm, then a gated feed-forward part after another one."""

    number: int
    heads: int
    head_size: int
    scale: float
    window: int | None
    first: _Norm
    heads_in: _Product
    of_queries: _Norm | None
    of_keys: _Norm | None
    heads_out: _Product
    second: _Norm
    gate_and_up: _Product
    activation: Callable[[Tensor], Tensor]
    down: _Product

    @classmethod
    def of(cls, layer: Any) -> Self:
        own, mlp = layer.self_attn, layer.mlp
        is_normed = hasattr(own, "q_norm")
        return cls(
            own.layer_idx,
            own.q_proj.out_features // own.head_dim,
            own.head_dim,
            own.scaling,
            getattr(own, "sliding_window", None),
            _Norm.of(layer.input_layernorm),
            _Product.of(own.q_proj, own.k_proj, own.v_proj),
            _Norm.of(own.q_norm) if is_normed else None,
            _Norm.of(own.k_norm) if is_normed else None,
            _Product.of(own.o_proj),
            _Norm.of(layer.post_attention_layernorm),
            _Product.of(mlp.gate_proj, mlp.up_proj),
            mlp.act_fn,
            _Product.of(mlp.down_proj),
        )

    def attention(
        self, states_NE: Tensor, cos_N1D: Tensor, sin_N1D: Tensor, attend: Attend
    ) -> Tensor:
        """The results of all heads, (N, H x D)."""
        heads = self.heads_in(self.first(states_NE)).view(len(states_NE), -1, self.head_size)
        keys = (heads.shape[1] - self.heads) // 2
        both_NBD, value_NKD = heads[:, :-keys], heads[:, -keys:]
        if self.of_queries is not None and self.of_keys is not None:
            both_NBD = rms_norm(both_NBD, (self.head_size,), None, self.of_queries.eps)
            both_NBD[:, : self.heads] *= self.of_queries.weight
            both_NBD[:, self.heads :] *= self.of_keys.weight
        both_NBD = both_NBD * cos_N1D + both_NBD.roll(self.head_size // 2, -1) * sin_N1D
        heads_in = both_NBD[:, : self.heads], both_NBD[:, self.heads :], value_NKD
        return attend(self.number, heads_in, self.scale, self.window).flatten(1)

    def rest(self, states_NE: Tensor, out_NE: Tensor) -> Tensor:
        """The states after the layer, from those before it and the results of its heads."""
        states_NE = states_NE + self.heads_out(out_NE)
        gate, up = self.gate_and_up(self.second(states_NE)).chunk(2, dim=1)
        return states_NE + self.down(self.activation(gate) * up)


class PlainLayers:
    """A decoder without its head."""

    def __init__(self, decoder: Any) -> None:
        """Join the weights of a decoder that `are_of` knows."""
        self._embedding = decoder.embed_tokens
        self._rotary = decoder.rotary_emb
        self._layers = [_Layer.of(layer) for layer in decoder.layers]
        self._norm = _Norm.of(decoder.norm)

    @staticmethod
    def are_of(model: Any) -> bool:
        """True if it is a model of such layers that reads no pictures, in float32, on a CPU.

        Elsewhere operators take longer than their calls, and norms in bfloat16 round in another
        way.
        """
        decoder = model.base_model
        return (
            type(decoder).__name__ in _FAMILIES
            and type(decoder).__module__.startswith("transformers.")
            and all(
                weight.dtype == torch.float32 and weight.device.type == "cpu"
                for weight in decoder.parameters()
            )
            and all(
                type(module) is nn.Linear
                for name, module in decoder.named_modules()
                if name.endswith("_proj")
            )
        )

    def __call__(
        self, tokens_N: Tensor, positions_N: Tensor, kept_P: Tensor, attend: Attend
    ) -> Tensor:
        """The last hidden states of the tokens `kept_P` (ascending), (P, E). After the last
        attention, only these are computed.
        """
        states_NE = self._embedding(tokens_N)
        cos_1ND, sin_1ND = self._rotary(states_NE[None], positions_N[None])
        # Half of the heads' numbers change their sign as they are rotated: here those of the sine.
        first, second = sin_1ND[0, :, None].chunk(2, dim=-1)
        rotation = cos_1ND[0, :, None], torch.cat([-first, second], dim=-1)
        for layer in self._layers:
            out_NE = layer.attention(states_NE, *rotation, attend)
            if layer is self._layers[-1] and len(kept_P) < len(tokens_N):
                out_NE, states_NE = out_NE[kept_P], states_NE[kept_P]
            states_NE = layer.rest(states_NE, out_NE)
        return self._norm(states_NE)


__all__ = ["Attend", "Heads", "PlainLayers"]
