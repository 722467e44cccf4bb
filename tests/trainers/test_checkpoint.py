"""Checkpoints that are written while training goes on, and ranks that die meanwhile."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.cluster.processes import start_local
from agentrl.testing.trainers import LOSS, TrainerCase, random_batches
from agentrl.trainers.fsdp import FsdpTrainer
from agentrl.trainers.group import GroupTrainer
from agentrl.trainers.local import LocalTrainer
from agentrl.trainers.rank import checkpoint
from agentrl.trainers.rank.checkpoint import STATE_FILE, Snapshot
from agentrl.trainers.rank.one_device import OneDevice

CASE = TrainerCase(lr=1e-3)
KINDS: dict[str, tuple[type[GroupTrainer], dict[str, Any]]] = {
    "local": (LocalTrainer, {"device": "cpu"}),
    "fsdp": (FsdpTrainer, {"world_size": 2}),
}


def make(name: str, model: Path, **parts: Any) -> GroupTrainer:
    kind, settings = KINDS[name]
    config = kind.Config(**CASE.settings, **settings)
    return kind(config, model, total_steps=CASE.total_steps, temperature=CASE.temperature, **parts)


async def step(trainer: GroupTrainer, batch: Any) -> None:
    await trainer.step(batch, LOSS, float(batch.num_loss_tokens))


async def copied(trainer: GroupTrainer) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in (await trainer.weights()).items()}


async def taken_up(
    name: str, model: Path, folder: Path, batches: list[Any]
) -> dict[str, torch.Tensor]:
    """The weights after more steps from a checkpoint."""
    async with make(name, model) as trainer:
        await trainer.load(folder)
        for batch in batches:
            await step(trainer, batch)
        return await copied(trainer)


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float) -> None:
    assert got.keys() == want.keys()
    for name, weight in got.items():
        torch.testing.assert_close(weight, want[name], atol=tolerance, rtol=0)


def test_steps_are_made_while_a_checkpoint_is_written_which_is_of_the_step_where_it_began(
    shallow_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, released, write = (
        random_batches(shallow_model_dir, 3),
        threading.Event(),
        Snapshot.write,
    )

    def held(self: Snapshot, folder: Path) -> None:
        assert released.wait(60)
        write(self, folder)

    monkeypatch.setattr(Snapshot, "write", held)

    async def main() -> tuple[dict[str, torch.Tensor], ...]:
        async with make("local", shallow_model_dir) as trainer:
            await step(trainer, batches[0])
            await trainer.begin_save(tmp_path / "saved")
            at_save = await copied(trainer)
            await step(trainer, batches[1])
            assert not (tmp_path / "saved").exists()
            released.set()
            await trainer.saved()
            assert (tmp_path / "saved" / STATE_FILE).exists()
            await step(trainer, batches[2])
            unbroken = await copied(trainer)
        same(await taken_up("local", shallow_model_dir, tmp_path / "saved", []), at_save, 0)
        return unbroken, await taken_up("local", shallow_model_dir, tmp_path / "saved", batches[1:])

    unbroken, resumed = asyncio.run(main())
    same(resumed, unbroken, 0)


def test_the_first_update_after_a_checkpoint_began_helps_to_copy_and_waits_for_all_copies(
    shallow_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = random_batches(shallow_model_dir, 1)[0]
    held, helped, updated = threading.Event(), threading.Event(), threading.Event()
    copy, update = checkpoint._copy, OneDevice.update

    def by_two(values: torch.Tensor) -> torch.Tensor:
        if threading.current_thread().name.startswith("checkpoint"):
            held.set()
            assert helped.wait(60)
            assert not updated.wait(0.3)
        elif held.is_set():
            helped.set()
        return copy(values)

    def told(*given: Any, **named: Any) -> Any:
        updated.set()
        return update(*given, **named)

    monkeypatch.setattr(checkpoint, "_copy", by_two)
    monkeypatch.setattr(OneDevice, "update", told)

    async def main() -> None:
        async with make("local", shallow_model_dir) as trainer:
            at_save = await copied(trainer)
            await trainer.begin_save(tmp_path / "saved")
            assert await asyncio.to_thread(held.wait, 60)
            await step(trainer, batch)
            assert helped.is_set()
            assert updated.is_set()
            await trainer.saved()
        same(await taken_up("local", shallow_model_dir, tmp_path / "saved", []), at_save, 0)

    asyncio.run(main())


def test_what_an_update_could_not_copy_is_copied_before_it_is_written(
    shallow_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = random_batches(shallow_model_dir, 1)[0]
    held, failed = threading.Event(), threading.Event()
    copy = checkpoint._copy

    def by_two(values: torch.Tensor) -> torch.Tensor:
        if threading.current_thread().name.startswith("checkpoint"):
            held.set()
            assert failed.wait(60)
        elif held.is_set():
            failed.set()
            raise RuntimeError("no memory")
        return copy(values)

    monkeypatch.setattr(checkpoint, "_copy", by_two)

    async def main() -> None:
        async with make("local", shallow_model_dir) as trainer:
            at_save = await copied(trainer)
            await trainer.begin_save(tmp_path / "saved")
            assert await asyncio.to_thread(held.wait, 60)
            with pytest.raises(RuntimeError, match="no memory"):
                await step(trainer, batch)
            await trainer.saved()
        same(await taken_up("local", shallow_model_dir, tmp_path / "saved", []), at_save, 0)

    asyncio.run(main())


def test_a_checkpoint_that_cannot_be_written_fails_where_it_is_waited_for(
    shallow_model_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()

    async def main() -> None:
        async with make("local", shallow_model_dir) as trainer:
            await trainer.begin_save(tmp_path / "file" / "saved")
            with pytest.raises(OSError, match="file/saved"):
                await trainer.saved()
            await trainer.save(tmp_path / "saved")

    asyncio.run(main())
    assert checkpoint.read_state(tmp_path / "saved")["step"] == 0


@dataclass(frozen=True)
class Held:
    """Makes a rank that writes only when `gate` exists."""

    make: Callable[[int], object]
    gate: Path

    def __call__(self, rank: int) -> object:
        write = Snapshot.write

        def held(snapshot: Snapshot, folder: Path) -> None:
            for tensors in snapshot.tensors[:1]:
                tensors.write(folder, snapshot.rank)
            while not self.gate.exists():
                time.sleep(0.01)
            write(snapshot, folder)

        Snapshot.write = held  # type: ignore[method-assign]  # in the rank's own process
        return self.make(rank)


@pytest.mark.long
def test_ranks_that_die_while_they_write_a_checkpoint_cost_neither_it_nor_a_step(
    shallow_model_dir: Path, tmp_path: Path
) -> None:
    batches, gate, groups = random_batches(shallow_model_dir, 4), tmp_path / "gate", list[Any]()

    async def start(role: str, of_rank: Any, count: int) -> Any:
        groups.append(await start_local(role, Held(of_rank, gate), count))
        return groups[-1]

    async def main() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        async with make("fsdp", shallow_model_dir, start=start) as trainer:
            for batch in batches[:2]:
                await step(trainer, batch)
            await trainer.begin_save(tmp_path / "saved")
            await step(trainer, batches[2])
            os.kill(groups[0].workers[1].pid, signal.SIGKILL)
            await step(trainer, batches[3])
            assert not (tmp_path / "saved" / STATE_FILE).exists()
            gate.touch()
            await trainer.saved()
            return await copied(trainer), await taken_up(
                "local", shallow_model_dir, tmp_path / "saved", batches[2:]
            )

    unbroken, resumed = asyncio.run(main())
    assert len(groups) == 2
    same(resumed, unbroken, 1e-5)
