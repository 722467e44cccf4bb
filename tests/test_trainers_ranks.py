"""Trainers of several ranks: the contract of a trainer over real process groups, and against one process."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.cluster.local_workers import ProcessWorker
from agentrl.cluster.workers import Make, WorkerGroup
from agentrl.testing.trainers import LOSS, TrainerCase, check_trainer, random_batches
from agentrl.trainers.deepspeed import DeepSpeedTrainer
from agentrl.trainers.fsdp import FsdpTrainer
from agentrl.trainers.group import GroupTrainer
from agentrl.trainers.local import LocalTrainer

pytestmark = pytest.mark.slow
RANKS = 2


@dataclass(frozen=True)
class Borrowed:
    """A worker in a process that stays when the worker is stopped: starting one costs seconds of imports."""

    process: ProcessWorker

    async def call(self, method: str, *args: Any) -> Any:
        return await self.process.call(method, *args)

    async def stop(self) -> None:
        await self.process.call("close")


class Processes:
    """`StartWorkers` over the same processes again and again."""

    def __init__(self) -> None:
        self.processes: list[ProcessWorker] = []

    async def __call__(self, role: str, make: Make, count: int) -> WorkerGroup:
        for rank in range(len(self.processes), count):
            self.processes.append(await ProcessWorker.start(role, int, rank))
        for process in self.processes[:count]:
            await process.host(make)
        return WorkerGroup(role, [Borrowed(process) for process in self.processes[:count]])


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    for process in started.processes:
        asyncio.run(process.stop())


KINDS: dict[str, tuple[type[GroupTrainer], dict[str, Any]]] = {
    "fsdp": (FsdpTrainer, {"world_size": RANKS}),
    "fsdp, weights kept": (FsdpTrainer, {"world_size": RANKS, "reshard_after_forward": False}),
    "deepspeed, ZeRO 1": (DeepSpeedTrainer, {"world_size": RANKS, "zero_stage": 1}),
    "deepspeed, ZeRO 2": (DeepSpeedTrainer, {"world_size": RANKS, "zero_stage": 2}),
    "deepspeed, ZeRO 3": (DeepSpeedTrainer, {"world_size": RANKS, "zero_stage": 3}),
}


def make_trainer(kind: type[GroupTrainer], settings: dict[str, Any], **parts: Any) -> Any:
    def make(model: Path, case: TrainerCase) -> GroupTrainer:
        config = kind.Config(
            **case.settings,
            **settings,
        )
        return kind(config, model, total_steps=case.total_steps, temperature=case.temperature, **parts)

    return make


LIKE_ANOTHER = ("fsdp, weights kept", "deepspeed, ZeRO 1")
"""Nearly the code of the one beside it: the whole contract of these takes its time among the long tests."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in LIKE_ANOTHER else ()) for name in KINDS]
)
def test_a_trainer_of_two_ranks_keeps_the_contract(
    name: str, processes: Processes, shallow_model_dir: Path, tmp_path: Path
) -> None:
    asyncio.run(check_trainer(make_trainer(*KINDS[name], start=processes), shallow_model_dir, tmp_path))


@pytest.mark.parametrize("name", KINDS)
def test_twenty_steps_on_two_ranks_are_those_of_one_process(
    name: str, processes: Processes, shallow_model_dir: Path
) -> None:
    batches = random_batches(shallow_model_dir, 20)

    async def train(make: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        async with make(shallow_model_dir, TrainerCase(lr=1e-3)) as trainer:
            metrics = [await trainer.step(batch, LOSS, float(batch.num_loss_tokens)) for batch in batches]
            weights = {name: weight.clone() for name, weight in (await trainer.weights()).items()}
            return [m["loss"] for m in metrics], weights

    losses, weights = asyncio.run(train(make_trainer(*KINDS[name], start=processes)))
    expected_losses, expected = asyncio.run(train(make_trainer(LocalTrainer, {"device": "cpu"})))
    assert losses == pytest.approx(expected_losses, abs=1e-5)
    assert weights.keys() == expected.keys()
    for key, weight in weights.items():
        torch.testing.assert_close(weight, expected[key], atol=1e-5, rtol=0)
