"""Names of weights: those that a model's folder and vLLM have, and those of transformers' modules,
where these differ.

transformers 5 computes with other tensors than some models publish: the experts of a mixture are
one tensor (`mlp.experts.gate_up_proj`) and are published one by one
(`mlp.experts.0.gate_proj.weight`). Its own rules, by which it reads and writes folders, convert
between the two here. Weights travel and are saved under their published names.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class WeightNames:
    """The published names and layouts of a transformers model's tensors.

    `conversions`: transformers' rules from the published tensors to the model's own; empty for most
    models, whose tensors are published as they are.
    """

    model: Any
    conversions: Sequence[Any]

    @staticmethod
    def of(model: Any) -> "WeightNames":
        """The rules by which a model was read from its folder."""
        conversions = getattr(model, "_weight_conversions", None)
        if conversions is None:  # it was made without a folder
            from transformers.conversion_mapping import get_model_conversion_mapping

            conversions = get_model_conversion_mapping(model, add_legacy=False)
        return WeightNames(model, tuple(conversions))

    def published(self, own: "Mapping[str, Tensor]") -> "Mapping[str, Tensor]":
        """All weights by published names. They are made on access, a layer at a time, if they
        differ from `own`.
        """
        return PublishedWeights(self, own) if self.conversions else own

    def published_shapes(self, own: Shapes) -> dict[str, tuple[int, ...]]:
        """The shapes of all weights by published names."""
        if not self.conversions:
            return {name: tuple(shape) for name, shape in own.items()}
        import torch

        made = self.revert(
            {name: torch.empty(tuple(shape), device="meta") for name, shape in own.items()}
        )
        return {name: tuple(tensor.shape) for name, tensor in made.items()}

    def groups(self, own: Shapes) -> list[tuple[tuple[str, ...], dict[str, tuple[int, ...]]]]:
        """The model's tensors in groups that can be published by themselves, each with the shapes
        of what is published: single tensors, or layers if any rule converts.
        """
        if not self.conversions:
            return [((name,), {name: tuple(shape)}) for name, shape in own.items()]
        groups = []
        for _, inside in groupby(sorted(own, key=_layer), key=_layer):
            names = tuple(inside)
            groups.append((names, self.published_shapes({name: own[name] for name in names})))
        return groups

    def own(self, published: "Mapping[str, Tensor]") -> "Iterator[tuple[str, Tensor]]":
        """The model's tensors, one after another, from published ones, which are read when they are
        needed.
        """
        if not self.conversions:
            yield from published.items()
            return
        for first, rule in self._rules(published).items():
            for name, tensor in rule.convert(
                first, model=self.model, config=self.model.config
            ).items():
                yield name, tensor[0] if isinstance(tensor, list) else tensor

    def revert(self, own: "Mapping[str, Tensor]") -> "Mapping[str, Tensor]":
        """Published tensors of some of the model's; what a rule makes one tensor of must be given
        together.
        """
        from transformers.core_model_loading import revert_weight_conversion

        made: Mapping[str, Tensor] = revert_weight_conversion(self.model, dict(own))
        return made

    def _rules(self, published: "Mapping[str, Tensor]") -> dict[str, Any]:
        """The rule that makes each tensor of the model; as transformers finds it when it reads a
        folder.
        """
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        renamings = [rule for rule in self.conversions if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in self.conversions if isinstance(rule, WeightConverter)]
        by_pattern = {
            pattern: converter for converter in converters for pattern in converter.source_patterns
        }
        known, prefix = self.model.state_dict(), self.model.base_model_prefix
        rules: dict[str, Any] = {}
        for name in sorted(published, key=dot_natural_key):  # experts in the order of their numbers
            own, pattern = rename_source_key(name, renamings, converters, prefix, known)
            # A renaming for older folders must not rename what the model has as it is.
            if own not in known and name in known:
                own, pattern = name, None
            if own not in rules:
                rules[own] = (
                    WeightRenaming(name, own) if pattern is None else deepcopy(by_pattern[pattern])
                )
            rules[own].add_tensor(own, name, pattern or name, partial(published.__getitem__, name))
        return rules


class MadeOnAccess(Mapping[str, "Tensor"]):
    """Weights that are made when they are read, of other tensors."""

    @property
    @abstractmethod
    def sources(self) -> "Iterable[Tensor]":
        """The tensors that they are made of, and change with."""


class PublishedWeights(MadeOnAccess):
    """A model's weights by their published names. Only one layer's are held beside the model's own
    tensors.
    """

    def __init__(self, names: WeightNames, own: "Mapping[str, Tensor]") -> None:
        self._names = names
        self._own = own
        self._layer_of: dict[str, str] = {}
        for inside, shapes in names.groups({name: own[name].shape for name in own}):
            self._layer_of |= dict.fromkeys(shapes, _layer(inside[0]))
        self._held: tuple[str, Mapping[str, Tensor]] = ("", {})

    def __getitem__(self, name: str) -> "Tensor":
        layer = self._layer_of[name]
        if self._held[0] != layer or name not in self._held[1]:
            inside = {
                own: tensor.detach() for own, tensor in self._own.items() if _layer(own) == layer
            }
            self._held = (layer, self._names.revert(inside))
        return self._held[1][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layer_of)

    def __len__(self) -> int:
        return len(self._layer_of)

    @property
    def sources(self) -> "Iterable[Tensor]":
        """See `MadeOnAccess`: the model's own tensors."""
        return self._own.values()

    def __reduce__(self) -> tuple[type[dict[str, "Tensor"]], tuple[dict[str, "Tensor"]]]:
        return dict, (dict(self),)


def _layer(name: str) -> str:
    """The layer that a weight belongs to: its name up to the first number.

    Example: `model.layers.3` of `model.layers.3.mlp.experts.0.gate_proj.weight`, and "" of
    `lm_head.weight`.
    """
    parts = name.split(".")
    return ".".join(parts[: next((i for i, part in enumerate(parts) if part.isdigit()), -1) + 1])


__all__ = ["MadeOnAccess", "PublishedWeights", "WeightNames"]
