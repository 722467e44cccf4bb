"""Weights that differ from a model folder by low-rank updates, as a LoRA trainer publishes them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from agentrl.errors import ConfigError
from agentrl.models.source import weight_files as files_of
from agentrl.models.weight_names import MadeOnAccess
from agentrl.weights.shipment import shipment_of

if TYPE_CHECKING:
    from torch import Tensor


class Factors(NamedTuple):
    """The update of one weight, `scale * B @ A`: A has the shape (rank, inputs), B (outputs, rank),
    both float32 (LoRA, arXiv:2106.09685, section 4.1; `scale` is its alpha / rank).
    """

    A: "Tensor"
    B: "Tensor"
    scale: float


@dataclass(frozen=True, eq=False)
class LowRank(MadeOnAccess):
    """All weights of a model by their Hugging Face names: those of the folder `base`, plus
    `factors`.

    As a mapping, it gives the merged weights: each is read from the folder on access, as float32 in
    the CPU's memory; weights that `factors` does not name are the folder's own. Code that knows
    this class can use the factors alone: only they are pickled. Factors are valid until the
    trainer's next step.
    """

    base: Path
    factors: Mapping[str, Factors]
    _opened: dict[Path, Any] = field(init=False, repr=False, default_factory=dict)
    """The files that were read from: the header of a large one takes long to read."""

    def __getitem__(self, name: str) -> "Tensor":
        from safetensors import safe_open

        path = self._files[name]
        if path not in self._opened:
            self._opened[path] = safe_open(path, framework="pt")
        weight: Tensor = self._opened[path].get_tensor(name).float()
        if name not in self.factors:
            return weight
        A, B, scale = self.factors[name]
        return weight.addmm(B.detach().cpu(), A.detach().cpu(), alpha=scale)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    @property
    def sources(self) -> Iterator["Tensor"]:
        """See `MadeOnAccess`: the factors, as the files of the folder stay the same."""
        for A, B, _ in self.factors.values():
            yield A
            yield B

    def misfits(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """The weights whose factors do not fit the shapes of a model's weights."""
        return [
            name
            for name, (A, B, _) in self.factors.items()
            if (B.shape[0], A.shape[1]) != shapes.get(name) or B.shape[1] != A.shape[0]
        ]

    def is_of(self, folder: Path) -> bool:
        """True if it is an update of the weights in this folder."""
        return self.base.resolve() == folder.resolve()

    def __reduce__(self) -> tuple[type["LowRank"], tuple[Path, Mapping[str, Factors]]]:
        return LowRank, (self.base, self.factors)

    @cached_property
    def _files(self) -> Mapping[str, Path]:
        return weight_files(self.base)


def low_rank_of(weights: Mapping[str, "Tensor"]) -> LowRank | None:
    """The update that weights or a shipment consist of; None if they are whole weights."""
    unpacked = shipment_of(weights).unpacked
    return unpacked if isinstance(unpacked, LowRank) else None


def weight_files(folder: Path) -> Mapping[str, Path]:
    """The safetensors file of each weight of a Hugging Face folder.

    Raises:
        ConfigError: there are none.
    """
    from safetensors import safe_open

    found: dict[str, Path] = {}
    for file in files_of(folder):
        with safe_open(file, framework="pt") as tensors:
            found |= dict.fromkeys(tensors.keys(), file)
    if not found:
        raise ConfigError(
            f"{folder} has no *.safetensors: load the model with transformers and save it again by"
            " save_pretrained"
        )
    return found
