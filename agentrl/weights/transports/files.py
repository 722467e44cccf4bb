"""Transports by files: weights are written once, as a bundle, and mapped by every engine."""

import asyncio
import ctypes
import logging
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.errors import WeightsError
from agentrl.flow import run_to_completion
from agentrl.protocols import Trainer
from agentrl.protocols.weight_source import LowRankBase, WeightSource
from agentrl.settings.precision import resolve_dtype
from agentrl.weights import store
from agentrl.weights.bundle import Bucket, BundlePlace, Manifest, Update, WeightBundle
from agentrl.weights.config import WeightsConfig
from agentrl.weights.machines import machines_of_cluster
from agentrl.weights.moved import (
    BytesMoved,
    Move,
    Parties,
    gather_moves,
    two_buckets_and_a_unit,
    write_move,
)
from agentrl.weights.plan import buckets_of
from agentrl.weights.shipment import Shipment
from agentrl.weights.store import WeightStore

if TYPE_CHECKING:
    import torch
    from torch import Tensor

logger = logging.getLogger(__name__)


class FileTransport:
    """Writes bundles into the first of `parents` that takes them; each folder is used for good once
    the one before it has failed.

    If no rank of the trainer reaches it, they write into the memory of rank 0's machine, unless all
    machines `share` the folder.
    """

    def __init__(
        self, parents: Sequence[Path], config: WeightsConfig, *, shared: bool = False
    ) -> None:
        self._parents = list(parents)
        self._shared = shared
        self._machine: str | None = None
        self._dtype = config.dtype
        self._bucket_bytes = config.bucket_mib << 20
        self._stores: list[WeightStore] = []

    async def send(self, trainer: Trainer, version: int) -> Shipment:
        """The trainer's weights as a new bundle."""
        place = await self.place(version)
        answers = await self._write(trainer, place)
        if not any(answers):  # no rank reaches this machine: write on that of rank 0
            await self.follow(trainer, place)
            place = await self.place(version)
            answers = await self._write(trainer, place)
        return await self.finish(place, answers)

    async def _write(self, trainer: Trainer, place: BundlePlace) -> Sequence["Written | None"]:
        try:
            return await trainer.send_weights(WriteBuckets(place, self._dtype))
        except BaseException as error:
            await run_to_completion(self.discard(place.folder))
            if not isinstance(error, OSError):
                raise
            self.give_up(place, error)
            raise _not_written(place.folder.parent.parent, error) from error

    async def place(self, version: int) -> BundlePlace:
        """A new place for the files of a version.

        Raises:
            WeightsError: nothing can be written there.
        """
        machines = machines_of_cluster()
        if machines is not None and self._machine is not None:
            machine, self._machine = self._machine, None
            place = await machines.place(machine, version, self._bucket_bytes)
            self._machine = machine  # else its ranks are looked for again
            return place
        parent = self._parents[0]
        try:
            if not self._stores or self._stores[-1].folder.parent != parent:
                self._stores.append(WeightStore.open(parent, self._bucket_bytes))
            return self._stores[-1].place(version)
        except OSError as error:
            self._next_parent(error)
            raise _not_written(parent, error) from error

    async def follow(self, trainer: Trainer, place: BundlePlace) -> None:
        """Write on the machine of the trainer's rank 0 from now on: no rank reaches this place.

        Raises:
            WeightsError: there is no such machine, or the folder is meant for all of them.
        """
        machines = machines_of_cluster()
        if machines is None or self._shared:
            raise _unreachable(place)
        found = (await trainer.send_weights(OnMachine(machines.own_name)))[0]
        self._machine = None if found == machines.own_name() else found
        if self._machine is not None:
            logger.info("weights are written on the machine of the trainer's rank 0")

    async def finish(self, place: BundlePlace, answers: Sequence["Written | None"]) -> WeightBundle:
        """The bundle of the files that the ranks wrote to a place.

        Raises:
            WeightsError: no rank reached it, or they are gone.
        """
        machines = machines_of_cluster()
        if machines is not None and not self._is_here(place.folder):
            return await machines.finish(place, manifest_of(place, answers))
        try:
            return bundle_of(place, answers)
        except OSError as error:
            await run_to_completion(self.discard(place.folder))
            self.give_up(place, error)
            raise _not_written(place.folder.parent.parent, error) from error

    def give_up(self, place: BundlePlace, error: OSError) -> None:
        """Use the next folder from now on, if there is one: this one does not take the files."""
        if self._is_here(place.folder):
            self._next_parent(error)

    def _next_parent(self, error: OSError) -> None:
        if len(self._parents) > 1:
            self._parents.pop(0)
            logger.warning("%s; from now on weights are published in %s", error, self._parents[0])

    async def discard(self, folder: Path) -> None:
        """Remove what was written to a place."""
        machines = machines_of_cluster()
        if machines is not None and not self._is_here(folder):
            await machines.discard(folder)
        else:
            await asyncio.to_thread(BundlePlace(folder, 0, 0).remove)

    async def deliver(self, trainer: Trainer, shipment: Shipment) -> None:
        """Everything has been sent."""

    def bytes_moved(self, parties: Parties) -> BytesMoved:
        """The ranks write the files; each other machine with engines fetches a copy, which it
        checks; each process on the first machine checks all files; each then loads its part, or
        adapters whole.
        """
        size, home = parties.size, parties.ranks[0]
        others = 0 if self._shared else parties.elsewhere(home)
        near = len(parties.engines) if self._shared else list(parties.engines).count(home)
        phases: list[list[Move]] = [[*gather_moves(parties), write_move(parties)]]
        if others:
            fetched = others * size
            # The machines fetch from the first one, by one of its network cards.
            phases.append([Move("fetch", "network", fetched, fetched)])
            phases.append([Move("store and check", "writing", fetched, size)])
        if near:
            phases.append([Move("check", "reading", near * parties.readers * size, size)])
        each = size + parties.base if parties.low_rank else size // parties.slices
        phases.append([Move("load", "reading", parties.copies * each, each)])
        in_memory = self._parents[0] == store.SHARED_MEMORY
        return BytesMoved(
            size,
            phases,
            held=two_buckets_and_a_unit(parties),
            stored=2 * size * in_memory,
            copied=0 if self._shared else 2 * size,
        )

    async def withdraw(self, shipment: Shipment) -> None:
        """Remove the files of a shipment."""
        if shipment.folder is not None:
            await self.discard(shipment.folder)

    async def keep_only(self, shipments: Iterable[Shipment]) -> None:
        """Remove the files of all other shipments."""
        kept = list(shipments)
        for bundles in self._stores:
            await bundles.keep_only(kept)
        if (machines := machines_of_cluster()) is not None:
            await machines.keep_sent(kept)

    def close(self) -> None:
        """Remove all files."""
        while self._stores:
            self._stores.pop().close()

    def _is_here(self, folder: Path) -> bool:
        """True if a place is in a folder of this process."""
        return any(folder.parent == own.folder for own in self._stores)


@dataclass(frozen=True, slots=True)
class Written:
    """The files that a rank wrote."""

    buckets: Sequence[Bucket]
    update: LowRankBase | None
    """The folder that the weights are an update of; None for whole weights."""


@dataclass(frozen=True, slots=True)
class WriteBuckets:
    """`SendWeights`: the ranks that can reach `place` take turns at writing the files of a bundle
    there; all ranks give the writer what they have of the weights, and the next one while it
    writes. The answer is None if no rank can reach it.
    """

    place: BundlePlace
    dtype: str

    def __call__(self, source: WeightSource) -> Written | None:
        """Write this rank's files.

        Raises:
            OSError: they cannot be written.
        """
        writers = source.ranks_that(self.place.is_here())
        if not writers:
            return None
        dtype = number_format(self.dtype, source)
        buckets = buckets_of(source.units, self.place.bucket_bytes, dtype.itemsize)
        writing: list[Future[Bucket]] = []
        # An error is raised at the end: the other ranks still need this one to gather theirs.
        with ThreadPoolExecutor(1, thread_name_prefix="weights") as writer:
            for number, units in enumerate(buckets):
                to = writers[number % len(writers)]
                weights: dict[str, Tensor] = {}
                for unit in units:
                    weights |= source.gather(unit, [to], dtype)
                if source.rank == to and not (writing and writing[-1].exception()):
                    writing.append(writer.submit(write_and_let_go, self.place, number, weights))
        written = [future.result() for future in writing]
        return Written(written, source.update)


def write_and_let_go(place: BundlePlace, number: int, weights: dict[str, "Tensor"]) -> Bucket:
    """Write a bucket in a thread, and let go of it: the thread itself would keep its arguments for
    a while after the next bucket has begun.
    """
    try:
        return place.write_bucket(number, weights)
    finally:
        weights.clear()
        _trim_heap()


def _trim_heap() -> None:
    """Give the memory of tensors that are gone back to the system, of which glibc keeps 64 MiB."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


@dataclass(frozen=True, slots=True)
class OnMachine:
    """`SendWeights`: the rank's machine, by a function that names its own."""

    own_name: Callable[[], str]

    def __call__(self, source: WeightSource) -> str:
        """Its name."""
        return self.own_name()


def bundle_of(place: BundlePlace, answers: Sequence[Written | None]) -> WeightBundle:
    """The bundle of the files that the ranks wrote on this machine.

    Raises:
        WeightsError: no rank reached the place.
    """
    return place.finish_as(manifest_of(place, answers))


def manifest_of(place: BundlePlace, answers: Sequence[Written | None]) -> Manifest:
    """The manifest of the files that the ranks wrote.

    Raises:
        WeightsError: no rank reached the place.
    """
    written = [answer for answer in answers if answer is not None]
    if not written:
        raise _unreachable(place)
    buckets = sorted((bucket for one in written for bucket in one.buckets), key=attrgetter("file"))
    base = written[0].update
    update = None if base is None else Update(base=base.base, scales=dict(base.scales))
    return Manifest(version=place.version, buckets=tuple(buckets), update=update).sealed()


def _not_written(parent: Path, error: OSError) -> WeightsError:
    return WeightsError(
        f"writing into {parent} failed: {error}. Make room there, or choose another place by"
        " weights.transport and weights.folder"
    )


def _unreachable(place: BundlePlace) -> WeightsError:
    return WeightsError(
        f"no rank of the trainer is on the machine of {place.folder}, where the weights are to be"
        " written: write weights.transport=disk and a weights.folder that all machines see"
    )


def number_format(name: str, source: WeightSource) -> "torch.dtype":
    """The number format of the settings; `auto` is that of an engine on such a device."""
    import torch

    if name == "auto":
        name = resolve_dtype("auto", None, gpu=source.device.type == "cuda")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def in_memory_or_on_disk(config: WeightsConfig) -> FileTransport:
    """Shared memory, or the disk when memory is full (`weights.transport=files`)."""
    return FileTransport([store.default_parent(), _disk(config)], config)


def shared_memory(config: WeightsConfig) -> FileTransport:
    """This machine's shared memory (`weights.transport=shared_memory`)."""
    return FileTransport([store.SHARED_MEMORY], config)


def disk(config: WeightsConfig) -> FileTransport:
    """A folder, which several machines may share (`weights.transport=disk`)."""
    return FileTransport([_disk(config)], config, shared=True)


def _disk(config: WeightsConfig) -> Path:
    # Other processes have other working directories.
    return (config.folder or Path(tempfile.gettempdir())).absolute()
