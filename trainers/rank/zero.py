"""The torch and DeepSpeed code of a rank of `DeepSpeedTrainer`."""

import logging
import math
import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from agentrl.errors import ConfigError
from agentrl.package.distribution import install_command
from agentrl.placement.footprint import GRADIENTS_AT_ONCE
from agentrl.placement.mesh import Mesh
from agentrl.protocols.weight_source import in_format
from agentrl.trainers.compute.forward import DeviceMicroBatch
from agentrl.trainers.rank.checkpoint import Moments
from agentrl.trainers.rank.model import Predictor, begin, in_bfloat16, make_model
from agentrl.trainers.rank.optimizer import adamw
from agentrl.trainers.rank.origin import replace_parameters, take_memory
from agentrl.trainers.rank.process_group import broadcast, join, max_of_ranks, sum_of_ranks
from agentrl.trainers.rank.tensor_files import Part
from agentrl.trainers.rank.trainable import TrainableParameters, model_tensors, trainable_tensors
from agentrl.trainers.spec import RankInfo, TrainerSpec

if TYPE_CHECKING:
    from agentrl.trainers.deepspeed import DeepSpeedTrainer

_UPDATED_AT_ONCE = 50_000_000
"""Elements whose gradients ZeRO 3 copies at a time for an update; by default all that a rank has,
up to a billion.
"""


def open_sharding(spec: TrainerSpec, rank_info: RankInfo) -> "Zero":
    """Make the model, pass it to DeepSpeed, and read its weights.

    With ZeRO 3, each parameter is divided over the ranks as soon as it has memory, before it has
    values. ZeRO 1 and 2 keep all weights on each rank.
    """
    config: DeepSpeedTrainer.Config = spec.config
    deepspeed = _import_deepspeed()
    device = join(rank_info)
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    model, trainable, origin = make_model(spec, autocast=in_bfloat16(config, device))
    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    settings = _deepspeed_settings(config, model)
    if config.zero_stage == 3:
        _take_shares(deepspeed, model, device, settings)
    else:
        take_memory(model, device)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model, config), config=settings)
    sharding = Zero(rank_info, device, engine, trainable)
    begin(sharding, origin)
    return sharding


def _take_shares(
    deepspeed: Any, model: Predictor, device: torch.device, settings: Mapping[str, Any]
) -> None:
    """Give each parameter memory and divide it over the ranks, one after another."""

    def divided(parameter: nn.Parameter) -> nn.Parameter:
        made = nn.Parameter(
            torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad
        )
        deepspeed.zero.Init(
            module=nn.ParameterList([made]), config_dict_or_path=settings, dtype=torch.float32
        )
        return made

    replace_parameters(model, divided)
    for owner in model.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            setattr(owner, name, buffer.to(device))


def _import_deepspeed() -> Any:
    """Import the library; an environment variable chooses its device."""
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        import deepspeed
    except ImportError as error:
        raise ConfigError(
            f"trainer=deepspeed needs DeepSpeed ({error}): {install_command('deepspeed')}"
        ) from error
    deepspeed.utils.logger.setLevel(logging.ERROR)  # its warnings are about the choices made here
    # About names that DeepSpeed uses.
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    if on_cpu:  # takes minutes to compile at the first start, and is for inference only
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _deepspeed_settings(config: "DeepSpeedTrainer.Config", model: Predictor) -> dict[str, Any]:
    """DeepSpeed's own settings. Without `gradient_clipping` it would clip by 1.0."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    bucket = min(GRADIENTS_AT_ONCE, trained)
    to_cpu = {"device": "cpu"} if config.offload else {"device": "none"}
    zero: dict[str, Any] = {
        "stage": config.zero_stage,
        "offload_optimizer": to_cpu,
        "reduce_bucket_size": bucket,
    }
    if config.zero_stage == 3:
        zero |= {"offload_param": to_cpu, "sub_group_size": _UPDATED_AT_ONCE}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.max_grad_norm or 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }


@dataclass(frozen=True, slots=True)
class Zero:
    """`Sharding` with DeepSpeed."""

    rank_info: RankInfo
    device: torch.device
    engine: Any
    trainable: TrainableParameters
    context: None = None

    @property
    def rank(self) -> int:
        """See `Sharding`."""
        return self.rank_info.rank

    @property
    def mesh(self) -> Mesh:
        """See `Sharding`."""
        return self.rank_info.mesh

    def prepare(self) -> None:
        """See `Sharding`."""
        with torch.no_grad():
            self.engine(None)

    def predict(self, samples: DeviceMicroBatch, *, entropy: bool = False) -> Tensor:
        """See `Sharding`."""
        predicted: Tensor = self.engine(samples, entropy=entropy)
        return predicted

    def clear(self) -> None:
        """See `Sharding`."""
        self.engine.optimizer.zero_grad(set_to_none=True)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """See `Sharding`. DeepSpeed averages over ranks, so the loss is scaled to the sum."""
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss * self.mesh.data_parallel_size, scale_wrt_gas=False)

    def sum(self, values: Tensor) -> Tensor:
        """See `Sharding`."""
        return sum_of_ranks(values)

    def max(self, value: Tensor) -> Tensor:
        """See `Sharding`."""
        return max_of_ranks(value)

    def gradient_squares(self) -> Mapping[str, Tensor]:
        """See `Sharding`. DeepSpeed has the gradients in buffers of its own, of several parameters
        each.
        """
        return {}

    def update(self, lr: float, largest: float | None) -> float:
        """See `Sharding`. DeepSpeed scales by the same rule, and got `largest` when it started."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()
        return (
            float(self.engine.get_global_grad_norm())
            if self.engine.was_step_applied()
            else math.nan
        )

    def gather_all(self, *, everywhere: bool = False) -> Mapping[str, Tensor]:
        """See `Sharding`."""
        import deepspeed

        whole: dict[str, Tensor] = {}
        for name, tensor in trainable_tensors(self.trainable).items():
            with deepspeed.zero.GatheredParameters([tensor] if _is_partitioned(tensor) else []):
                if everywhere or self.rank == 0:
                    whole[name] = tensor.detach().cpu().clone()
        return whole

    def gather(
        self, names: Sequence[str], to: Collection[int], dtype: torch.dtype | None
    ) -> Mapping[str, Tensor]:
        """See `Sharding`. ZeRO 3 gathers a tensor on all ranks, one at a time."""
        import deepspeed

        tensors = model_tensors(self.trainable.model)
        whole: dict[str, Tensor] = {}
        for name in names:
            tensor = tensors[name]
            divided = [tensor] if _is_partitioned(tensor) else []
            with deepspeed.zero.GatheredParameters(divided):
                if self.rank in to:
                    own = in_format(tensor.detach(), dtype)
                    # What was gathered is freed at the end of the block.
                    is_view = bool(divided) and own.data_ptr() == tensor.data_ptr()
                    whole[name] = own.clone() if is_view else own
        return whole

    def broadcast(self, tensor: Tensor) -> Tensor:
        """See `Sharding`."""
        return broadcast(tensor)

    def local_parts(self, names: Iterable[str]) -> Mapping[str, Part]:
        """See `Sharding`."""
        tensors = model_tensors(self.trainable.model)
        return {name: self._part(tensors[name]) for name in names}

    def after_load(self) -> None:
        """The optimizer has its own copies of the weights. ZeRO 3 keeps small ones whole until they
        are freed.
        """
        for share in self._shares():
            share.master.copy_(share.weights)
        gathered = [p for p in self.engine.module.parameters() if _is_partitioned(p)]
        if gathered:
            gathered[0].partition(gathered)

    def moments(self) -> Moments:
        """See `Sharding`."""
        optimizer = self.engine.optimizer.optimizer
        parts: dict[str, dict[str, Part]] = {}
        done = 0.0
        for share in self._shares():
            for key, value in optimizer.state.get(share.flat, {}).items():
                if value.ndim:
                    own = value.narrow(0, share.first, share.weights.numel())
                    parts.setdefault(key, {})[share.name] = Part(share.shape, share.start, own)
                else:
                    done = max(done, float(value))
        trained = [
            name
            for name, tensor in trainable_tensors(self.trainable).items()
            if tensor.requires_grad
        ]
        return Moments(parts, dict.fromkeys(trained, done) if done else {})

    def new_moments(self, names: Sequence[str]) -> Moments:
        """See `Sharding`."""
        optimizer = self.engine.optimizer.optimizer
        for share in self._shares():
            moments = {name: torch.zeros_like(share.flat, requires_grad=False) for name in names}
            optimizer.state[share.flat] = {"step": torch.zeros(()), **moments}
        return self.moments()

    def set_moments(self, moments: Moments) -> None:
        """See `Sharding`. All parameters get an update in each step."""
        for state in self.engine.optimizer.optimizer.state.values():
            state["step"].fill_(max(moments.updates.values()))

    def sleep(self) -> None:
        """See `Sharding`.

        Raises:
            ConfigError: on a GPU: DeepSpeed can move its state to the CPU, but cannot return
            weights then.
        """
        if self.device.type != "cpu":
            raise ConfigError(
                "trainer=deepspeed cannot take turns with the engine: use trainer=fsdp, or"
                " placement=disaggregated"
            )
        self.clear()

    def wake(self) -> None:
        """See `Sharding`. Nothing was moved."""

    def close(self) -> None:
        """See `Sharding`."""
        import deepspeed

        self.engine.destroy()
        deepspeed.comm.destroy_process_group()

    def _part(self, tensor: Any) -> Part:
        """ZeRO 3 divides the elements of a parameter into parts of equal size, and fills up the
        last one.
        """
        if not _is_partitioned(tensor):
            return Part(tensor.shape, 0, tensor.detach(), self.rank, self.mesh.world_size)
        size = tensor.ds_tensor.numel()
        start = min(self.rank * size, tensor.ds_numel)
        return Part(
            tensor.ds_shape, start, tensor.ds_tensor.detach().view(-1)[: tensor.ds_numel - start]
        )

    def _shares(self) -> Iterator["_Share"]:
        """This rank's part of each trained parameter in the optimizer."""
        zero = self.engine.optimizer
        tensors: Mapping[str, Any] = trainable_tensors(self.trainable)
        for name, tensor in tensors.items():
            if not tensor.requires_grad:
                continue
            part = self._part(tensor)
            weights, start = part.values, part.start
            if _is_partitioned(tensor):
                group, first, _ = zero.grad_position[zero.get_param_id(tensor)]
                flat = zero.fp32_partitioned_groups_flat[group]
            else:
                # ZeRO 1 and 2: from a fragment of the weights ("low precision") to that of the
                # optimizer's flat float32 tensor ("high precision").
                mapping = tensor._hp_mapping
                if mapping is None:  # all of it is of other ranks
                    continue
                address, start = (
                    mapping.get_hp_fragment_address(),
                    mapping.lp_fragment_address.start,
                )
                flat, first = (
                    zero.single_partition_of_fp32_groups[mapping.param_group_index],
                    address.start,
                )
                weights = weights.view(-1)[start : start + address.numel]
            if weights.numel():
                yield _Share(name, part.shape, start, weights, flat, first)


class _Share(NamedTuple):
    """The elements of a parameter from `start` on that this rank updates: `weights`, and in the
    float32 copy of the optimizer those from `first` on of a tensor `flat` of several parameters.
    """

    name: str
    shape: torch.Size
    start: int
    weights: Tensor
    flat: Tensor
    first: int

    @property
    def master(self) -> Tensor:
        """The float32 copy."""
        return self.flat.detach().narrow(0, self.first, self.weights.numel())


def _is_partitioned(tensor: Tensor) -> bool:
    """True if ZeRO 3 keeps only a part of a parameter on each rank."""
    from deepspeed.runtime.zero.utils import is_zero_param

    return bool(is_zero_param(tensor))
