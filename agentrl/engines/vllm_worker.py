"""What agentrl runs inside vLLM: new weights from files in shared memory, the end of orphans, and counters.

This module imports vLLM and is imported only by an entered `VllmEngine` and, by name (`worker_extension_cls`), by
vLLM's worker processes, where the import registers the weight transfer backend.
"""

import os
import select
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.metrics.loggers import StatLoggerBase

from agentrl.cluster.bundle import WeightBundle

BACKEND = "agentrl_bundle"
DRIVER_PID = "agentrl_driver_pid"
"""Key in vLLM's `additional_config`: the process whose death must end the workers."""


@dataclass
class NoInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing has to be agreed on beforehand."""


@dataclass
class BundleInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which of a bundle's weights to load; every worker can read its folder."""

    folder: str
    names: list[str]


class BundledWeights(WeightTransferEngine[NoInit, BundleInfo]):  # type: ignore[misc]
    """Loads weights from a `WeightBundle`, memory-mapped, whose bytes were checked by `WorkerExtension`."""

    init_info_cls = NoInit
    update_info_cls = BundleInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        _die_with(int(vllm_config.additional_config[DRIVER_PID]))

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Make the layers take weights in checkpoint form again."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the weights; the copy is complete when this returns."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # vLLM's own version synchronises whatever the device is, and fails on a CPU
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: BundleInfo) -> None:
        """Stream the tensors of the files into the model."""
        bundle = WeightBundle.at(Path(update_info.folder))
        self.model.load_weights((name, bundle[name]) for name in update_info.names)

    def finish_weight_update(self) -> None:
        """Bring all layers into the form they compute in."""
        finalize_layerwise_reload(self.model, self.model_config)
        for module in self.model.modules():
            # On a CPU each linear layer keeps a packed copy of its weights. vLLM 0.32 packs anew what it reloaded,
            # but a head tied to the embedding is not reloaded itself and would go on with its old copy.
            if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Nothing is held."""


def _die_with(driver: int) -> None:
    """End this process, and the engine core above it, when the driver has died: nobody else would. Linux only."""
    if sys.platform != "linux":
        return
    handle = os.pidfd_open(driver)

    def wait() -> None:
        select.select([handle], [], [])
        parent = os.getppid()
        if parent not in (1, driver):
            os.kill(parent, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="agentrl-driver-watch", daemon=True).start()


class WorkerExtension:
    """What vLLM's workers can be asked beyond their own methods; named to vLLM as `worker_extension_cls`."""

    def verify_weights(self, folder: str) -> str:
        """Read a bundle whole, check it, and return its checksum."""
        return WeightBundle.open(Path(folder)).manifest.checksum


class Counters(StatLoggerBase):  # type: ignore[misc]
    """What vLLM says after every step, summed up."""

    def __init__(self) -> None:
        self.running = 0
        self.kv_use = 0.0
        self.generated = 0
        self.prefilled = 0
        self.cached = 0
        self.preempted = 0
        self._cleared = 0

    def cleared(self) -> None:
        """The whole KV cache was dropped: vLLM will report all that ran as preempted, which they were not for room."""
        self._cleared += self.running
        self.running, self.kv_use = 0, 0.0

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Called by vLLM with the statistics of one step."""
        if scheduler_stats is not None:
            self.running = scheduler_stats.num_running_reqs
            self.kv_use = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.generated += iteration_stats.num_generation_tokens
            self.prefilled += iteration_stats.prompt_token_stats.computed
            self.cached += iteration_stats.prompt_token_stats.cached_tokens
            not_for_room = min(self._cleared, iteration_stats.num_preempted_reqs)
            self._cleared -= not_for_room
            self.preempted += iteration_stats.num_preempted_reqs - not_for_room

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


WeightTransferEngineFactory.register_engine(BACKEND, BundledWeights)

__all__ = ["BACKEND", "DRIVER_PID", "BundledWeights", "Counters", "WorkerExtension"]
