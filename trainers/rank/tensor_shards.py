"""The matrices of a model, divided over ranks by transformers' plan for it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from agentrl.errors import ConfigError
from agentrl.models.tensor_plan import BY_COLUMNS, BY_ROWS, GATHERED, KNOWN, SPLIT, WHOLE, planned
from agentrl.trainers.compute.tensor import (
    DividedColumns,
    DividedEmbedding,
    GatheredOutputs,
    SplitInputs,
    TensorGroup,
    VocabularyPart,
    WithoutBias,
)


@dataclass(frozen=True, slots=True)
class TensorShards:
    """The names of tensors of which a rank has a part of the rows, and of those of which it has a
    part of the columns: one of `ranks` equal parts each. It has copies of all others.
    """

    rows: frozenset[str] = frozenset()
    columns: frozenset[str] = frozenset()
    ranks: int = 1

    def is_copied(self, name: str) -> bool:
        """True if other ranks of the group have the same of a tensor."""
        return self.ranks > 1 and name not in self.rows and name not in self.columns


def check_matrices(model: Any, ranks: int) -> None:
    """Refuse a model whose matrices cannot be divided over so many ranks.

    Raises:
        ConfigError: transformers has no plan for it, or one that asks for more than this; or
            heads, hidden units or the vocabulary cannot be divided.
    """
    if ranks == 1:
        return
    kind, text = type(model).__name__, model.config.get_text_config()
    where = f"trainer.tensor_parallel={ranks} divides the matrices of {kind} over as many ranks"
    instead = (
        "write trainer.tensor_parallel=1, and divide the tokens of long samples by"
        " trainer.context_parallel"
    )
    found = list(planned(model))
    if not found:
        raise ConfigError(
            f"{where}, and transformers has no plan (base_model_tp_plan) for its layers: {instead}"
        )
    for name, module, style in found:
        if style not in KNOWN or (style not in WHOLE and not isinstance(_layer(module), nn.Linear)):
            raise ConfigError(
                f"{where}, and transformers' plan for {name} is {style}, which is not built here:"
                f" {instead}"
            )
    counts = {
        "attention heads": text.num_attention_heads,
        "heads of keys": text.num_key_value_heads,
        "ids in its vocabulary": model.get_input_embeddings().weight.shape[0],
    }
    counts |= {
        f"{'outputs' if style in BY_ROWS else 'inputs'} of {name}": _layer(module).weight.shape[
            style in BY_COLUMNS
        ]
        for name, module, style in found
        if style not in WHOLE
    }
    for what, count in counts.items():
        if count % ranks:
            ways = ", ".join(
                str(n)
                for n in range(1, counts["heads of keys"] + 1)
                if all(one % n == 0 for one in counts.values())
            )
            raise ConfigError(f"{where}, and there are {count} {what}: write one of {ways}")


def divide_matrices(model: Any, group: TensorGroup | None) -> TensorShards:
    """Leave a model that was made `on_meta` only this rank's part of its matrices, whose results
    are then those of all ranks of the group. The output head is left its ids, and what makes
    logprobs of its logits must know that.
    """
    if group is None:
        return TensorShards()
    cut = _Divider(group.ranks)
    for _, module, style in planned(model):
        layer = _layer(module)
        if style in BY_ROWS:
            layer.out_features //= group.ranks
            for one in (layer, *_factors(module, "B")):
                cut.rows(one)
            if style == GATHERED:
                module.forward = GatheredOutputs(module.forward, group)
        elif style in BY_COLUMNS:
            layer.in_features //= group.ranks
            for one in (layer, *_factors(module, "A")):
                cut.columns(one)
            layer.forward = WithoutBias(layer)
            if style == SPLIT:
                module.forward = SplitInputs(module.forward, group)
            module.forward = DividedColumns(module.forward, layer, group)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    part = VocabularyPart(group, embedding.weight.shape[0] // group.ranks)
    cut.rows(embedding)
    embedding.num_embeddings = part.ids
    if embedding.padding_idx is not None:  # its row gets no gradient
        number = embedding.padding_idx - part.start
        embedding.padding_idx = number if 0 <= number < part.ids else None
    embedding.forward = DividedEmbedding(embedding.forward, part)
    if head is not None:
        cut.rows(head)
    return cut.shards(model)


def _layer(module: Any) -> Any:
    """The linear layer of the model itself, if peft has put an adapter around it."""
    return getattr(module, "base_layer", module)


def _factors(module: Any, side: str) -> list[Any]:
    """The linear layers of an adapter's first factor, A, or of its second, B; none without one."""
    return list(getattr(module, f"lora_{side}", {}).values())


class _Divider:
    """Divides parameters, and remembers how; tied ones stay tied."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.made: dict[int, nn.Parameter] = {}
        self.before: list[nn.Parameter] = []
        self.by_rows: set[int] = set()
        self.by_columns: set[int] = set()

    def rows(self, module: Any) -> None:
        """Leave a module a part of the rows of all its tensors."""
        for name, whole in list(module.named_parameters(recurse=False)):
            part = self._part(whole, 0)
            self.by_rows.add(id(part))
            setattr(module, name, part)

    def columns(self, module: Any) -> None:
        """Leave a linear layer a part of the columns of its weight."""
        module.weight = self._part(module.weight, 1)
        self.by_columns.add(id(module.weight))

    def shards(self, model: Any) -> TensorShards:
        """The divided tensors, by the names of the model."""
        names = dict(model.named_parameters(remove_duplicate=False))
        return TensorShards(
            frozenset(name for name, one in names.items() if id(one) in self.by_rows),
            frozenset(name for name, one in names.items() if id(one) in self.by_columns),
            self.ranks,
        )

    def _part(self, whole: nn.Parameter, axis: int) -> nn.Parameter:
        if id(whole) not in self.made:
            sizes = list(whole.shape)
            sizes[axis] //= self.ranks
            part = torch.empty(sizes, dtype=whole.dtype, device=whole.device)
            self.made[id(whole)] = nn.Parameter(part, requires_grad=whole.requires_grad)
            self.before.append(whole)  # no other parameter gets its id
        return self.made[id(whole)]
