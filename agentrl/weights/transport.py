"""`Transport`: a way of the weights from the trainer to the engines (`weights.transport`).

A package registers one in the entry-point group `agentrl.weight_transports`: a function of
`WeightsConfig`. A transport only moves data. When engines load it is decided by the two phases of
`WeightPublisher`.
"""

from collections.abc import Iterable
from typing import Protocol

from agentrl.protocols import Trainer
from agentrl.weights.moved import BytesMoved, Parties
from agentrl.weights.shipment import Shipment


class Transport(Protocol):
    """Sends the versions of one trainer. The receiving half is the `Shipment`, which each engine
    reads in its own process.
    """

    async def send(self, trainer: Trainer, version: int) -> Shipment:
        """Send the trainer's current weights, or announce them (`Shipment.is_live`).

        Raises:
            WeightsError: they cannot be sent. Another attempt may succeed.
        """
        ...

    async def deliver(self, trainer: Trainer, shipment: Shipment) -> None:
        """Send what was only announced, while the engines that have staged it load it. By default,
        everything has been sent. It does not raise if an engine breaks off.

        Raises:
            WeightsError: the trainer cannot send.
        """
        return

    def bytes_moved(self, parties: Parties) -> BytesMoved:
        """The bytes that an update would move between these; nothing runs yet."""
        ...

    async def withdraw(self, shipment: Shipment) -> None:
        """Release a shipment that no engine has loaded: it is sent again as another one."""
        ...

    async def keep_only(self, shipments: Iterable[Shipment]) -> None:
        """Release all shipments but these, which engines that start later may still receive."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...
