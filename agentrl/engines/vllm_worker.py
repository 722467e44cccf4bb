"""agentrl's code inside vLLM: it loads new weights, ends orphaned workers, and sums up statistics.

This module imports vLLM and is imported only by an entered `VllmEngine` and, by name
(`worker_extension_cls`), by vLLM's worker processes, where the import registers the weight transfer
backend.
"""

import os
import pickle
import select
import signal
import sys
import threading
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.platforms import current_platform
from vllm.v1.metrics.loggers import StatLoggerBase

from agentrl.engines.heartbeat import BeginBeating, begin_beating
from agentrl.engines.vllm_adapter_worker import WorkerAdapter
from agentrl.engines.vllm_reload import Reload
from agentrl.engines.vllm_settings import BACKEND, DRIVER_PID
from agentrl.weights.bundle import WeightBundle
from agentrl.weights.low_rank import LowRank
from agentrl.weights.shipment import Reader, Shipment


@dataclass
class NoInit(WeightTransferInitInfo):  # type: ignore[misc]
    """A shipment brings all that is needed."""


@dataclass
class ShipmentInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which weights of a shipment to load."""

    shipment: str
    """The pickled shipment, in hexadecimal digits."""
    names: list[str]
    kept: list[str]
    """The parts of a model that sees of which it has none."""


class ShippedWeights(WeightTransferEngine[NoInit, ShipmentInfo]):  # type: ignore[misc]
    """Loads weights as they arrive in a `Shipment`, in which `WorkerExtension` has enrolled."""

    init_info_cls = NoInit
    update_info_cls = ShipmentInfo

    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._reload = Reload(model, self.model_config)
        self._kept: list[str] = []
        if current_platform.is_cpu() and vllm_config.model_config.enforce_eager:
            # Else vLLM still compiles its sampler, which takes seconds.
            torch._dynamo.config.disable = True
        # vLLM makes this object once in each worker, so it is the hook for the process, too.
        _die_with(int(os.environ[DRIVER_PID]))

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """See `Reload`."""
        self._reload.begin()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the weights; the copy is complete when this returns."""
        self.receive_weights(self.parse_update_info(update_info))
        # vLLM's own version always synchronises, which fails on a CPU.
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ShipmentInfo) -> None:
        """Load each weight as it arrives."""
        shipment = _unpacked(update_info.shipment)
        wanted, self._kept = set(update_info.names), update_info.kept
        # Else an error would keep it, and the sender would wait for more to be read.
        with closing(shipment.arrivals(_reader(self.device))) as arrivals:
            self._reload.load_weights((name, weight) for name, weight in arrivals if name in wanted)

    def finish_weight_update(self) -> None:
        """See `Reload`."""
        self._reload.finish(self._kept)

    def shutdown(self) -> None:
        """Nothing to release."""


def packed(shipment: Shipment) -> str:
    """A shipment as text, which vLLM's messages can hold."""
    return pickle.dumps(shipment).hex()


@cache
def _reader(device: torch.device) -> Reader:
    """This process, as one that loads weights."""
    return Reader.on(str(device))


def _unpacked(text: str) -> Shipment:
    shipment: Shipment = pickle.loads(bytes.fromhex(text))
    return shipment


def _die_with(driver: int) -> None:
    """End this process and its parent, the engine core, when the driver dies; vLLM does not. Linux
    only.
    """
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
    """Methods that agentrl adds to vLLM's workers; passed to vLLM as `worker_extension_cls`."""

    parallel_config: Any
    model_runner: Any
    device: torch.device
    """The worker's own attributes."""
    adapter: WorkerAdapter

    def begin_beating(self, path: str) -> BeginBeating | None:
        """Let this process and the engine core give signs of life at a `Heartbeat.path`."""
        begin_beating(path)
        # "uni": this process is the core.
        is_core = self.parallel_config.distributed_executor_backend == "uni"
        return None if is_core else BeginBeating(path)

    def enroll(self, shipment: str) -> None:
        """Announce that this worker will load a shipment."""
        _unpacked(shipment).enroll(_reader(self.device))

    def join(self, shipment: str) -> None:
        """Connect this worker to the sender of a shipment that it will load now."""
        _unpacked(shipment).join(_reader(self.device))

    def leave(self, shipment: str) -> None:
        """Part with the sender of a shipment that this worker will not load."""
        _unpacked(shipment).leave(_reader(self.device))
        _reader.cache_clear()  # the ranks may still have connections to this one

    def begin_adapter(self) -> None:
        """Serve an adapter that changes nothing."""
        self.adapter = WorkerAdapter(self.model_runner)
        self.adapter.replace({})

    def unserved_adapters(self, names: list[str]) -> list[str]:
        """See `WorkerAdapter.unserved`."""
        return self.adapter.unserved(names)

    def load_adapter(self, folder: str, base: str | None, names: list[str]) -> None:
        """Serve the factors of a bundle; before, load the weights `names` of the folder `base`."""
        update = WeightBundle.at(Path(folder)).unpacked
        assert isinstance(update, LowRank)
        if base is not None:
            self.adapter.load_base(Path(base), names)
        self.adapter.replace(update.factors)

    def sleepable_bytes(self, but: tuple[str, ...] = ()) -> int:
        """Bytes on this worker's GPU that vLLM's sleep frees: weights, KV cache and scratch,
        without those that vLLM tags as one of `but`.
        """
        from vllm.device_allocator.cumem import CuMemAllocator

        allocated = CuMemAllocator.get_instance().pointer_to_data.values()
        return sum(int(data.handle[1]) for data in allocated if data.tag not in but)


class Counters(StatLoggerBase):  # type: ignore[misc]
    """Sums up the statistics that vLLM reports after every step."""

    def __init__(self) -> None:
        self._loads: dict[int, tuple[int, float]] = {}  # by copy of the attention layers
        self.generated = 0
        self.prefilled = 0
        self.cached = 0
        self.preempted = 0
        self.proposed = 0
        self.accepted = 0
        self._cleared = 0

    @property
    def running(self) -> int:
        """Requests in the batches."""
        return sum(running for running, _ in self._loads.values())

    @property
    def kv_use(self) -> float:
        """Share of the fullest KV cache that requests hold."""
        return max((used for _, used in self._loads.values()), default=0.0)

    def cleared(self) -> None:
        """Note that all KV was dropped: vLLM will report running requests as preempted, though not
        for lack of room.
        """
        self._cleared += self.running
        self._loads.clear()

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Called by vLLM with the statistics of one step."""
        if scheduler_stats is not None:
            self._loads[engine_idx] = (
                scheduler_stats.num_running_reqs,
                scheduler_stats.kv_cache_usage,
            )
            if (speculation := scheduler_stats.spec_decoding_stats) is not None:
                self.proposed += speculation.num_draft_tokens
                self.accepted += speculation.num_accepted_tokens
        if iteration_stats is not None:
            self.generated += iteration_stats.num_generation_tokens
            self.prefilled += iteration_stats.prompt_token_stats.computed
            self.cached += iteration_stats.prompt_token_stats.cached_tokens
            not_for_room = min(self._cleared, iteration_stats.num_preempted_reqs)
            self._cleared -= not_for_room
            self.preempted += iteration_stats.num_preempted_reqs - not_for_room

    def log_engine_initialized(self) -> None:
        """Nothing to log."""


WeightTransferEngineFactory.register_engine(BACKEND, ShippedWeights)

__all__ = ["Counters", "ShippedWeights", "WorkerExtension", "packed"]
