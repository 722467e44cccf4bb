"""Published weights for machines that cannot read their folder: one receiver a machine, whatever
the number of its engines.

    files ──▶ actor on their machine ─ ─ Ray's object store ─ ─▶ actor here ──▶ files: engines

Both ends are actors of the run, so no weight goes through the controller. A receiver asks for the
pieces of a file (`BundleReceiver`), and Ray frees each as soon as it is written: its store never
holds a model. Engines map the copy as they map files of their own machine.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.cluster.ray_errors import errors_of_actor
from agentrl.cluster.ray_process import RayProcess, Surroundings, end
from agentrl.cluster.workers import PLACE_SECONDS
from agentrl.errors import EngineDeadError, WeightsError
from agentrl.weights.bundle import BundlePlace, Manifest, WeightBundle
from agentrl.weights.receiver import BundleReceiver
from agentrl.weights.shipment import Shipment
from agentrl.weights.store import WeightStore, default_parent

logger = logging.getLogger(__name__)

_CALLS = 1000
"""Most concurrent calls of a receiver. Ray requires a number."""
_ATTEMPTS = 3
"""How often a call is made whose receiver dies."""
_CLOSE_SECONDS = 10.0


class _ReceiverHost:
    """The actor of a machine: it keeps copies for the engines there, and reads files for the
    receivers of other machines.
    """

    def __init__(self) -> None:
        self._receiver = BundleReceiver()
        self._sent: WeightStore | None = None

    async def begin(self, surroundings: Surroundings) -> RayProcess:
        surroundings.settle()
        return RayProcess.own()

    async def receive(self, bundle: WeightBundle, source: Any) -> WeightBundle:
        """This machine's copy. `source`: the receiver of the machine where the bundle lies."""
        from ray.exceptions import RayError

        try:
            return await self._receiver.receive(bundle, source.read.remote)
        except RayError as error:
            raise WeightsError(
                f"{bundle} could not be read on its machine: {str(error).strip().splitlines()[-1]}"
            ) from error

    async def read(self, path: Path, offset: int, size: int) -> Any:
        """A piece of a file here, as an array, which Ray sends without another copy."""
        import numpy as np

        return await asyncio.to_thread(np.fromfile, path, np.uint8, size, offset=offset)

    async def keep_only(self, checksums: set[str]) -> None:
        await self._receiver.keep_only(checksums)

    async def place(self, version: int, bucket_bytes: int) -> BundlePlace:
        """A place for the ranks of this machine."""
        if self._sent is None:
            try:
                self._sent = WeightStore.open(default_parent(), bucket_bytes)
            except OSError as error:
                raise WeightsError(
                    f"weights cannot be written on their machine: {error}"
                ) from error
        return self._sent.place(version)

    async def finish(self, place: BundlePlace, manifest: Manifest) -> WeightBundle:
        try:
            return place.finish_as(manifest)
        except OSError as error:
            raise WeightsError(f"the files of {place} are gone: {error}") from error

    async def keep_sent(self, kept: Sequence[Shipment]) -> None:
        if self._sent is not None:
            await self._sent.keep_only(kept)

    async def discard(self, folder: Path) -> None:
        await asyncio.to_thread(BundlePlace(folder, 0, 0).remove)

    async def close(self) -> None:
        self._receiver.close()
        if self._sent is not None:
            self._sent.close()


@dataclass(slots=True)
class _Receiver:
    """The receiver of a machine, as the controller sees it."""

    actor: Any
    process: RayProcess | None = None


@dataclass(slots=True)
class _Wanted:
    """The checksums of the copies that an engine may read: the one that it serves, and the one that
    it is about to take.
    """

    node: str
    checksums: set[str] = field(default_factory=set)


class RayReceivers:
    """The receivers of a run, by the ids of Ray's nodes; implements `Machines`.

    Each is started when it is first needed, and again when it has died: then its copies are gone,
    and are fetched again. Close them at the end; if the controller is killed, they end with it, and
    their files with them.
    """

    def __init__(self) -> None:
        self._receivers: dict[str, _Receiver] = {}
        self._starting: dict[str, asyncio.Lock] = {}
        self._wanted: dict[object, _Wanted] = {}
        self._homes: dict[Path, str] = {}
        """The nodes of the stores that were opened there, by their folders."""

    @staticmethod
    def own_name() -> str:
        """See `Machines`: the id of Ray's node."""
        import ray

        node: str = ray.get_runtime_context().get_node_id()
        return node

    async def place(self, machine: str, version: int, bucket_bytes: int) -> BundlePlace:
        """See `Machines`."""
        try:
            place: BundlePlace = await self._ask(machine, "place", version, bucket_bytes)
        except EngineDeadError as error:
            raise WeightsError(f"weights cannot be written on a machine: {error}") from error
        self._homes[place.folder.parent] = machine
        return place

    async def finish(self, place: BundlePlace, manifest: Manifest) -> WeightBundle:
        """See `Machines`."""
        node = self._homes[place.folder.parent]
        try:
            bundle: WeightBundle = await self._ask(node, "finish", place, manifest)
        except EngineDeadError as error:
            raise WeightsError(f"weights were lost with their machine: {error}") from error
        return bundle

    async def keep_sent(self, kept: Iterable[Shipment]) -> None:
        """See `Machines`."""
        stays = [shipment for shipment in kept if shipment.is_remote]
        for node in set(self._homes.values()):
            await self._tell(node, "keep_sent", stays)

    async def discard(self, folder: Path) -> None:
        """See `Machines`."""
        if (node := self._homes.get(folder.parent)) is not None:
            await self._tell(node, "discard", folder)

    @asynccontextmanager
    async def bring_here(self, bundle: WeightBundle) -> AsyncIterator[WeightBundle]:
        """See `Machines`."""
        reader = object()
        try:
            try:
                copy = await self.bring(bundle, self.own_name(), reader)
            except EngineDeadError as error:
                raise WeightsError(f"{bundle} cannot be read on this machine: {error}") from error
            yield copy
        finally:
            await self.keep_only("", reader)
            self.forget(reader)

    async def bring(self, bundle: WeightBundle, node: str, engine: object) -> WeightBundle:
        """The copy of a bundle on a node, for an engine there: it stays until no engine of the node
        wants it (`keep_only`, `forget`).

        Raises:
            WeightsError: it cannot be read where it lies, or written there.
            EngineDeadError: no receiver can run there.
        """
        wanted = self._wanted.setdefault(engine, _Wanted(node))
        wanted.checksums.add(bundle.checksum)
        home = self._homes.get(bundle.folder.parent, self.own_name())
        try:
            source = await self._living_actor(home)
        except EngineDeadError as error:
            raise WeightsError(f"the machine of {bundle} cannot be reached: {error}") from error
        copy: WeightBundle = await self._ask(node, "receive", bundle, source)
        return copy

    async def keep_only(self, checksum: str, engine: object) -> None:
        """Note that an engine reads only the bundle with this checksum from now on, and remove the
        copies on its node that no engine wants.
        """
        if (wanted := self._wanted.get(engine)) is None:
            return
        wanted.checksums &= {checksum}
        kept = set[str]().union(
            *(other.checksums for other in self._wanted.values() if other.node == wanted.node)
        )
        await self._tell(wanted.node, "keep_only", kept)

    def forget(self, engine: object) -> None:
        """Note that an engine has ended. Its copies stay until other engines of its node take new
        weights, so its replacement finds them there.
        """
        self._wanted.pop(engine, None)

    async def close(self) -> None:
        """End all receivers, and remove their copies."""
        receivers, self._receivers = list(self._receivers.values()), {}
        for receiver in receivers:
            try:
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await _answer_of(receiver.actor.close.remote())
            except (_ReceiverGoneError, TimeoutError):
                pass  # it is killed anyway
            finally:
                await end(receiver.actor, receiver.process)

    async def _ask(self, node: str, method: str, *args: Any) -> Any:
        """The answer of a node's receiver; if it dies meanwhile, of its replacement."""
        why = ""
        for _ in range(_ATTEMPTS):
            actor = await self._living_actor(node)
            try:
                return await _answer_of(getattr(actor, method).remote(*args))
            except _ReceiverGoneError as error:
                why = str(error)
                await self._give_up(node, actor, why)
        raise EngineDeadError(
            f"the receiver of published weights on its machine died {_ATTEMPTS} times in a row:"
            f" {why}"
        )

    async def _tell(self, node: str, method: str, *args: Any) -> None:
        """Have a node's receiver remove files. If it is gone, so are its files."""
        if (receiver := self._receivers.get(node)) is not None:
            try:
                await _answer_of(getattr(receiver.actor, method).remote(*args))
            except _ReceiverGoneError as error:
                await self._give_up(node, receiver.actor, str(error))

    async def _living_actor(self, node: str) -> Any:
        """The actor of a node's receiver, which is started if there is none that answers."""
        async with self._starting.setdefault(node, asyncio.Lock()):
            if (receiver := self._receivers.get(node)) is not None:
                try:
                    await _answer_of(receiver.actor.begin.remote(Surroundings.own()))
                except _ReceiverGoneError as error:
                    await self._give_up(node, receiver.actor, str(error))
                else:
                    return receiver.actor
            self._receivers[node] = receiver = await _start_receiver(node)
            return receiver.actor

    async def _give_up(self, node: str, actor: Any, why: str) -> None:
        receiver = self._receivers.get(node)
        if receiver is None or receiver.actor is not actor:
            return  # it has been replaced
        del self._receivers[node]
        logger.warning("the receiver of published weights on a machine is replaced: %s", why)
        await end(receiver.actor, receiver.process)


async def _start_receiver(node: str) -> _Receiver:
    """A new receiver on a node.

    Raises:
        EngineDeadError: it does not start there.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote: Any = ray.remote
    # Its name in Ray's dashboard, `ray list actors` and `ps`.
    named = type("weights", (_ReceiverHost,), {})
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    host = remote(num_cpus=0, max_restarts=0)(named)
    receiver = _Receiver(host.options(scheduling_strategy=there, max_concurrency=_CALLS).remote())
    try:
        async with asyncio.timeout(PLACE_SECONDS):
            receiver.process = await _answer_of(receiver.actor.begin.remote(Surroundings.own()))
    except BaseException as error:
        await end(receiver.actor, None)
        if not isinstance(error, _ReceiverGoneError | TimeoutError):
            raise
        raise EngineDeadError(
            "no receiver of published weights could be started on its machine:"
            f" {error or f'no answer in {PLACE_SECONDS:g} s'}"
        ) from error
    return receiver


class _ReceiverGoneError(Exception):
    """The actor is gone, or its machine."""


async def _answer_of(reference: Any) -> Any:
    """Wait for the value of a Ray reference.

    Raises:
        _ReceiverGoneError: the actor is gone. Its own errors are raised unchanged.
    """
    with errors_of_actor(_ReceiverGoneError):
        return await asyncio.wrap_future(reference.future())
