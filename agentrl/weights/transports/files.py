"""Transports by files: weights are written once, as a bundle, and mapped by every engine."""

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from agentrl.errors import WeightsError
from agentrl.protocols import Trainer
from agentrl.weights import store
from agentrl.weights.config import WeightsConfig
from agentrl.weights.shipment import Shipment, shipment_of
from agentrl.weights.store import WeightStore

logger = logging.getLogger(__name__)


class FileTransport:
    """Writes bundles into the first of `parents` that takes them; each folder is used for good once
    the one before it has failed.
    """

    def __init__(self, parents: Sequence[Path], bucket_bytes: int) -> None:
        self._parents = list(parents)
        self._bucket_bytes = bucket_bytes
        self._stores: list[WeightStore] = []

    async def send(self, trainer: Trainer, version: int) -> Shipment:
        """The trainer's weights as a new bundle."""
        parent = self._parents[0]
        try:
            with self._store().place(version) as place:
                return shipment_of(await trainer.write_weights(place.write))
        except OSError as error:
            if len(self._parents) > 1:
                self._parents.pop(0)
                logger.warning(
                    "%s; from now on weights are published in %s", error, self._parents[0]
                )
            raise WeightsError(
                f"writing into {parent} failed: {error}. Make room there, or choose another place"
                " by weights.transport and weights.folder"
            ) from error

    async def withdraw(self, shipment: Shipment) -> None:
        """Remove the files of a shipment."""
        if shipment.folder is not None:
            await asyncio.to_thread(shutil.rmtree, shipment.folder, ignore_errors=True)

    async def keep_only(self, shipments: Iterable[Shipment]) -> None:
        """Remove the files of all other shipments."""
        kept = list(shipments)
        for bundles in self._stores:
            await bundles.keep_only(kept)

    def close(self) -> None:
        """Remove all files."""
        while self._stores:
            self._stores.pop().close()

    def _store(self) -> WeightStore:
        parent = self._parents[0]
        if not self._stores or self._stores[-1].folder.parent != parent:
            self._stores.append(WeightStore.open(parent, self._bucket_bytes))
        return self._stores[-1]


def auto(config: WeightsConfig) -> FileTransport:
    """Shared memory, or the disk when memory is full (`weights.transport=auto`)."""
    return FileTransport([store.default_parent(), _disk(config)], config.bucket_mib << 20)


def shared_memory(config: WeightsConfig) -> FileTransport:
    """This machine's shared memory (`weights.transport=shared_memory`)."""
    return FileTransport([store.SHARED_MEMORY], config.bucket_mib << 20)


def disk(config: WeightsConfig) -> FileTransport:
    """A folder, which several machines may share (`weights.transport=disk`)."""
    return FileTransport([_disk(config)], config.bucket_mib << 20)


def _disk(config: WeightsConfig) -> Path:
    # Other processes have other working directories.
    return (config.folder or Path(tempfile.gettempdir())).absolute()
