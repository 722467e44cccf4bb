"""The trivial sharding: all weights on one device."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from agentrl.errors import ConfigError
from agentrl.models.attention_check import check_attention
from agentrl.placement.mesh import ONE_RANK, Mesh
from agentrl.protocols.weight_source import in_format
from agentrl.trainers.compute.forward import DeviceMicroBatch, states_together
from agentrl.trainers.compute.fp8 import use_fp8
from agentrl.trainers.rank.checkpoint import Moments
from agentrl.trainers.rank.gradient_norms import squares
from agentrl.trainers.rank.host_buffers import HostBuffers
from agentrl.trainers.rank.model import Predictor, begin, in_bfloat16, make_model
from agentrl.trainers.rank.optimizer import (
    adamw,
    apply,
    check_moments,
    make_state,
    moments_of,
    set_moments,
)
from agentrl.trainers.rank.origin import take_memory
from agentrl.trainers.rank.tensor_files import Part
from agentrl.trainers.rank.trainable import TrainableParameters, model_tensors, trainable_tensors
from agentrl.trainers.spec import RankInfo, TrainerSpec

if TYPE_CHECKING:
    from agentrl.trainers.local import LocalTrainer


def open_sharding(spec: TrainerSpec, rank_info: RankInfo) -> "OneDevice":
    """Load the model and make the optimizer."""
    config: LocalTrainer.Config = spec.config
    device = device_named(config.device)
    model, trainable, origin = make_model(spec, autocast=in_bfloat16(config, device))
    if config.fp8:
        use_fp8(model.model, device)
    take_memory(model, device)
    sharding = OneDevice(device, model, trainable, adamw(model, config))
    begin(sharding, origin)
    return sharding


@dataclass(frozen=True, slots=True)
class OneDevice:
    """`Sharding` over one rank."""

    device: torch.device
    model: Predictor
    trainable: TrainableParameters
    optimizer: torch.optim.Optimizer
    rank: int = 0
    mesh: Mesh = ONE_RANK
    context: None = None
    host: HostBuffers = field(default_factory=HostBuffers)

    def prepare(self) -> None:
        """See `Sharding`."""
        with torch.no_grad():
            self.model(None)
            # Here alone: ranks that share a model would need more memory for it than for their
            # shares.
            model = self.model.model
            check_attention(model, partial(states_together, model))

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

    def gradient_squares(self) -> Mapping[str, Tensor]:
        """See `Sharding`."""
        return squares(
            {name: p.grad for name, p in self.model.named_parameters() if p.requires_grad},
            self.device,
        )

    def update(self, lr: float, largest: float | None) -> float:
        """See `Sharding`."""
        norm = float(
            torch.nn.utils.get_total_norm(
                p.grad for p in self.model.parameters() if p.grad is not None
            )
        )
        # Readers of the tensors themselves see by their counts of changes that this is another
        # version (`DirectShipment`), and fused kernels do not count.
        increment_version(p for p in self.model.parameters() if p.requires_grad)
        apply(self.optimizer, norm, lr, largest)
        return norm

    def gather_all(self, *, everywhere: bool = False) -> Mapping[str, Tensor]:
        """The tensors themselves, not copied."""
        return {name: tensor.detach() for name, tensor in trainable_tensors(self.trainable).items()}

    def gather(
        self, names: Sequence[str], to: Collection[int], dtype: torch.dtype | None
    ) -> Mapping[str, Tensor]:
        """See `Sharding`."""
        tensors = model_tensors(self.trainable.model)
        return {name: in_format(tensors[name].detach(), dtype) for name in names}

    def broadcast(self, tensor: Tensor) -> Tensor:
        """See `Sharding`."""
        return tensor

    def local_parts(self, names: Iterable[str]) -> Mapping[str, Part]:
        """See `Sharding`."""
        tensors = model_tensors(self.trainable.model)
        return {name: _part(name, tensors[name]) for name in names}

    def after_load(self) -> None:
        """See `Sharding`. Nothing depends on the weights."""

    def moments(self) -> Moments:
        """See `Sharding`."""
        return moments_of(self.optimizer, trainable_tensors(self.trainable), _part)

    def new_moments(self, names: Sequence[str]) -> Moments:
        """See `Sharding`."""
        make_state(self.optimizer)
        return check_moments(self.moments(), names)

    def set_moments(self, moments: Moments) -> None:
        """See `Sharding`."""
        set_moments(self.optimizer, trainable_tensors(self.trainable), moments)

    def sleep(self) -> None:
        """See `Sharding`."""
        self.clear()
        if self.device.type != "cpu":
            self.host.sleep(self.model, self.optimizer)

    def wake(self) -> None:
        """See `Sharding`."""
        if self.device.type != "cpu":
            self.host.wake(self.model, self.optimizer, self.device)

    def close(self) -> None:
        """See `Sharding`. There are no other ranks."""


def _part(name: str, tensor: Tensor) -> Part:
    return Part(tensor.shape, 0, tensor.detach())


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
        raise ConfigError(
            f'trainer.device {name!r} is no torch device: write "auto", "cpu" or "cuda:0"'
        ) from error
