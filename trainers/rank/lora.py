"""LoRA: trains small adapters beside a frozen model (arXiv:2106.09685), with the library peft."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.models.vision import language_model, part_of, sees
from agentrl.models.weight_names import WeightNames
from agentrl.package.distribution import install_command
from agentrl.protocols.weight_source import LowRankBase, WeightUnit
from agentrl.rollout.seeds import derive_seed
from agentrl.trainers.rank.tensor_files import Piece, Stored, TensorFiles
from agentrl.trainers.rank.trainable import write_model_files
from agentrl.trainers.settings import LoraSettings
from agentrl.weights.bundle import weight_shapes
from agentrl.weights.low_rank import Factors, LowRank, weight_files

if TYPE_CHECKING:
    from agentrl.trainers.rank.sharding import Sharding

ADAPTER = "adapter"
"""The folder in a checkpoint that holds the adapters, as peft writes them."""
_FACTOR = re.compile(r"(.+)\.lora_([AB])\.default\.weight")


@dataclass(frozen=True, slots=True)
class Adapters:
    """`TrainableParameters`: low-rank adapters; the model that they were added to is frozen.

    The published weights are the model's original folder and the adapters (`LowRank`). A checkpoint
    is a Hugging Face folder with the adapters merged into the weights, from which any engine or
    trainer can start. A resumed run loads its subfolder `adapter`, as can any program that uses
    peft.
    """

    model: Any
    origin: Path
    shapes: Mapping[str, torch.Size]
    stored: Sequence[Stored]
    config: Any
    files: Mapping[str, str]
    """The names that the model's weights have in the folder, where they are others."""
    weights_in: str = ADAPTER
    stem: str = "adapter_model"

    @staticmethod
    def add(
        model: Any, origin: Path, settings: LoraSettings, weights: Sequence[Stored] = ()
    ) -> "Adapters":
        """Freeze a model of the folder `origin`, and add adapters to its language model, whose
        values `first_factor` gives. `weights`: the tensors of the folder.

        Raises:
            ConfigError: peft is missing, the model lacks one of the targets, or it is not linear or
                is the head, or the folder lacks their weights.
        """
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError as error:
            raise ConfigError(
                f"trainer.lora needs peft ({error}): {install_command('lora')}"
            ) from error
        _check_linear(model)
        if settings.targets != "all-linear":
            _check_targets(model, settings.targets)
        targets = (
            _language_targets(model, settings.names)
            if sees(model.config)
            else _linear_layers(model)
            if settings.targets == "all-linear"
            else list(settings.targets)
        )
        config = LoraConfig(
            r=settings.rank, lora_alpha=settings.alpha, lora_dropout=0.0, target_modules=targets
        )
        inject_adapter_in_model(config, model)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        shapes = {name: p.shape for name, p in trained.items()}
        # In files, peft prefixes names and leaves out the adapter's own name, "default".
        stored = [
            Stored(f"base_model.model.{name.replace('.default.weight', '.weight')}", shape, name)
            for name, shape in shapes.items()
        ]
        in_folder = weight_files(origin)
        files = {
            one.of: one.name for one in weights if one.of not in in_folder and one.name in in_folder
        }
        adapters = Adapters(model, origin, shapes, stored, config, files)
        missing = adapters.factors(trained).keys() - in_folder.keys()
        if missing:
            raise ConfigError(
                f"trainer.lora.targets={targets} names layers whose weights {origin} does not hold"
                f" under their own names: {sorted(missing)[:5]}; name others, as [q_proj, v_proj]"
            )
        return adapters

    @property
    def update(self) -> LowRankBase | None:
        """See `WeightSource`."""
        scale = self.config.lora_alpha / self.config.r
        adapted = {self._split(name)[0] for name in self.shapes}
        return LowRankBase(self.origin.absolute(), dict.fromkeys(sorted(adapted), scale))

    @property
    def units(self) -> Sequence[WeightUnit]:
        """See `WeightSource`."""
        return [
            WeightUnit((name,), {"/".join(self._split(name)): tuple(shape)})
            for name, shape in self.shapes.items()
        ]

    def published(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `TrainableParameters`."""
        return {"/".join(self._split(name)): tensor for name, tensor in own.items()}

    def factors(self, whole: Mapping[str, Tensor]) -> Mapping[str, Factors]:
        """The update of each weight that has an adapter."""
        pairs: dict[str, dict[str, Tensor]] = {}
        for name, tensor in whole.items():
            weight, side = self._split(name)
            pairs.setdefault(weight, {})[side] = tensor.detach()
        scale = self.config.lora_alpha / self.config.r
        return {name: Factors(pair["A"], pair["B"], scale) for name, pair in pairs.items()}

    def _split(self, name: str) -> tuple[str, str]:
        """The weight of the folder that a factor adapts, and the factor's side, A or B.

        Example: `layers.0.q_proj.lora_A.default.weight` is (`layers.0.q_proj.weight`, `A`).
        """
        if (match := _FACTOR.fullmatch(name)) is None:
            raise ConfigError(
                f"trainer.lora supports adapters of linear layers only, and {name} is not one"
            )
        weight, side = f"{match[1]}.weight", match[2]
        return self.files.get(weight, weight), side

    def weights(self, whole: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `TrainableParameters`."""
        return LowRank(self.origin, self.factors(whole))

    def rest(self, sharding: "Sharding") -> Callable[[Path], None]:
        """See `TrainableParameters`. Each rank merges some of the weights, one after another."""
        rank, ranks = sharding.rank, sharding.mesh.world_size
        whole = {
            name: tensor.detach().cpu().clone()
            for name, tensor in sharding.gather_all(everywhere=True).items()
        }
        merged = LowRank(self.origin, self.factors(whole))

        def write(folder: Path) -> None:
            shapes = {name: torch.Size(shape) for name, shape in weight_shapes(self.origin).items()}
            files = TensorFiles.planned(folder, shapes)
            for name in list(shapes)[rank::ranks]:
                files.write(Piece(name, 0, merged[name].flatten()))
            if rank == 0:
                files.write_headers()
                write_model_files(folder, self.model, self.origin)
                self.config.save_pretrained(str(folder / ADAPTER))
            files.to_disk()

        return write


def _check_linear(model: Any) -> None:
    """GPT-2's layers hold their weights transposed, and peft their adapters as of linear layers."""
    from transformers.pytorch_utils import Conv1D

    if any(isinstance(module, Conv1D) for module in model.modules()):
        raise ConfigError(
            f"trainer.lora supports linear layers only, and those of {type(model).__name__} are"
            " Conv1D: leave out trainer.lora to train all weights"
        )


def _check_targets(model: Any, targets: Sequence[str]) -> None:
    """Each target has to name linear layers, and not the head, whose module computes logprobs of
    the weight alone.
    """
    where = f"trainer.lora.targets={list(targets)}"
    layers, head = dict(model.named_modules()), model.get_output_embeddings()
    linear = {
        name.rpartition(".")[2]
        for name, layer in layers.items()
        if isinstance(layer, torch.nn.Linear) and layer is not head and part_of(name) == "language"
    }
    known = f"name linear layers by the ends of their names, such as {', '.join(sorted(linear))}"
    if not targets:
        raise ConfigError(f"{where} names no layer: {known}; or write all-linear")
    for target in targets:
        named = [name for name in layers if name == target or name.endswith(f".{target}")]
        if not named:
            raise ConfigError(
                f"{where}: {target!r} is not found in {type(model).__name__}: {known}"
            )
        if sees(model.config) and all(part_of(name) != "language" for name in named):
            raise ConfigError(
                f"{where}: {target} is in the tower or the projector alone, and adapters are of the"
                f" language model only: {known}"
            )
        for name in named:
            if layers[name] is head:
                raise ConfigError(
                    f"{where}: {name} is the model's head, which can have no adapters: {known}"
                )
            if not isinstance(layers[name], torch.nn.Linear):
                kind = type(layers[name]).__name__
                raise ConfigError(
                    f"{where}: adapters are of linear layers only, and {name} is of type {kind}:"
                    f" {known}"
                )


def _linear_layers(model: Any) -> str | list[str]:
    """The name that peft has for all linear layers; or, of a mixture of experts, the linear layers
    outside of its MLPs.

    For a mixture, peft would add adapters of the experts too, which are no linear layers in
    transformers 5 and have other names in the model's folder.
    """
    if not WeightNames.of(model).conversions:
        return "all-linear"
    linear = [
        name
        for name, module in model.base_model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    own = ((name, name.rpartition(".")[2]) for name in linear if ".mlp." not in name)
    # A last part that is a number would name layers too (`layers.0`): write the whole name.
    return sorted({name if last.isdigit() else last for name, last in own})


def _language_targets(model: Any, names: Sequence[str]) -> str:
    """A pattern of the linear layers of the language model in a model that sees, of all or of those
    whose names end so.
    """
    inside = language_model(model)
    place = next(name for name, module in model.named_modules() if module is inside)
    linear = {
        name.rpartition(".")[2]
        for name, module in inside.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    ends = "|".join(re.escape(name) for name in names or sorted(linear))
    return rf"{re.escape(place)}\.(.*\.)?({ends})"


def first_factor(name: str, shape: torch.Size) -> Tensor:
    """A: uniform within 1 / sqrt(inputs), as peft does, but equal on all ranks and in all runs. B:
    zero.
    """
    if ".lora_B." in name:
        return torch.zeros(shape)
    bound = shape[-1] ** -0.5
    generator = torch.Generator().manual_seed(derive_seed(0, "lora", name))
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
