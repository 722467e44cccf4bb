"""Processes in which the ranks of one trainer after the other live: each takes seconds to start."""

from dataclasses import dataclass
from typing import Any

from agentrl.cluster.processes import ProcessWorker
from agentrl.cluster.workers import Forked, Make, WorkerGroup

IMPORTS = (
    "torch.distributed.fsdp",
    "transformers.models.auto.modeling_auto",
    "transformers.models.gpt_oss.modeling_gpt_oss",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "agentrl.trainers.rank.fsdp",
)
"""What all of them need, and the process that they are forked from imports once."""


@dataclass(frozen=True)
class Borrowed:
    """A worker in a process that stays when the worker is stopped: starting one costs seconds of
    imports.
    """

    process: ProcessWorker

    async def call(self, method: str, *args: Any) -> Any:
        return await self.process.call(method, *args)

    async def check(self) -> None:
        await self.process.check()

    async def stop(self) -> None:
        await self.process.call("close")


class Processes:
    """`StartWorkers` over the same processes again and again."""

    def __init__(self) -> None:
        self.processes: list[ProcessWorker] = []

    async def __call__(self, role: str, make: Make, count: int) -> WorkerGroup:
        for rank in range(len(self.processes), count):
            self.processes.append(await ProcessWorker.start(role, Forked(int, IMPORTS), rank))
        for process in self.processes[:count]:
            await process.host(make)
        return WorkerGroup(role, [Borrowed(process) for process in self.processes[:count]])
