"""The size of a decoder's layer: parameters, and the numbers that training keeps of each token.

A layer is read on torch's meta device, where tensors have shapes and no memory.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any

from agentrl.errors import ConfigError
from agentrl.models.optional_fields import optional_field

_LAST = ("o_", "down", "out", "dense", "fc2", "c_proj", "w2", "wo")
"""The names of matrices whose output is added to the residual stream, if it has the size of that
stream."""
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk")


@dataclass(frozen=True, slots=True)
class Kept:
    """The numbers of a token that autograd keeps for the backward pass."""

    matrices: int = 0
    """Inputs and outputs of matrices, and additions by activation functions."""
    norms: int = 0
    """Inputs of norms, each of which also keeps two numbers in float32, or `low_norms` bytes in
    bfloat16."""
    low_norms: int = 0
    """Bytes that norms in bfloat16 keep besides their inputs."""
    casts: int = 0
    """Further copies where each matrix casts its own input (autocast)."""
    products: int = 0
    """Outputs of all matrices and of attention, which selective recomputation keeps."""
    scores: int = 0
    """Numbers of attention and of routers, which are always float32."""
    working: int = 0
    """Numbers that a layer's backward pass needs besides the kept ones."""

    def __add__(self, other: "Kept") -> "Kept":
        return Kept(
            *(one + another for one, another in zip(astuple(self), astuple(other), strict=True))
        )


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention heads of a layer."""

    queries: int
    """Heads with queries."""
    keys: int
    """Heads with keys and values."""
    key_size: int
    """Numbers of a key."""
    value_size: int
    """Numbers of a value."""
    latent: int = 0
    """Numbers of a token from which keys and values can be made again (DeepSeek-V2,
    arXiv:2405.04434, section 2.1); 0 for plain attention."""

    @staticmethod
    def of(config: Any) -> "Heads":
        """The heads of a Hugging Face config."""
        queries = int(config.num_attention_heads)
        keys = int(optional_field(config, "num_key_value_heads") or queries)
        if rank := optional_field(config, "kv_lora_rank"):
            rotated = int(config.qk_rope_head_dim)
            return Heads(
                queries,
                keys,
                config.qk_nope_head_dim + rotated,
                config.v_head_dim,
                int(rank) + rotated,
            )
        size = int(optional_field(config, "head_dim") or config.hidden_size // queries)
        return Heads(queries, keys, size, size)


def config_of_layer(config: Any, number: int) -> Any:
    """A config as it is for one layer: some families (Gemma 4) have other heads in some layers."""
    return config.per_layer_config[number] if config.is_heterogeneous else config


class Layer:
    """One layer on the meta device with `experts`, of which a token uses `chosen`."""

    def __init__(self, module: Any, config: Any) -> None:
        from torch import nn

        self._config = config
        self._hidden = int(config.hidden_size)
        self._heads = Heads.of(config)
        self.parameters = sum(p.numel() for p in module.parameters())
        linears = [
            (name, one) for name, one in module.named_modules() if isinstance(one, nn.Linear)
        ]
        self._linears = [(name.rpartition(".")[2], one) for name, one in linears]
        in_mlp = [one for name, one in linears if "attn" not in name and "attention" not in name]
        self._inner = [one.in_features for one in in_mlp if one.in_features != self._hidden] or [
            self._hidden
        ]
        self._norms = [
            (name, one)
            for name, one in module.named_modules()
            if "norm" in type(one).__name__.lower()
        ]
        # Experts are tensors of three dimensions, of which the first counts the experts.
        self._experts = [
            one
            for one in module.modules()
            if any(p.ndim == 3 for p in one.parameters(recurse=False))
        ]
        self.experts = max((len(p) for p in self._stacked_parameters()), default=0)
        self.chosen = self._num_chosen_experts() if self.experts else 0
        stacked = sum(p.numel() for one in self._experts for p in one.parameters(recurse=False))
        self.active = (
            self.parameters
            - stacked
            + (stacked * self.chosen // self.experts if self.experts else 0)
        )
        self.linear_ends = Counter[str]()
        for name, one in linears:
            # Adapters of a mixture of experts are those of attention.
            if not self.experts or "mlp" not in name.split("."):
                self.linear_ends[name.rpartition(".")[2]] += one.in_features + one.out_features

    def _stacked_parameters(self) -> Iterator[Any]:
        return (p for one in self._experts for p in one.parameters(recurse=False) if p.ndim == 3)

    def _num_chosen_experts(self) -> int:
        """The number of experts that a token uses."""
        chosen = next(
            (getattr(self._config, key) for key in _CHOSEN if getattr(self._config, key, None)),
            None,
        )
        if chosen is None:
            raise ConfigError(
                f"the config of {self._config.model_type} has {self.experts} experts and does not"
                f" say how many a token uses ({', '.join(_CHOSEN)}), so neither memory nor time can"
                " be planned for"
            )
        return int(chosen)

    def _widths(self) -> list[int]:
        """The inner sizes of an expert's matrices: of gate and up together, and of down."""
        return [p.numel() // (self.experts * self._hidden) for p in self._stacked_parameters()]

    @property
    def inner(self) -> int:
        """The most numbers of a token inside of the MLP."""
        return max([*self._inner, self.chosen * min(self._widths(), default=0)])

    @cached_property
    def kept(self) -> Kept:
        """The numbers that autograd keeps of a token: the input of each matrix, once for those that
        share it; the output of each that is not added to the residual stream; the outputs of
        activation functions; and the inputs of norms.
        """
        heads = self._heads
        rows, row_products = self._expert_rows()
        # Attention and MLP begin with the residual stream, which their first matrices share: it is
        # kept twice in a layer, however many of them take it.
        inputs, outputs, shared = 2 * self._hidden, 0, -2 * self._hidden
        for name, linear in self._linears:
            last = linear.out_features == self._hidden and name.startswith(_LAST)
            if last or linear.in_features != self._hidden:  # it has its input for itself
                inputs += linear.in_features
            else:
                shared += linear.in_features
            outputs += 0 if last else linear.out_features
            # Beside the product of `gate` and `up`.
            outputs += linear.in_features if name.startswith("down") else 0
        norms, low_norms, has_head_norms = 0, 0, False
        for name, norm in self._norms:
            size = self._norm_size(name, norm)
            norms += size
            low_norms += size * _bytes_in_bfloat16(norm)
            has_head_norms |= _is_head_norm(name)
        products = row_products + heads.queries * heads.value_size
        products += sum(linear.out_features for _, linear in self._linears)
        scores = heads.queries * (1 + 2 * has_head_norms) + 2
        scores += 8 * self.chosen + 2 * self.experts
        return Kept(
            matrices=inputs + outputs + rows + self._copied_head_numbers(),
            norms=norms,
            low_norms=low_norms,
            casts=max(0, shared) + rows,  # the experts' products are not cast
            products=products,
            scores=scores,
            working=self._working(),
        )

    def _copied_head_numbers(self) -> int:
        """Numbers of queries and keys that are copied, because only a part of each head is rotated,
        or because they come out of one matrix with the values.
        """
        heads = self._heads
        if heads.latent:
            return heads.queries * (heads.key_size + heads.value_size)
        if any(name.startswith("qkv") for name, _ in self._linears):
            return (2 * heads.queries + heads.keys) * heads.key_size
        rope = optional_field(self._config, "rope_parameters") or {}
        return heads.queries * heads.key_size if rope.get("partial_rotary_factor", 1) != 1 else 0

    def _expert_rows(self) -> tuple[int, int]:
        """Numbers of a token's rows in the experts: all that is kept, and those that are products.

        A row keeps its input, gate and up, what the activation function gives, the input of down,
        and its output.
        """
        if not self.experts:
            return 0, 0
        widths = self._widths()
        clamped = 3 * min(widths) if any(hasattr(one, "limit") for one in self._experts) else 0
        row = 2 * self._hidden + sum(widths) + min(widths) + clamped
        return self.chosen * row, self.chosen * (max(widths) + self._hidden)

    def _working(self) -> int:
        """Numbers of a token while its gradient passes through the MLP (measured; a test measures
        again).
        """
        if not self.experts:
            return self._hidden + 2 * self.inner
        return self._hidden + self.chosen * (
            self._hidden + 2 * max(self._hidden, min(self._widths()))
        )

    def _norm_size(self, name: str, norm: Any) -> int:
        """Numbers that a norm sees: those of a head, for each head, or those of its weight."""
        size = _width(norm)
        if size == self._heads.key_size and _is_head_norm(name):
            return size * (self._heads.queries if "q_norm" in name else self._heads.keys)
        return size


def _is_head_norm(norm: str) -> bool:
    return "q_norm" in norm or "k_norm" in norm


def _width(norm: Any) -> int:
    """Numbers of a norm's weight, which a bias has as well."""
    return max((p.numel() for p in norm.parameters() if p.ndim == 1), default=0)


def _bytes_in_bfloat16(norm: Any) -> int:
    """Bytes that a norm in bfloat16 keeps for each number: some compute in float32."""
    import torch

    size = _width(norm) or 1
    rows, storages = (
        torch.empty(64, size, dtype=torch.bfloat16, device="meta", requires_grad=True),
        {},
    )

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            norm(rows)
    except TypeError:  # it takes more than its input
        return 8
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values()) // (64 * size)
