"""The transport without storage: engines in this process read the trainer's own tensors."""

from collections.abc import Iterable

from agentrl.protocols import Trainer
from agentrl.weights.config import WeightsConfig
from agentrl.weights.moved import BytesMoved, Move, Parties
from agentrl.weights.shipment import Shipment, shipment_of


class DirectTransport:
    """Hands the trainer's tensors to the engines (`weights.transport=direct`)."""

    def __init__(self, config: WeightsConfig) -> None:
        """There is nothing to set."""

    async def send(self, trainer: Trainer, version: int) -> Shipment:
        """The trainer's weights, which are valid until its next step."""
        return shipment_of(await trainer.weights())

    async def deliver(self, trainer: Trainer, shipment: Shipment) -> None:
        """Everything has been sent."""

    def bytes_moved(self, parties: Parties) -> BytesMoved:
        """Each engine copies the tensors into its own."""
        return BytesMoved(
            0, [[Move("load", "memory", parties.copies * parties.size, parties.size)]]
        )

    async def withdraw(self, shipment: Shipment) -> None:
        """Nothing is stored."""

    async def keep_only(self, shipments: Iterable[Shipment]) -> None:
        """Nothing is stored."""

    def close(self) -> None:
        """Nothing is stored."""
