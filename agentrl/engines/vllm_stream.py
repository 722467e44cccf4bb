"""Weights streamed from tensors of this process into vLLM's workers over gloo, on CPUs.

vLLM's transfer has two sides: an engine in each worker (`agentrl/engines/vllm_worker.py`), and a
sender, which drives the update and here runs in threads of the driver. Both are the counterparts of
vLLM's `nccl` backend, with its handshake and its sending loop. They load in place: an update that
fails midway loses the engine.

Imports vLLM; imported only by an entered `VllmEngine`.
"""

import asyncio
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch.distributed as dist
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerWeightTransferEngine,
    WeightSource,
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_common import (
    NCCLWeightTransferInitInfo,
    worker_init_payload,
)
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
)

from agentrl.engines.vllm_worker import gloo_group


class WeightStream:
    """Sends weights to one engine. `workers`: how many workers the engine has."""

    def __init__(self, llm: Any, workers: int) -> None:
        self._client = _Client(llm, asyncio.get_running_loop())
        self._source = _Source()
        self._workers = workers
        self._sender: Any = None

    async def send(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Load the weights into all workers; generation must be paused."""
        self._source.weights = weights
        self._client.version = str(version)
        if self._sender is None:
            self._sender = await asyncio.to_thread(self._open)
        await asyncio.to_thread(self._sender.send_weights)

    def close(self) -> None:
        """Disconnect from the workers."""
        if self._sender is not None:
            self._sender.shutdown()

    def _open(self) -> "TrainerWeightTransferEngine[Any]":
        info = GlooInitInfo(
            rank=0,
            master_address="127.0.0.1",
            master_port=_free_port(),
            world_size=1 + self._workers,
        )
        return WeightTransferTrainerFactory.trainer_init(
            info, client=self._client, source=self._source
        )


class _Client:
    """vLLM's `VLLMWeightSyncClient`: its senders' calls to the engine, from a thread."""

    def __init__(self, llm: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._llm = llm
        self._loop = loop
        self.version = ""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._ask(self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info)))

    def start_weight_update(self) -> None:
        self._ask(self._llm.start_weight_update())

    def update_weights(self, update_info: Any) -> None:
        self._ask(self._llm.update_weights(WeightTransferUpdateRequest(update_info)))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._ask(self._llm.finish_weight_update(weight_version=weight_version or self.version))

    def _ask(self, call: Any) -> None:
        asyncio.run_coroutine_threadsafe(call, self._loop).result()


class _Source(WeightSource):  # type: ignore[misc]
    """Tensors by name."""

    def __init__(self) -> None:
        self.weights: Mapping[str, Tensor] = {}

    def metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(name, weight.dtype, tuple(weight.shape))
            for name, weight in self.weights.items()
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, weight.detach()) for name, weight in self.weights.items())


@dataclass
class GlooInitInfo(NCCLTrainerInitInfo):  # type: ignore[misc]
    """The same fields as for NCCL."""

    backend: ClassVar[str] = "gloo"


class GlooSender(NCCLTrainerWeightTransferEngine):  # type: ignore[misc]
    """vLLM's NCCL sender over a gloo group: tensors go one by one, as in its unpacked mode."""

    group: Any

    @classmethod
    def trainer_init(
        cls, init_info: GlooInitInfo, *, client: Any, source: WeightSource | None = None
    ) -> Self:
        """Connect to the workers."""
        sender = cls(client=client, source=source, packed=False)
        info = NCCLWeightTransferInitInfo(
            master_address=init_info.master_address,
            master_port=init_info.master_port,
            rank_offset=1,
            world_size=init_info.world_size,
        )
        with ThreadPoolExecutor(1) as thread:
            joined = thread.submit(client.init_weight_transfer_engine, worker_init_payload(info))
            sender.group = gloo_group(info, rank=0)
            joined.result()
        return sender

    def _broadcast(self, source: WeightSource, meta: list[ParamMeta]) -> None:
        for _, tensor in self._checked_iter(source, meta):
            self.group.broadcast([tensor.contiguous()], dist.BroadcastOptions()).wait()

    def shutdown(self) -> None:
        """Leave the group."""
        self.group = None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


WeightTransferTrainerFactory.register_engine(GlooInitInfo.backend, GlooSender)

__all__ = ["WeightStream"]
