"""The torch code of a rank of `FsdpTrainer`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from agentrl.trainers.checkpoint import kept_by_another, save_state
from agentrl.trainers.forward import DeviceMicroBatch
from agentrl.trainers.model import Predictor, in_bfloat16, load_model
from agentrl.trainers.optimizer import adamw, apply, move
from agentrl.trainers.process_group import join, max_of_ranks, sum_of_ranks
from agentrl.trainers.spec import RankInfo, TrainerSpec
from agentrl.trainers.trainable import TrainableParameters, trainable_tensors

if TYPE_CHECKING:
    from agentrl.trainers.fsdp import FsdpTrainer

_OPTIMIZER = "optimizer"
"""The folder in a checkpoint where the ranks keep their shards of the optimizer."""


def open_sharding(spec: TrainerSpec, rank_info: RankInfo) -> "FullyShard":
    """Load the model, shard it, make the optimizer."""
    config = cast("FsdpTrainer.Config", spec.config)
    device = join(rank_info)
    model, trainable = load_model(spec, device)
    _shard(model, config, device, rank_info.world_size)
    optimizer = adamw(model, config)
    home = torch.device("cpu") if config.cpu_offload else device
    return FullyShard(rank_info.rank, device, home, model, trainable, optimizer, config.keep_gradients)


def _shard(model: Predictor, config: "FsdpTrainer.Config", device: torch.device, world_size: int) -> None:
    """Shard each block of the model alone, and the rest (embeddings, head) together, so that tied weights stay tied."""
    low = in_bfloat16(config, device)
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (world_size,)),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if low else None, reduce_dtype=torch.float32 if low else None
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type != "cpu") if config.cpu_offload else OffloadPolicy(),
        "reshard_after_forward": config.reshard_after_forward,
    }
    blocks = set(model.model._no_split_modules or ())
    for module in model.model.modules():
        if type(module).__name__ in blocks:
            fully_shard(module, **options)
    fully_shard(model, **options)
    for module in _sharded(model):
        module.set_gradient_divide_factor(1.0)  # the gradients of the ranks are summed, not averaged
        module.set_force_sum_reduction_for_comms(True)


def _sharded(model: Predictor) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _reshard(model: Predictor) -> None:
    for module in _sharded(model):
        module.reshard()


@dataclass(frozen=True, slots=True)
class FullyShard:
    """`Sharding` with FSDP2. `home`: the device of its shards while it is awake."""

    rank: int
    device: torch.device
    home: torch.device
    model: Predictor
    trainable: TrainableParameters
    optimizer: torch.optim.AdamW
    keep_gradients: bool

    def predict(self, samples: DeviceMicroBatch, *, entropy: bool = False) -> Tensor:
        """See `Sharding`."""
        predicted: Tensor = self.model(samples, entropy=entropy)
        if not torch.is_grad_enabled():  # otherwise the backward pass frees the gathered weights
            _reshard(self.model)
        return predicted

    def clear(self) -> None:
        """See `Sharding`."""
        self.optimizer.zero_grad(set_to_none=True)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """See `Sharding`. Gradients are summed over the ranks after each micro-batch, or after the last one."""
        cast(FSDPModule, self.model).set_requires_gradient_sync(last or not self.keep_gradients)
        loss.backward()  # type: ignore[no-untyped-call]

    def sum(self, values: Tensor) -> Tensor:
        """See `Sharding`."""
        return sum_of_ranks(values)

    def max(self, value: Tensor) -> Tensor:
        """See `Sharding`."""
        return max_of_ranks(value)

    def update(self, lr: float, largest: float | None) -> float:
        """See `Sharding`."""
        total = torch.nn.utils.get_total_norm(p.grad for p in self.model.parameters() if p.grad is not None)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        apply(self.optimizer, norm, lr, largest)
        return norm

    def weights(self) -> Mapping[str, Tensor]:
        """All weights on rank 0, in CPU memory; the other ranks take part, but return none."""
        whole = self._whole()
        return self.trainable.weights(whole) if self.rank == 0 else {}

    def save(self, folder: Path, step: int) -> None:
        """Rank 0 writes the weights as a Hugging Face folder; each rank writes its shards of the optimizer."""
        whole = self._whole()
        if self.rank == 0:
            self.trainable.save(folder, whole)
        dist.barrier()
        dcp.save(get_optimizer_state_dict(self.model, self.optimizer), checkpoint_id=folder / _OPTIMIZER)  # type: ignore[attr-defined]
        if self.rank == 0:
            save_state(folder, {"step": step, "optimizer": _OPTIMIZER})
        dist.barrier()

    def load(self, folder: Path) -> int:
        """Any number of ranks can load what any number of ranks has saved."""
        saved, state = self.trainable.read(folder)
        if state["optimizer"] != _OPTIMIZER:
            raise kept_by_another(folder, "fsdp")
        options = StateDictOptions(full_state_dict=True, strict=False)  # a tied weight is saved under one name only
        set_model_state_dict(self.model.model, cast(Any, saved), options=options)
        optimizer = get_optimizer_state_dict(self.model, self.optimizer)
        dcp.load(optimizer, checkpoint_id=folder / _OPTIMIZER)  # type: ignore[attr-defined]
        set_optimizer_state_dict(self.model, self.optimizer, optim_state_dict=optimizer)
        return int(state["step"])

    def sleep(self) -> None:
        """See `Sharding`."""
        move(self.model, self.optimizer, torch.device("cpu"))

    def wake(self) -> None:
        """See `Sharding`."""
        move(self.model, self.optimizer, self.home)

    def close(self) -> None:
        """See `Sharding`."""
        dist.destroy_process_group()

    def _whole(self) -> dict[str, Tensor]:
        """The trainable tensors, gathered one by one; only rank 0 keeps them, in CPU memory."""
        whole: dict[str, Tensor] = {}
        for name, tensor in trainable_tensors(self.trainable).items():
            gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self.rank == 0:
                whole[name] = gathered.detach().cpu()
        return whole
