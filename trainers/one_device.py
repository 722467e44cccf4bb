"""The trivial sharding: all weights on one device."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.trainers.checkpoint import kept_by_another, save_state
from agentrl.trainers.forward import DeviceMicroBatch
from agentrl.trainers.model import Predictor, in_bfloat16, load_model
from agentrl.trainers.optimizer import adamw, apply, move
from agentrl.trainers.spec import RankInfo, TrainerSpec
from agentrl.trainers.trainable import TrainableParameters, trainable_tensors

if TYPE_CHECKING:
    from agentrl.trainers.local import LocalTrainer


def open_sharding(spec: TrainerSpec, rank_info: RankInfo) -> "OneDevice":
    """Load the model and make the optimizer."""
    config = cast("LocalTrainer.Config", spec.config)
    device = device_named(config.device)
    model, trainable = load_model(spec, device, autocast=in_bfloat16(config, device))
    optimizer = adamw(model, config)
    return OneDevice(device, model, trainable, optimizer)


@dataclass(frozen=True, slots=True)
class OneDevice:
    """`Sharding` over one rank."""

    device: torch.device
    model: Predictor
    trainable: TrainableParameters
    optimizer: torch.optim.AdamW

    def predict(self, samples: DeviceMicroBatch, *, entropy: bool = False) -> Tensor:
        """See `Sharding`."""
        predicted: Tensor = self.model(samples, entropy=entropy)
        return predicted

    def clear(self) -> None:
        """See `Sharding`."""
        self.optimizer.zero_grad(set_to_none=True)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """See `Sharding`."""
        loss.backward()  # type: ignore[no-untyped-call]

    def sum(self, values: Tensor) -> Tensor:
        """See `Sharding`."""
        return values

    def max(self, value: Tensor) -> Tensor:
        """See `Sharding`."""
        return value

    def update(self, lr: float, largest: float | None) -> float:
        """See `Sharding`."""
        norm = float(torch.nn.utils.get_total_norm(p.grad for p in self.model.parameters() if p.grad is not None))
        apply(self.optimizer, norm, lr, largest)
        return norm

    def weights(self) -> Mapping[str, Tensor]:
        """The float32 weights themselves, not copied."""
        return self.trainable.weights(self._whole())

    def save(self, folder: Path, step: int) -> None:
        """See `Sharding`."""
        self.trainable.save(folder, self._whole())
        save_state(folder, {"step": step, "optimizer": self.optimizer.state_dict()["state"]})

    def load(self, folder: Path) -> int:
        """See `Sharding`."""
        saved, state = self.trainable.read(folder)
        if not isinstance(state["optimizer"], dict):
            raise kept_by_another(folder, "local")
        with torch.no_grad():
            for name, tensor in self._whole().items():
                tensor.copy_(saved[name])
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state["optimizer"], "param_groups": groups})
        return int(state["step"])

    def sleep(self) -> None:
        """See `Sharding`."""
        move(self.model, self.optimizer, torch.device("cpu"))

    def wake(self) -> None:
        """See `Sharding`."""
        move(self.model, self.optimizer, self.device)

    def close(self) -> None:
        """See `Sharding`. There are no other ranks."""

    def _whole(self) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in trainable_tensors(self.trainable).items()}


def device_named(name: str) -> torch.device:
    """A torch device by its name; "auto" is the first GPU, else the CPU.

    Raises:
        ConfigError: there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f'trainer.device {name!r} is no torch device: write "auto", "cpu" or "cuda:0"') from error
