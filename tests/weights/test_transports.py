"""The contract of weight transports, and one that a user brings."""

import asyncio
import pickle
import threading
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from agentrl import plugins
from agentrl.config.from_file import load_config
from agentrl.engines.local import LocalEngine
from agentrl.errors import ConfigError, WeightsError
from agentrl.flow import Flow
from agentrl.protocols import Trainer
from agentrl.testing.trainers import LOSS, random_batches
from agentrl.trainers.local import LocalTrainer
from agentrl.weights import store
from agentrl.weights.bundle import BundlePlace, Manifest, WeightBundle
from agentrl.weights.config import WeightsConfig
from agentrl.weights.machines import serving
from agentrl.weights.moved import BytesMoved, Parties
from agentrl.weights.publisher import WeightPublisher, checksum
from agentrl.weights.shipment import DirectShipment, Reader, Shipment
from agentrl.weights.transport import Transport
from tests.model_families import make_model

Weights = Mapping[str, Tensor]
NAMES = ["auto", "direct", "disk", "files", "handles", "shared_memory", "stream"]


class Given(Trainer):
    """A trainer that has these weights."""

    def __init__(self, weights: Weights) -> None:
        self.now = weights

    async def weights(self) -> Weights:
        return self.now


def made(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{i}": torch.randn(20, 7, generator=generator) for i in range(5)}


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(store, "SHARED_MEMORY", memory)
    monkeypatch.setattr(store, "default_parent", lambda: memory)
    return str(request.param)


def test_every_transport_is_tested() -> None:
    assert [plugin.name for plugin in plugins.installed("weight_transports")] == NAMES


async def received(transport: Transport, trainer: Trainer, sent: Shipment) -> dict[str, Tensor]:
    """What a reader in another process would get of a shipment."""
    # What other processes can read goes to them as a pickle.
    shipment = pickle.loads(pickle.dumps(sent)) if sent.is_remote else sent
    assert shipment == sent
    reader = Reader.on("cpu")
    await asyncio.to_thread(shipment.check)
    await asyncio.to_thread(shipment.enroll, reader)

    def read() -> dict[str, Tensor]:
        shipment.join(reader)
        return dict(shipment.arrivals(reader))

    async with Flow("update") as flow:
        flow.start(transport.deliver(trainer, sent), name="deliver")
        reading = flow.start(asyncio.to_thread(read), name="read")
    return reading.result()


def test_what_is_sent_is_received_and_released(name: str, tmp_path: Path) -> None:
    config = WeightsConfig(transport=name, folder=tmp_path / "disk", bucket_mib=1, deadline=60)
    transport: Transport = plugins.load("weight_transports", name)(config)

    async def send(seed: int) -> Shipment:
        trainer = Given(made(seed))
        sent = await transport.send(trainer, seed)
        assert sent.shapes() == {f"w{i}": (20, 7) for i in range(5)}
        assert checksum(await received(transport, trainer, sent)) == checksum(made(seed))
        assert checksum(await sent.at_rest()) == checksum(made(seed))
        return sent

    def files() -> set[Path]:
        return {path.parent for path in tmp_path.rglob("*.safetensors")}

    async def main() -> None:
        first, second, third = [await send(seed) for seed in (1, 2, 3)]
        assert first != second
        folders = {shipment.folder for shipment in (first, second, third)} - {None}
        assert files() == folders
        assert (first.size > 0) == bool(folders)
        await transport.withdraw(second)
        assert files() == folders - {second.folder}
        await transport.keep_only([third])
        assert files() == folders & {third.folder}
        assert checksum(await third.at_rest()) == checksum(made(3))
        transport.close()
        transport.close()
        assert files() == set()

    asyncio.run(main())


def test_what_the_trainer_has_changed_since_is_no_longer_sent_by_direct(tmp_path: Path) -> None:
    transport: Transport = plugins.load("weight_transports", "direct")(WeightsConfig())
    weights = made(1)

    async def main() -> None:
        sent = await transport.send(Given(weights), 1)
        assert await sent.at_rest() is sent
        weights["w1"].add_(1)  # a step
        with pytest.raises(WeightsError, match="the trainer has changed its weights since"):
            await sent.at_rest()

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["whole", "adapters", "mixture"])
def test_what_a_trainers_step_has_changed_is_no_longer_sent_by_direct(
    kind: str, shallow_model_dir: Path, tmp_path: Path
) -> None:
    model = shallow_model_dir
    if kind == "mixture":  # its weights are published under other names, made on access
        make_model("OLMoE", model := tmp_path / "mixture")
    config = LocalTrainer.Config(device="cpu", lora={} if kind == "adapters" else None)
    transport: Transport = plugins.load("weight_transports", "direct")(WeightsConfig())

    async def main() -> None:
        async with LocalTrainer(config, model, total_steps=1) as trainer:
            sent = await transport.send(trainer, 0)
            assert isinstance(sent.unpacked, dict) == (kind == "whole")
            before = checksum(await sent.at_rest())
            (batch,) = random_batches(model, 1)
            await trainer.step(batch, LOSS, 1.0)
            assert checksum(sent) != before
            with pytest.raises(WeightsError, match="the trainer has changed its weights since"):
                await sent.at_rest()

    asyncio.run(main())


def test_a_transport_of_a_user_moves_the_weights_of_a_run(tiny_model_dir: Path) -> None:
    async def main() -> None:
        async with (
            LocalEngine(LocalEngine.Config(), tiny_model_dir) as engine,
            WeightPublisher(engine, config=WeightsConfig(transport=f"{__name__}:Pigeon")) as sender,
        ):
            trainer = Given({name: w.clone() + 1 for name, w in engine.weights.items()})
            published = await sender.publish(trainer, 1)
            # The first bird was lost.
            assert (published.attempts, engine.policy_version) == (2, 1)
            assert checksum(engine.weights) == checksum(trainer.now)
            assert published.metrics()["weights/bytes"] == 7.0

    Pigeon.said.clear()
    asyncio.run(main())
    assert Pigeon.said == ["sent 1", "withdrawn", "sent 1", "received", "kept 1", "closed"]


class Flight(DirectShipment):
    size = 7

    def __init__(self, weights: Weights, lost: bool) -> None:
        super().__init__(weights)
        self.lost = lost

    def check(self) -> None:
        if self.lost:
            raise WeightsError("a hawk")
        Pigeon.said.append("received")


class Pigeon:
    """A transport whose first shipment does not arrive."""

    said: ClassVar[list[str]] = []

    def __init__(self, config: WeightsConfig) -> None:
        self.sent = 0

    async def send(self, trainer: Trainer, version: int) -> Shipment:
        self.sent += 1
        self.said.append(f"sent {version}")
        return Flight(await trainer.weights(), lost=self.sent == 1)

    def bytes_moved(self, parties: Parties) -> BytesMoved:
        return BytesMoved(7)

    async def withdraw(self, shipment: Shipment) -> None:
        self.said.append("withdrawn")

    async def deliver(self, trainer: Trainer, shipment: Shipment) -> None:
        return

    async def keep_only(self, shipments: Iterable[Shipment]) -> None:
        self.said.append(f"kept {len(list(shipments))}")

    def close(self) -> None:
        self.said.append("closed")


def test_a_transport_that_there_is_not_is_refused_with_those_that_there_are(
    tmp_path: Path,
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("env: guess_number\nweights: {transport: shared_memry}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(config)
    said = str(caught.value)
    assert said.startswith("weights.transport: ")
    assert "'shared_memory'?" in said
    assert f"{config}:2" in said


class OtherMachine:
    """`Machines`: one beside this one, whose memory is a folder."""

    def __init__(self, folder: Path) -> None:
        self.sent = store.WeightStore.open(folder)

    @staticmethod
    def own_name() -> str:
        is_rank = threading.current_thread() is not threading.main_thread()
        return "of the ranks" if is_rank else "of the driver"

    async def place(self, machine: str, version: int, bucket_bytes: int) -> BundlePlace:
        assert machine == "of the ranks"
        return self.sent.place(version)

    async def finish(self, place: BundlePlace, manifest: Manifest) -> WeightBundle:
        return place.finish_as(manifest)

    async def keep_sent(self, kept: Iterable[Shipment]) -> None:
        await self.sent.keep_only(kept)

    async def discard(self, folder: Path) -> None:
        BundlePlace(folder, 0, 0).remove()

    @asynccontextmanager
    async def bring_here(self, bundle: WeightBundle) -> AsyncIterator[WeightBundle]:
        raise AssertionError("nobody reads it here")
        yield bundle


@pytest.mark.parametrize("name", ["auto", "stream"])
def test_a_trainer_that_cannot_reach_the_files_writes_them_on_its_own_machine(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.setattr(store, "default_parent", lambda: tmp_path / "here")
    monkeypatch.setattr(BundlePlace, "is_here", lambda self: "there" in self.folder.parts)
    transport: Transport = plugins.load("weight_transports", name)(WeightsConfig(transport=name))

    async def main() -> None:
        trainer = Given(made(1))
        with pytest.raises(WeightsError, match=r"no rank .*folder that all machines see"):
            await transport.send(trainer, 1)
        there = OtherMachine(tmp_path / "there")
        with serving(there):
            first, second, third = [await transport.send(trainer, n) for n in (1, 2, 3)]
            if name == "auto":
                await transport.withdraw(second)
                assert sorted(there.sent.folder.glob("v*")) == [first.folder, third.folder]
            assert checksum(await received(transport, trainer, third)) == checksum(made(1))
            assert checksum(await third.at_rest()) == checksum(made(1))
            await transport.keep_only([third])
            assert list(there.sent.folder.glob("v*")) == [third.folder]
        there.sent.close()

    asyncio.run(main())
    assert not list((tmp_path / "here").rglob("*.safetensors"))
    transport.close()


def test_a_disk_that_no_rank_sees_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BundlePlace, "is_here", lambda self: "there" in self.folder.parts)
    config = WeightsConfig(transport="disk", folder=tmp_path / "disk")
    transport: Transport = plugins.load("weight_transports", "disk")(config)
    there = OtherMachine(tmp_path / "there")
    with serving(there), pytest.raises(WeightsError, match="folder that all machines see"):
        asyncio.run(transport.send(Given(made(1)), 1))
    transport.close()
    there.sent.close()
