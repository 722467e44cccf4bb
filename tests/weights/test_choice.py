"""`weights.transport=auto` chooses by where trainer and engines are, and falls back to files."""

import asyncio
import logging
from collections.abc import Iterable, Mapping

import pytest
import torch

from agentrl.protocols import Trainer
from agentrl.weights.config import WeightsConfig
from agentrl.weights.moved import BytesMoved, Parties, Placed
from agentrl.weights.shipment import DirectShipment, Shipment
from agentrl.weights.transports.choice import LiveOrFiles, auto


@pytest.mark.parametrize(
    ("placed", "transport"),
    [
        (Placed(True, False, True, False), "stream"),
        (Placed(True, True, True, False), "handles"),
        (Placed(True, True, False, False), "files"),
        (Placed(True, False, True, True), "files"),
        (Placed(False, True, True, False), "files"),
    ],
)
def test_the_transport_fits_the_place_and_is_said(
    placed: Placed, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert placed.transport == transport
    with caplog.at_level(logging.INFO):
        made = auto(WeightsConfig(), placed)
    assert isinstance(made, LiveOrFiles) == (transport != "files")
    assert f"by {transport} " in caplog.text
    made.close()


class Sent(DirectShipment):
    def __init__(self, is_live: bool) -> None:
        super().__init__({"w": torch.zeros(1)})
        self.is_live = is_live


class Noting:
    """A transport that notes what it is asked."""

    def __init__(self, is_live: bool) -> None:
        self.is_live = is_live
        self.said: list[str] = []

    async def send(self, trainer: Trainer, version: int) -> Shipment:
        self.said.append(f"send {version}")
        return Sent(self.is_live)

    async def deliver(self, trainer: Trainer, shipment: Shipment) -> None:
        self.said.append("deliver")

    def bytes_moved(self, parties: Parties) -> BytesMoved:
        return BytesMoved(1 if self.is_live else 2)

    async def withdraw(self, shipment: Shipment) -> None:
        self.said.append("withdraw")

    async def keep_only(self, shipments: Iterable[Shipment]) -> None:
        return

    def close(self) -> None:
        self.said.append("close")


class NoTrainer(Trainer):
    async def weights(self) -> Mapping[str, torch.Tensor]:
        return {}


@pytest.mark.parametrize("first_arrives", [True, False])
def test_only_the_first_version_decides_whether_it_works(first_arrives: bool) -> None:
    live, files = Noting(True), Noting(False)
    transport = LiveOrFiles(live, files, "stream")
    trainer = NoTrainer()  # type: ignore[abstract]

    async def main() -> None:
        first = await transport.send(trainer, 1)
        await transport.deliver(trainer, first)
        if first_arrives:
            await transport.keep_only([first])
        else:
            await transport.withdraw(first)
        second = await transport.send(trainer, 2)
        await transport.deliver(trainer, second)
        await transport.withdraw(second)  # a fault of that version
        await transport.send(trainer, 3)
        transport.close()

    asyncio.run(main())
    if first_arrives:
        assert live.said == [
            "send 1",
            "deliver",
            "send 2",
            "deliver",
            "withdraw",
            "send 3",
            "close",
        ]
        assert files.said == ["close"]
    else:
        assert live.said == ["send 1", "deliver", "withdraw", "close"]
        assert files.said == ["send 2", "withdraw", "send 3", "close"]
