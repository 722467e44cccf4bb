"""LoRA: trains small adapters beside a frozen model (arXiv:2106.09685), with the library peft."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.rollout.seeds import derive_seed
from agentrl.trainers.checkpoint import read_checkpoint, save_model
from agentrl.trainers.settings import LoraSettings
from agentrl.weights.low_rank import Factors, LowRank, weight_files

ADAPTER = "adapter"
"""The folder in a checkpoint that holds the adapters, as peft writes them."""
_FACTOR = re.compile(r"(.+)\.lora_([AB])\.default\.weight")


@dataclass(frozen=True, slots=True)
class Adapters:
    """`TrainableParameters`: low-rank adapters; the model that they were added to is frozen.

    The published weights are the model's original folder and the adapters (`LowRank`). A checkpoint is a Hugging Face
    folder with the adapters merged into the weights, from which any engine or trainer can start. A resumed run loads
    its subfolder `adapter`, as can any program that uses peft.
    """

    model: Any
    origin: Path
    shapes: Mapping[str, torch.Size]
    config: Any

    @staticmethod
    def add(model: Any, origin: Path, settings: LoraSettings) -> "Adapters":
        """Freeze a model that was loaded from the folder `origin`, and add adapters that change nothing yet.

        Raises:
            ConfigError: peft is missing, the model has none of the targets, or the folder lacks their weights.
        """
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError as error:
            raise ConfigError(f"trainer.lora needs peft ({error}): pip install 'agentrl[lora]'") from error
        targets = settings.targets if isinstance(settings.targets, str) else list(settings.targets)
        config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, lora_dropout=0.0, target_modules=targets)
        try:
            inject_adapter_in_model(config, model)
        except ValueError as error:
            raise ConfigError(f"trainer.lora.targets={targets}: {error}") from error
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        _begin(trained)
        adapters = Adapters(model, origin, {name: p.shape for name, p in trained.items()}, config)
        missing = adapters.factors(trained).keys() - weight_files(origin).keys()
        if missing:
            raise ConfigError(
                f"trainer.lora.targets={targets} names layers whose weights {origin} does not hold under their own "
                f"names: {sorted(missing)[:5]}; name others, as [q_proj, v_proj]"
            )
        return adapters

    def factors(self, whole: Mapping[str, Tensor]) -> Mapping[str, Factors]:
        """The update of each weight that has an adapter."""
        pairs: dict[str, dict[str, Tensor]] = {}
        for name, tensor in whole.items():
            if (match := _FACTOR.fullmatch(name)) is None:
                raise ConfigError(f"trainer.lora supports adapters of linear layers only, and {name} is not one")
            pairs.setdefault(f"{match[1]}.weight", {})[match[2]] = tensor.detach()
        scale = self.config.lora_alpha / self.config.r
        return {name: Factors(pair["A"], pair["B"], scale) for name, pair in pairs.items()}

    def weights(self, whole: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `TrainableParameters`."""
        return LowRank(self.origin, self.factors(whole))

    def save(self, folder: Path, whole: Mapping[str, Tensor]) -> None:
        """See `TrainableParameters`."""
        save_model(folder, self.model, self.origin, self.weights(whole))
        self.config.save_pretrained(str(folder / ADAPTER))
        adapters = {_in_peft(name): tensor.detach().cpu().contiguous() for name, tensor in whole.items()}
        save_file(adapters, folder / ADAPTER / "adapter_model.safetensors")

    def read(self, folder: Path) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
        """See `TrainableParameters`."""
        names = {_in_peft(name): name for name in self.shapes}
        shapes = {saved: self.shapes[name] for saved, name in names.items()}
        adapters, state = read_checkpoint(folder, shapes, weights_in=ADAPTER)
        return {names[saved]: tensor for saved, tensor in adapters.items()}, state


def _begin(trained: Mapping[str, Tensor]) -> None:
    """Set B to zero and A uniformly within 1 / sqrt(inputs), as peft does, but equally on all ranks and in all runs."""
    with torch.no_grad():
        for name, tensor in trained.items():
            if ".lora_B." in name:
                tensor.zero_()
                continue
            bound = tensor.shape[-1] ** -0.5
            generator = torch.Generator().manual_seed(derive_seed(0, "lora", name))
            tensor.copy_(torch.empty(tensor.shape).uniform_(-bound, bound, generator=generator))


def _in_peft(name: str) -> str:
    """The name that peft gives a tensor in a file."""
    return "base_model.model." + name.replace(".default.weight", ".weight")
