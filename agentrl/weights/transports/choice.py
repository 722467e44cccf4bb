"""`weights.transport=auto`: the transport that fits where trainer and engines are."""

import logging
from collections.abc import Iterable

from agentrl.protocols import Trainer
from agentrl.weights.config import WeightsConfig
from agentrl.weights.moved import BytesMoved, Parties, Placed
from agentrl.weights.shipment import Shipment
from agentrl.weights.transport import Transport
from agentrl.weights.transports.files import in_memory_or_on_disk
from agentrl.weights.transports.live import handles, stream

logger = logging.getLogger(__name__)


def auto(config: WeightsConfig, placed: Placed) -> Transport:
    """The transport that `auto` stands for there, which it says."""
    name = placed.transport
    logger.info("new weights go to the engines by %s (weights.transport=auto)", name)
    if name == "files":
        return in_memory_or_on_disk(config)
    live = handles(config) if name == "handles" else stream(config)
    return LiveOrFiles(live, in_memory_or_on_disk(config), name)


class LiveOrFiles:
    """A live transport, or files if its first version fails: then what it needs of the machine is
    not there, such as connections between the devices.
    """

    def __init__(self, live: Transport, files: Transport, name: str) -> None:
        self._live = live
        self._files = files
        self._name = name
        self._has_worked = False
        self._given_up = False

    async def send(self, trainer: Trainer, version: int) -> Shipment:
        """See `Transport`."""
        transport = self._files if self._given_up else self._live
        return await transport.send(trainer, version)

    async def deliver(self, trainer: Trainer, shipment: Shipment) -> None:
        """See `Transport`."""
        if shipment.is_live:
            await self._live.deliver(trainer, shipment)

    def bytes_moved(self, parties: Parties) -> BytesMoved:
        """See `Transport`. The live transport is expected to work."""
        return self._live.bytes_moved(parties)

    async def withdraw(self, shipment: Shipment) -> None:
        """See `Transport`."""
        if shipment.is_live and not self._has_worked and not self._given_up:
            self._given_up = True
            logger.warning(
                "the first weights did not reach the engines by %s: from now on they are sent in"
                " files, which takes longer. The warnings before this one say why",
                self._name,
            )
        await (self._live if shipment.is_live else self._files).withdraw(shipment)

    async def keep_only(self, shipments: Iterable[Shipment]) -> None:
        """See `Transport`. Engines serve these shipments."""
        kept = list(shipments)
        self._has_worked |= any(shipment.is_live for shipment in kept)
        await self._live.keep_only(kept)
        await self._files.keep_only(kept)

    def close(self) -> None:
        """See `Transport`."""
        self._live.close()
        self._files.close()
