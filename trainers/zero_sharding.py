"""The torch and DeepSpeed code of a rank of `DeepSpeedTrainer`."""

import logging
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.trainers.checkpoint import kept_by_another, save_state
from agentrl.trainers.forward import DeviceMicroBatch
from agentrl.trainers.model import in_bfloat16, load_model
from agentrl.trainers.optimizer import adamw
from agentrl.trainers.process_group import join, max_of_ranks, sum_of_ranks
from agentrl.trainers.spec import RankInfo, TrainerSpec
from agentrl.trainers.trainable import TrainableParameters, trainable_tensors

if TYPE_CHECKING:
    from agentrl.trainers.deepspeed import DeepSpeedTrainer

_OPTIMIZER = "deepspeed"
"""The folder in a checkpoint where the ranks keep their shards."""


def open_sharding(spec: TrainerSpec, rank_info: RankInfo) -> "Zero":
    """Load the model and pass it to DeepSpeed."""
    config = cast("DeepSpeedTrainer.Config", spec.config)
    deepspeed = _deepspeed()
    device = join(rank_info)
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    model, trainable = load_model(spec, device, autocast=in_bfloat16(config, device))
    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model, config), config=_settings(config))
    return Zero(rank_info, device, engine, trainable)


def _deepspeed() -> Any:
    """Import the library; an environment variable chooses its device."""
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        import deepspeed
    except ImportError as error:
        raise ConfigError(f"trainer=deepspeed needs DeepSpeed ({error}): pip install 'agentrl[deepspeed]'") from error
    deepspeed.utils.logger.setLevel(logging.ERROR)  # its warnings are about the choices made here
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # about names that DeepSpeed uses
    if on_cpu:  # takes minutes to compile at the first start, and is for inference only
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _settings(config: "DeepSpeedTrainer.Config") -> dict[str, Any]:
    """DeepSpeed's own settings. Without `gradient_clipping` it would clip by 1.0."""
    to_cpu = {"device": "cpu"} if config.offload else {"device": "none"}
    zero: dict[str, Any] = {"stage": config.zero_stage, "offload_optimizer": to_cpu}
    if config.zero_stage == 3:
        zero["offload_param"] = to_cpu
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

    def predict(self, samples: DeviceMicroBatch, *, entropy: bool = False) -> Tensor:
        """See `Sharding`."""
        predicted: Tensor = self.engine(samples, entropy=entropy)
        return predicted

    def clear(self) -> None:
        """See `Sharding`."""
        self.engine.optimizer.zero_grad(set_to_none=True)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """See `Sharding`. DeepSpeed averages over the ranks, so the loss is scaled to give the sum."""
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss * self.rank_info.world_size, scale_wrt_gas=False)

    def sum(self, values: Tensor) -> Tensor:
        """See `Sharding`."""
        return sum_of_ranks(values)

    def max(self, value: Tensor) -> Tensor:
        """See `Sharding`."""
        return max_of_ranks(value)

    def update(self, lr: float, largest: float | None) -> float:
        """See `Sharding`. DeepSpeed scales by the same rule, and got `largest` when it started."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()
        return float(self.engine.get_global_grad_norm()) if self.engine.was_step_applied() else math.nan

    def weights(self) -> Mapping[str, Tensor]:
        """All weights on rank 0, in CPU memory; the other ranks take part, but return none."""
        whole = self._whole()
        return self.trainable.weights(whole) if self.rank_info.rank == 0 else {}

    def save(self, folder: Path, step: int) -> None:
        """Rank 0 writes the weights as a Hugging Face folder; each rank writes its shards."""
        whole = self._whole()
        if self.rank_info.rank == 0:
            self.trainable.save(folder, whole)
        dist.barrier()
        self.engine.save_checkpoint(str(folder / _OPTIMIZER), tag="step", exclude_frozen_parameters=True)
        if self.rank_info.rank == 0:
            save_state(folder, {"step": step, "optimizer": f"{_OPTIMIZER} of {self.rank_info.world_size} ranks"})
        dist.barrier()

    def load(self, folder: Path) -> int:
        """See `Sharding`. Needs as many ranks as saved it."""
        _, state = self.trainable.read(folder)
        if state["optimizer"] != f"{_OPTIMIZER} of {self.rank_info.world_size} ranks":
            raise kept_by_another(folder, f"deepspeed with trainer.world_size={self.rank_info.world_size}")
        groups = self.engine.optimizer.param_groups
        settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        self.engine.load_checkpoint(str(folder / _OPTIMIZER), tag="step", load_module_strict=False)  # no frozen ones
        for group, own in zip(self.engine.optimizer.param_groups, settings, strict=True):
            group.update(own)  # the settings are those of this run
        return int(state["step"])

    def sleep(self) -> None:
        """See `Sharding`.

        Raises:
            ConfigError: on a GPU: DeepSpeed can move its state to the CPU, but cannot return weights then.
        """
        if self.device.type != "cpu":
            raise ConfigError(
                "trainer=deepspeed cannot take turns with the engine: use trainer=fsdp, or placement=disaggregated"
            )
        self.clear()

    def wake(self) -> None:
        """See `Sharding`. Nothing was moved."""

    def close(self) -> None:
        """See `Sharding`."""
        import deepspeed

        self.engine.destroy()
        deepspeed.comm.destroy_process_group()

    def _whole(self) -> dict[str, Tensor]:
        """The trainable tensors, gathered one by one; only rank 0 keeps them, in CPU memory."""
        import deepspeed

        whole: dict[str, Tensor] = {}
        for name, tensor in trainable_tensors(self.trainable).items():
            with deepspeed.zero.GatheredParameters([tensor] if hasattr(tensor, "ds_id") else []):
                if self.rank_info.rank == 0:
                    whole[name] = tensor.detach().cpu().clone()
        return whole
