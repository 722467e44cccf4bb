"""agentrl's code inside vLLM: it loads new weights, ends orphaned workers, and sums up statistics.

This module imports vLLM and is imported only by an entered `VllmEngine` and, by name
(`worker_extension_cls`), by vLLM's worker processes, where the import registers the weight transfer
backends.
"""

import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.platforms import current_platform
from vllm.v1.metrics.loggers import StatLoggerBase

from agentrl.engines.heartbeat import BeginBeating, begin_beating
from agentrl.engines.vllm_adapter_worker import WorkerAdapter
from agentrl.engines.vllm_reload import Reload
from agentrl.engines.vllm_settings import BACKENDS, DRIVER_PID
from agentrl.weights.bundle import WeightBundle
from agentrl.weights.low_rank import LowRank

_GLOO_SECONDS = 300.0


@dataclass
class NoInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Files need no handshake."""


@dataclass
class BundleInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which of a bundle's weights to load; every worker can read its folder."""

    folder: str
    names: list[str]


class BundledWeights(WeightTransferEngine[NoInit, BundleInfo]):  # type: ignore[misc]
    """Loads weights from a memory-mapped `WeightBundle` that `WorkerExtension` has checked."""

    init_info_cls = NoInit
    update_info_cls = BundleInfo

    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._reload = Reload(model, self.model_config)
        _begin_worker(vllm_config)

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

    def receive_weights(self, update_info: BundleInfo) -> None:
        """Stream the tensors of the files into the model."""
        bundle = WeightBundle.at(Path(update_info.folder))
        self._reload.load_weights((name, bundle[name]) for name in update_info.names)

    def finish_weight_update(self) -> None:
        """See `Reload`."""
        self._reload.finish()

    def shutdown(self) -> None:
        """Nothing to release."""


class GlooWeights(NCCLWeightTransferEngine):  # type: ignore[misc]
    """The counterpart of vLLM's NCCL engine for CPUs: weights arrive one by one over a separate
    gloo group.
    """

    group: Any = None

    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._reload = Reload(model, self.model_config)
        _begin_worker(vllm_config)

    def start_weight_update(self) -> None:
        """See `Reload`."""
        self._reload.begin()
        # vLLM's engine calls its `load_weights`, and forgets it when the update ends.
        self.model = self._reload

    def finish_weight_update(self) -> None:
        """See `Reload`."""
        self._reload.finish()

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Connect to the sender and the other workers."""
        ranks = self.parallel_config
        rank = init_info.rank_offset + ranks.data_parallel_index * ranks.world_size + ranks.rank
        self.group = gloo_group(init_info, rank)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load the weights. vLLM's own version would synchronise an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Any) -> None:
        """Load each weight as it arrives, in the sender's order."""

        def received() -> Iterator[tuple[str, torch.Tensor]]:
            for name, dtype, shape in zip(
                update_info.names, update_info.dtype_names, update_info.shapes, strict=True
            ):
                weight = torch.empty(shape, dtype=getattr(torch, dtype))
                self.group.broadcast([weight], dist.BroadcastOptions()).wait()
                yield name, weight

        self._reload.load_weights(received())

    def shutdown(self) -> None:
        """Leave the group."""
        self.group = None


def gloo_group(info: NCCLWeightTransferInitInfo, rank: int) -> Any:
    """A separate group of the sender (rank 0) and the workers; returns when all have joined."""
    timeout = timedelta(seconds=_GLOO_SECONDS)
    place = (info.master_address, info.master_port)
    if rank == 0:
        # A store that makes its socket itself listens on all interfaces.
        with socket.socket() as meeting:
            meeting.bind(place)
            listener = meeting.detach()
        store = TCPStore(
            *place, info.world_size, is_master=True, timeout=timeout, master_listen_fd=listener
        )
    else:
        store = TCPStore(*place, info.world_size, is_master=False, timeout=timeout)
    return dist.ProcessGroupGloo(store, rank, info.world_size, timeout)


def _begin_worker(vllm_config: Any) -> None:
    """Set up a worker process."""
    if current_platform.is_cpu() and vllm_config.model_config.enforce_eager:
        torch._dynamo.config.disable = (
            True  # else vLLM still compiles its sampler, which takes seconds
        )
    _die_with(int(os.environ[DRIVER_PID]))


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
    """The worker's own attributes."""
    adapter: WorkerAdapter

    def begin_beating(self, path: str) -> BeginBeating | None:
        """Let this process and the engine core give signs of life at a `Heartbeat.path`."""
        begin_beating(path)
        # "uni": this process is the core.
        is_core = self.parallel_config.distributed_executor_backend == "uni"
        return None if is_core else BeginBeating(path)

    def verify_weights(self, folder: str) -> str:
        """Read a whole bundle, check it, and return its checksum."""
        return WeightBundle.open(Path(folder)).manifest.checksum

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

    def sleepable_bytes(self) -> int:
        """Bytes on this worker's GPU that vLLM's sleep frees: weights, KV cache and scratch."""
        from vllm.device_allocator.cumem import CuMemAllocator

        return int(CuMemAllocator.get_instance().get_current_usage())


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


for _kind, _engine in zip(BACKENDS, (BundledWeights, GlooWeights), strict=True):
    WeightTransferEngineFactory.register_engine(BACKENDS[_kind], _engine)

__all__ = ["BundledWeights", "Counters", "WorkerExtension"]
