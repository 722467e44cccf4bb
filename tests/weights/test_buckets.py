"""A rank sends its weights with two buckets and a unit in memory, besides what it still writes of
the files, and two bytes a parameter.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl import plugins
from agentrl.flow import Flow
from agentrl.protocols import Trainer
from agentrl.protocols.weight_source import SendWeights, T, WeightSource, WholeWeights
from agentrl.trainers.fsdp import FsdpTrainer
from agentrl.trainers.rank.weights import RankWeights
from agentrl.weights import store
from agentrl.weights.config import WeightsConfig
from agentrl.weights.shipment import Reader, Shipment
from agentrl.weights.transport import Transport
from agentrl.weights.transports.files import WriteBuckets
from agentrl.weights.transports.live import SendBuckets
from tests.placement.live_bytes import LiveBytes

UNITS, ROWS, COLUMNS = 24, 250, 300
SMALL = 100_000
"""Bytes of sums, checksums and handles, which count beside the buckets."""


@dataclass
class Whole(Trainer):
    """A trainer in one process."""

    async def weights(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        return {f"w{i}": torch.randn(ROWS, COLUMNS, generator=generator) for i in range(UNITS)}


@dataclass(frozen=True)
class Counted:
    """`SendWeights` that writes the most bytes of tensors that a rank made and held meanwhile into
    a file of `folder`, with the bytes of its largest unit.
    """

    send: Any
    folder: Path

    def __call__(self, source: WeightSource) -> Any:
        with LiveBytes() as count:
            for tensor in own_tensors(source):
                count._note(tensor, foreign=True)
            answer = self.send(source)
        if isinstance(self.send, SendBuckets | WriteBuckets):
            unit = max(unit.numel for unit in source.units) * 2
            (self.folder / f"{source.rank}").write_text(f"{count.peak} {unit}")
        return answer


def own_tensors(source: WeightSource) -> list[torch.Tensor]:
    if isinstance(source, RankWeights):
        model = source._sharding.trainable.model
        return [parameter.to_local() for parameter in model.parameters()]  # type: ignore[attr-defined]
    assert isinstance(source, WholeWeights)
    return list(source._weights.values())


def counted(trainer: Any, folder: Path) -> Trainer:
    """The trainer, whose ranks count what they hold while they send."""
    send_weights = trainer.send_weights

    async def send(send: SendWeights[T]) -> Any:
        return await send_weights(Counted(send, folder))

    trainer.send_weights = send
    made: Trainer = trainer
    return made


async def update(name: str, trainer: Trainer, folder: Path) -> Shipment:
    """A version that two readers have got by a transport, in bfloat16 and buckets of 1 MiB."""
    config = WeightsConfig(
        transport=name, folder=folder, bucket_mib=1, deadline=60, dtype="bfloat16"
    )
    transport: Transport = plugins.load("weight_transports", name)(config)
    sent = await transport.send(trainer, 1)
    readers = [Reader.on("cpu") for _ in range(2)]
    for reader in readers:
        await asyncio.to_thread(sent.enroll, reader)

    def read(reader: Reader) -> int:
        sent.join(reader)
        return sum(weight.nbytes for _, weight in sent.arrivals(reader))

    async with Flow("update") as flow:
        flow.start(transport.deliver(trainer, sent), name="deliver")
        reading = [
            flow.start(asyncio.to_thread(read, reader), name=reader.name) for reader in readers
        ]
    assert reading[0].result() == reading[1].result()
    await asyncio.to_thread(note_files, folder, reading[0].result(), await sent.at_rest())
    transport.close()
    return sent


def note_files(folder: Path, read: int, at_rest: Shipment) -> None:
    files = folder.rglob("*.safetensors") if at_rest.folder else ()
    sizes = {
        "read": read,
        "written": sum(path.stat().st_size for path in files),
        "shared": sum(path.stat().st_size for path in folder.rglob("bucket-*-?")),
    }
    for what, size in sizes.items():
        (folder / what).write_text(str(size))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(store, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(store, "default_parent", lambda: tmp_path)
    return tmp_path


def number(file: Path) -> int:
    return int(file.read_text())


def check_buckets(name: str, folder: Path, ranks: int) -> None:
    """No rank has held more than two buckets, a unit, what it gives others of a unit, and, where
    weights go from memory to memory, what it writes of the files.
    """
    bucket = 2**20
    for rank in range(ranks):
        peak, unit = map(int, (folder / str(rank)).read_text().split())
        shared = number(folder / "shared") // ranks
        # It did hold something: else nothing was counted.
        files = number(folder / "read") // ranks + bucket if name != "files" else 0
        most = 2 * max(bucket, unit) + 2 * unit + files
        assert bucket // 2 < peak + shared < most + SMALL


@pytest.mark.parametrize("name", ["files", "handles", "stream"])
def test_a_sender_holds_two_buckets_and_a_unit(name: str, folder: Path) -> None:
    trainer = counted(Whole(), folder)  # type: ignore[abstract]
    sent = asyncio.run(update(name, trainer, folder))
    parameters = UNITS * ROWS * COLUMNS
    assert number(folder / "read") == 2 * parameters
    assert sent.size == pytest.approx(2 * parameters, rel=0.01)
    check_buckets(name, folder, ranks=1)


@pytest.mark.long
@pytest.mark.parametrize("name", ["handles", "stream"])
def test_each_rank_holds_two_buckets_and_a_unit(
    name: str, folder: Path, tiny_model_dir: Path
) -> None:
    async def main() -> int:
        config = FsdpTrainer.Config(world_size=2)
        async with FsdpTrainer(config, tiny_model_dir, total_steps=1) as trainer:
            await update(name, counted(trainer, folder), folder)
            return sum(weight.numel() for weight in (await trainer.weights()).values())

    parameters = asyncio.run(main())
    assert number(folder / "read") == 2 * parameters
    check_buckets(name, folder, ranks=2)
