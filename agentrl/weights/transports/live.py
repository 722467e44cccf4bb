"""Transports from memory to memory: `stream` and `handles`.

    controller         ranks                                   readers (engines' processes)
    send          ──▶  OpenLanes: rank 0 serves the meeting
    stage         ───────────────────────────────────────────▶ enroll at the meeting
    deliver       ──▶  SendBuckets: make the roll, then for
                       each bucket: gather, pack, send    ──▶  commit: join, load the arrivals
    at_rest       ──▶  LateFiles: write the buckets beside
                       the next step

The ranks gather a bucket at a time, on the rank that sends it, so no process ever holds the model
whole. The buckets are also written into files, a `WeightBundle`, for engines that start later:
until then each rank has those that it writes in main memory.
"""

import asyncio
import itertools
import logging
import uuid
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from agentrl.errors import AgentRLError, WeightsError
from agentrl.flow import run_to_completion
from agentrl.net.interfaces import LOOPBACK, own_address
from agentrl.protocols import Trainer
from agentrl.protocols.weight_source import LowRankBase, WeightSource
from agentrl.weights.bundle import BundlePlace, WeightBundle
from agentrl.weights.config import WeightsConfig
from agentrl.weights.moved import (
    LOOK_SECONDS,
    BytesMoved,
    Move,
    Parties,
    gather_moves,
    two_buckets_and_a_unit,
    write_move,
)
from agentrl.weights.plan import BucketPlan, SendingPlan, is_intact, pack, seal, weights_in
from agentrl.weights.shipment import Reader, Shipment, place_of
from agentrl.weights.transports.files import (
    Written,
    in_memory_or_on_disk,
    number_format,
)
from agentrl.weights.transports.late_files import LateFiles, RankFiles, told_by

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.weights.attendance import Attendance
    from agentrl.weights.lanes import ReadingLane, SendingLane
    from agentrl.weights.meeting import Meeting, Roll

logger = logging.getLogger(__name__)
Kind = Literal["stream", "handles"]
_LOOK_FOR_FILES_SECONDS = 0.2
_REPLACED = "a newer version of the weights has replaced this one"
_LEASE_SECONDS = 30.0
"""How long a reader may give no sign of life before it is not waited for, as it is stopped or cut
off. The end of its process is noticed at once.
"""


@dataclass(frozen=True, slots=True)
class Lanes:
    """The description of the lanes of a transport, which all processes have."""

    id: str
    """The same for all versions of a transport; no other has it."""
    kind: Kind
    address: str
    """Where the ranks and the readers meet."""
    seconds: float
    """How long anything may take."""
    plan: SendingPlan
    senders: Sequence[int]
    """Stream: the ranks that send, in turns."""
    places: Mapping[str, Sequence[int]]
    """Handles: the ranks on each device, which send to the readers there, in turns."""

    def senders_of(self, number: int, places: Iterable[str]) -> list[int]:
        """The ranks that send a bucket to readers in these places."""
        if self.kind == "stream":
            return [self.senders[number % len(self.senders)]]
        return [self.places[place][number % len(self.places[place])] for place in sorted(places)]


@dataclass(frozen=True, slots=True)
class OpenedLanes:
    """A rank's answer when lanes are opened."""

    address: str
    place: str
    """Where readers can open its memory; "" if none can."""
    is_writer: bool
    plan: SendingPlan
    update: LowRankBase | None


class LiveShipment(Shipment):
    """A version that is sent when the engines are ready for it. Pickles as a reference to where the
    ranks and the readers meet.
    """

    def __init__(self, lanes: Lanes, key: str, folder: Path) -> None:
        self.is_remote = self.is_live = True
        self.folder: Path = folder
        self.lanes = lanes
        self.key = key
        self.rest: _LateBundle | None = None
        """The files; None where the shipment is read."""

    @property
    def size(self) -> int:
        """Bytes that each reader gets."""
        return self.lanes.plan.size

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all weights."""
        return dict(self.lanes.plan.shapes)

    def check(self) -> None:
        """Nothing has been sent yet."""

    def enroll(self, reader: Reader) -> None:
        """See `Shipment`.

        Raises:
            WeightsError: the trainer cannot be reached, or has no rank on the reader's device.
        """
        known = self.lanes.places
        if self.lanes.kind == "handles" and reader.place not in known:
            raise WeightsError(
                "weights.transport=handles needs a rank of the trainer on each engine's device:"
                f" there is none on {reader.place}, only on {', '.join(sorted(known))}. Write"
                " weights.transport=stream"
            )
        _reading(self.lanes, reader).enroll(self.key)

    def join(self, reader: Reader) -> None:
        """See `Shipment`."""
        _reading(self.lanes, reader).join(self.key)

    def leave(self, reader: Reader) -> None:
        """See `Shipment`."""
        which = self.lanes.id, self.lanes.address, reader.name
        if (reading := _readings.pop(which, None)) is not None:
            reading.leave()

    def arrivals(self, reader: Reader) -> Generator[tuple[str, "Tensor"]]:
        """See `Shipment`."""
        return _reading(self.lanes, reader).arrivals(self.key)

    async def at_rest(self) -> Shipment:
        """The files, as soon as they are written.

        Raises:
            WeightsError: they could not be.
        """
        if self.rest is None:
            raise WeightsError(f"version {self.key} is being sent, and was not kept in files")
        return await self.rest.bundle()

    def __getitem__(self, name: str) -> "Tensor":
        raise WeightsError(f"{name} arrives once, when the engines are ready: use `arrivals`")

    def __iter__(self) -> Iterator[str]:
        return iter(self.lanes.plan.shapes)

    def __len__(self) -> int:
        return len(self.lanes.plan.shapes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LiveShipment) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __reduce__(self) -> tuple[type["LiveShipment"], tuple[Lanes, str, Path]]:
        return LiveShipment, (self.lanes, self.key, self.folder)

    def __repr__(self) -> str:
        return f"the weights {self.key} that {self.lanes.address} sends"

    @property
    def _identity(self) -> tuple[str, str]:
        return self.lanes.id, self.key


class _LateBundle:
    """The files of a version, which are put together when somebody asks for them first."""

    def __init__(self) -> None:
        self.is_released = asyncio.Event()
        """Set when the version was replaced or withdrawn: its files are no longer needed."""
        self._is_sent = asyncio.Event()
        self._turn = asyncio.Lock()
        self._make: Callable[[], Awaitable[WeightBundle]] | None = None
        self._made: WeightBundle | None = None
        self._failure = ""

    def begin(self, make: Callable[[], Awaitable[WeightBundle]]) -> None:
        """The version has been sent, and `make` waits for its files."""
        self._make = make
        self._is_sent.set()

    def fail(self, why: str) -> None:
        """There will be no files."""
        self._failure = why
        self._is_sent.set()

    async def release(self) -> None:
        """Make no files from now on; returns when none are being made."""
        self.is_released.set()
        async with self._turn:
            if self._made is None and not self._failure:
                self.fail(_REPLACED)

    async def bundle(self) -> WeightBundle:
        """See `LiveShipment.at_rest`."""
        await self._is_sent.wait()
        async with self._turn:
            if self._made is None and not self._failure:
                assert self._make is not None
                try:
                    self._made = await self._make()
                except WeightsError as error:
                    self._failure = str(error)
        if self._made is None:
            raise WeightsError(self._failure)
        return self._made


class LiveTransport:
    """`Transport` from the memory of the ranks into that of the engines, by this kind of lanes."""

    def __init__(self, config: WeightsConfig, kind: Kind) -> None:
        self._config = config
        self._kind = kind
        self._files = in_memory_or_on_disk(config)
        self._id = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._resting: list[LiveShipment] = []
        """Those whose files are written, or may still be."""

    async def send(self, trainer: Trainer, version: int) -> Shipment:
        """Open the lanes for a version, which `deliver` sends. Low-rank updates are small, and are
        sent as files.
        """
        place, opened = await self._open_lanes(trainer, version)
        if not any(one.is_writer for one in opened):
            await self._files.follow(trainer, place)
            place, opened = await self._open_lanes(trainer, version)
        if opened[0].update is not None:
            return await self._files.send(trainer, version)
        places: dict[str, list[int]] = {}
        for rank, one in enumerate(opened):
            if one.place:
                places.setdefault(one.place, []).append(rank)
        lanes = Lanes(
            self._id,
            self._kind,
            opened[0].address,
            self._config.seconds,
            opened[0].plan,
            [rank for rank, one in enumerate(opened) if one.is_writer],
            places,
        )
        shipment = LiveShipment(lanes, f"v{version}-{next(self._numbers)}", place.folder)
        shipment.rest = _LateBundle()
        self._place = place
        return shipment

    async def _open_lanes(
        self, trainer: Trainer, version: int
    ) -> tuple[BundlePlace, Sequence["OpenedLanes"]]:
        place = await self._files.place(version)
        return place, await trainer.send_weights(OpenLanes(self._id, self._config, place))

    async def deliver(self, trainer: Trainer, shipment: Shipment) -> None:
        """Send the version to the engines that have staged it. The ranks then write its files,
        while the trainer goes on.
        """
        if not isinstance(shipment, LiveShipment) or shipment.rest is None:
            return
        send = SendBuckets(shipment.lanes, shipment.key, self._place)
        try:
            answers = await trainer.send_weights(send)
        except BaseException as error:
            await run_to_completion(self._files.discard(shipment.folder))
            shipment.rest.fail(str(error))
            raise
        for rank, answer in enumerate(answers):
            if answer.not_sent:
                logger.warning(
                    "rank %d of the trainer could not send new weights to all engines: %s",
                    rank,
                    answer.not_sent,
                )
        self._resting.append(shipment)
        rest = shipment.rest
        rest.begin(partial(self._make_bundle, trainer, send, answers, rest.is_released))

    async def _make_bundle(
        self,
        trainer: Trainer,
        send: "SendBuckets",
        answers: Sequence["Delivered"],
        is_released: asyncio.Event,
    ) -> WeightBundle:
        """The files of a version that was sent, when they are written. If ranks have died
        meanwhile, those that are started in their place write them, unless they have trained on.
        """
        try:
            written = await self._await_files(send, answers, is_released)
        except WeightsError:
            if is_released.is_set():
                raise
            sums = {number: it for answer in answers for number, it in answer.sums.items()}
            try:
                answers = await trainer.send_weights(replace(send, sums=sums))
            except (AgentRLError, OSError) as error:
                raise WeightsError(str(error)) from error
            written = [answer.files for answer in answers]
        place = send.place
        if failures := [files.error for files in written if files is not None and files.error]:
            await run_to_completion(self._files.discard(place.folder))
            self._files.give_up(place, OSError(failures[0]))
            raise WeightsError(f"the files of new weights could not be written: {failures[0]}")
        found = [None if files is None else Written(files.buckets, None) for files in written]
        return await run_to_completion(self._files.finish(place, found))

    async def _await_files(
        self,
        send: "SendBuckets",
        answers: Sequence["Delivered"],
        is_released: asyncio.Event,
    ) -> Sequence[RankFiles | None]:
        """Wait until all ranks have written their files, and return what they report.

        Raises:
            WeightsError: the ranks have died, or the files are not wanted any more.
        """
        found = [answer.files for answer in answers]
        later = [files_of(send.key, rank) for rank, one in enumerate(answers) if one.writes_on]
        if not later:
            return found
        meeting = await asyncio.to_thread(_meeting_of, send.lanes)
        try:
            async with asyncio.timeout(self._config.seconds):
                told = await asyncio.to_thread(told_by, meeting, later)
                while told is None:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(is_released.wait(), _LOOK_FOR_FILES_SECONDS)
                    if is_released.is_set():
                        raise WeightsError(_REPLACED)
                    told = await asyncio.to_thread(told_by, meeting, later)
        except TimeoutError as error:
            raise WeightsError(
                f"the files of new weights were not written in {self._config.seconds:g} s"
                " (weights.deadline)"
            ) from error
        return [*found, *told]

    def bytes_moved(self, parties: Parties) -> BytesMoved:
        """The ranks that send gather and send at the same time, and write beside the next step. By
        `stream`, every reader gets all bytes, and each machine once; by `handles`, every reader
        copies all of them, and where ranks share several devices with readers, all ranks gather
        everything.
        """
        size, kept = parties.size, self._files.bytes_moved(parties)
        if parties.low_rank:
            return kept
        everywhere = self._kind == "handles" and len(parties.places) > 1
        moves = gather_moves(parties, everywhere=everywhere)
        waiting = 0.0
        if self._kind == "stream":
            moves.append(Move("send", "link", parties.copies * size, size))
            if others := parties.elsewhere(parties.ranks[0]):
                moves.append(Move("send to other machines", "network", others * size, size))
        else:
            # Each byte is read and written.
            moves.append(Move("copy", "memory", 2 * parties.copies * size, 2 * size))
            waiting = parties.buckets * LOOK_SECONDS
        buckets = min(size, 2 * max(parties.bucket, parties.unit))
        return BytesMoved(
            size,
            [moves],
            waiting,
            two_buckets_and_a_unit(parties),
            buckets,
            kept.stored,
            beside=[write_move(parties)],
            kept=size // parties.writers,
        )

    async def withdraw(self, shipment: Shipment) -> None:
        """Remove the files of a shipment, of which no more are made."""
        if isinstance(shipment, LiveShipment) and shipment.rest is not None:
            await shipment.rest.release()
        await self._files.withdraw(shipment)

    async def keep_only(self, shipments: Iterable[Shipment]) -> None:
        """Remove the files of all other shipments, of which no more are made: a folder that
        appeared after its removal would stay.
        """
        kept = list(shipments)
        for shipment in self._resting:
            if shipment not in kept and shipment.rest is not None:
                await shipment.rest.release()
        self._resting = [shipment for shipment in self._resting if shipment in kept]
        await self._files.keep_only(kept)

    def close(self) -> None:
        """Remove all files, and leave the meeting."""
        self._files.close()
        _opened.pop(self._id, None)
        _late.pop(self._id, None)
        for which in [which for which in _readings if which[0] == self._id]:
            _readings.pop(which).leave()


@dataclass(frozen=True, slots=True)
class OpenLanes:
    """`SendWeights`: rank 0 serves the meeting of these lanes, from the first version on."""

    id: str
    config: WeightsConfig
    place: BundlePlace

    def __call__(self, source: WeightSource) -> OpenedLanes:
        """Open this rank's lanes, and describe them."""
        from agentrl.weights.meeting import Meeting

        if source.rank == 0 and self.id not in _opened:
            host = LOOPBACK if self.config.host is None else self.config.host or own_address()
            _opened[self.id] = _RankLanes(Meeting.serve(host, self.config.seconds))
        dtype = number_format(self.config.dtype, source)
        is_here = self.place.is_here()
        # Main memory that readers open is a file beside the place.
        opens = is_here or source.device.type == "cuda"
        return OpenedLanes(
            _opened[self.id].meeting.address if source.rank == 0 else "",
            place_of(str(source.device)) if opens else "",
            is_here,
            SendingPlan.of(
                source.units if source.rank == 0 else (), self.config.bucket_mib << 20, dtype
            ),
            source.update,
        )


@dataclass(slots=True)
class _RankLanes:
    """A rank's end of the lanes of a transport, from one version to the next."""

    meeting: "Meeting"
    roll: "Roll | None" = None
    """That of the last version, if its group is whole."""
    group: Any = None
    """The group of `roll`, if this rank sends."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """The report of a rank that has sent a version."""

    files: RankFiles | None
    """The files that it wrote; None if there are none, or not yet."""
    writes_on: bool
    """It will tell the meeting what it wrote."""
    sums: Mapping[int, int]
    """The sums of the buckets that it writes, by their numbers."""
    not_sent: str = ""
    """Why the readers did not get everything from it."""


@dataclass(frozen=True, slots=True)
class SendBuckets:
    """`SendWeights`: the ranks send a version to the readers that are ready for it."""

    lanes: Lanes
    key: str
    place: BundlePlace
    sums: Mapping[int, int] | None = None
    """Given if the version has been sent, and only its files are written, before this returns: the
    sums of the buckets, which are others if the trainer has gone on."""

    def __call__(self, source: WeightSource) -> Delivered:
        """Gather and send, and begin to write. A failure to send does not keep this rank from
        giving the others what they gather.
        """
        try:
            return self._deliver(source)
        except BaseException:
            # Else the readers would wait for the rest until their deadline.
            if (mine := _opened.get(self.lanes.id)) is not None:
                mine.roll = mine.group = None
            raise

    def _deliver(self, source: WeightSource) -> Delivered:
        if (last := _late.pop(self.lanes.id, None)) is not None:
            last.exception()  # what it writes is still in memory
        lane = (
            self._open_lane(source) if self.sums is None else _OpenLane(None, (), "", meets=False)
        )
        with _Outbox(self, source, lane.sending) as outbox:
            self._fill(outbox, source, lane.places)
            delivered = outbox.finish(tells=lane.meets)
        mine = _opened.get(self.lanes.id)
        if mine is not None and (lane.failure or delivered.not_sent):
            mine.roll = mine.group = None
        return replace(delivered, not_sent=lane.failure or delivered.not_sent)

    def _fill(self, outbox: "_Outbox", source: WeightSource, places: Sequence[str]) -> None:
        writers = source.ranks_that(self.place.is_here()) or source.ranks_that(True)
        for number, bucket in enumerate(self.lanes.plan.buckets):
            senders = self.lanes.senders_of(number, places)
            able = [rank for rank in senders if rank in writers] or writers
            writer = able[number % len(able)]
            to = sorted({*senders, writer})
            is_mine = source.rank in to
            if is_mine:
                outbox.begin(is_sent=source.rank in senders)
            for unit in bucket.units:
                # One unit at a time: a bucket is whole only in the buffer that it is sent from.
                weights = source.gather(unit, to, outbox.dtype)
                if is_mine:
                    outbox.put(bucket, weights)
            if is_mine:
                outbox.finish_bucket(number, is_written=source.rank == writer)

    def _open_lane(self, source: WeightSource) -> "_OpenLane":
        """Open this rank's lane to the readers of the version."""
        # The others look for rank 0 only if it has not been started again since.
        # Each `_all_ranks` is a collective, so all ranks have to take the same branches here.
        is_served = self._all_ranks(source, source.rank > 0 or self.lanes.id in _opened)
        mine = self._own_lanes(source) if is_served else None
        if not self._all_ranks(source, mine is not None):
            return _OpenLane(None, (), "the ranks were started again", meets=False)
        assert mine is not None
        is_whole = self._all_ranks(source, mine.roll is not None)
        roll, failure = None, "another rank does not know the readers"
        try:
            if source.rank == 0:
                last, near = mine.roll if is_whole else None, place_of(str(source.device))
                roll = mine.meeting.make_roll(self.key, last, _LEASE_SECONDS, near)
            else:
                roll = mine.meeting.roll(self.key)
        except (WeightsError, RuntimeError) as error:
            failure = str(error)
        # All ranks must agree on who sends what.
        if not self._all_ranks(source, roll is not None):
            return _OpenLane(None, (), failure)
        assert roll is not None
        try:
            return _OpenLane(self._sending_lane(source, mine, roll), _places(roll), "")
        except (WeightsError, RuntimeError, OSError) as error:
            return _OpenLane(None, _places(roll), str(error))

    def _all_ranks(self, source: WeightSource, can: bool) -> bool:
        """True if all ranks can."""
        return len(source.ranks_that(can)) == len(source.ranks_that(True))

    def _own_lanes(self, source: WeightSource) -> _RankLanes | None:
        from agentrl.weights.meeting import Meeting

        if source.rank > 0 and self.lanes.id not in _opened:
            try:
                _opened[self.lanes.id] = _RankLanes(
                    Meeting.at(self.lanes.address, self.lanes.seconds)
                )
            except WeightsError:
                return None
        return _opened.get(self.lanes.id)

    def _sending_lane(
        self, source: WeightSource, mine: _RankLanes, roll: "Roll"
    ) -> "SendingLane | None":
        """This rank's end of the lane; None if it has nobody to send to."""
        import torch

        from agentrl.weights import lanes as kinds

        rank, largest = source.rank, self.lanes.plan.largest
        if self.lanes.kind == "handles":
            mine.roll = roll
            place = next((p for p, ranks in self.lanes.places.items() if rank in ranks), "")
            readers = [reader.name for reader in roll.readers if reader.place == place]
            if not readers:
                return None
            make = partial(kinds.memory, source.device, self.place.folder.parent, rank, largest)
            to = kinds.Audience(mine.meeting, f"{self.key}/{place}", readers, _LEASE_SECONDS)
            try:
                return kinds.HandleSending(to, make)
            except OSError:
                to.break_off()
                raise
        if mine.roll is None or mine.roll.group != roll.group:
            mine.roll, mine.group = roll, None
            if rank in self.lanes.senders and roll.readers:
                mine.group = kinds.broadcast_group(mine.meeting, roll, rank, 0, self.lanes.seconds)
        if mine.group is None:
            return None
        device = kinds.device_of_group(roll, source.device)
        to = kinds.Audience(mine.meeting, self.key, roll.names, _LEASE_SECONDS)
        new = partial(torch.empty, largest, dtype=torch.uint8, device=device)
        return kinds.GroupSending(mine.group, to, new)


@dataclass(frozen=True, slots=True)
class _OpenLane:
    """A rank's lane for one version."""

    sending: "SendingLane | None"
    places: Sequence[str]
    """Where there are readers."""
    failure: str
    meets: bool = True
    """The meeting is there, so the controller can be told of files."""


def files_of(key: str, rank: int) -> str:
    """The key of what a rank tells the meeting of its files of a version."""
    return f"{key}/files/{rank}"


def _meeting_of(lanes: Lanes) -> "Meeting":
    from agentrl.weights.meeting import Meeting

    return Meeting.at(lanes.address, lanes.seconds)


def _places(roll: "Roll") -> Sequence[str]:
    return sorted({reader.place for reader in roll.readers})


class _Outbox:
    """Packs the buckets of a rank into its buffers, sends them, and begins to write them."""

    def __init__(
        self, what: SendBuckets, source: WeightSource, sending: "SendingLane | None"
    ) -> None:
        import torch

        self._what = what
        self._source = source
        self._sending_lane = sending
        self.dtype: torch.dtype = getattr(torch, what.lanes.plan.dtype)
        self._buffer = self._own = torch.empty(0, dtype=torch.uint8)
        self._files: LateFiles | None = None
        self._count = 0
        self._is_sent = False
        self._not_sent = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._break_off()
            if self._files is not None:
                self._files.close()

    def _break_off(self) -> None:
        if self._sending_lane is not None:
            self._sending_lane.break_off()
        self._sending_lane = None

    def begin(self, *, is_sent: bool) -> None:
        """Wait for a buffer for the next bucket."""
        import torch

        self._is_sent = False
        if is_sent and self._sending_lane is not None:
            try:
                self._buffer = self._sending_lane.buffer(self._count)
                self._is_sent = True
            except (WeightsError, RuntimeError, OSError) as error:
                self._not_sent = str(error)
                self._break_off()
        if not self._is_sent:
            if not self._own.numel():
                self._own = torch.empty(
                    self._what.lanes.plan.largest, dtype=torch.uint8, device=self._source.device
                )
            self._buffer = self._own

    def put(self, bucket: BucketPlan, weights: "Mapping[str, Tensor]") -> None:
        """Put weights into the bucket that has begun."""
        pack(weights, bucket, self.dtype, self._buffer)

    def finish_bucket(self, number: int, *, is_written: bool) -> None:
        """Send the bucket, begin to write it, or both."""
        bucket, buffer = self._what.lanes.plan.buckets[number], self._buffer
        seal(bucket, buffer, f"{self._what.key}/{number}")
        if self._is_sent and self._sending_lane is not None:
            try:
                self._sending_lane.send(self._count, number, bucket.size)
                self._count += 1
            except (WeightsError, RuntimeError, OSError) as error:
                self._not_sent = str(error)
                self._break_off()
        if is_written:
            if self._files is None:
                self._files = LateFiles(self._what.place, self.dtype)
            self._files.add(number, bucket, buffer)

    def finish(self, *, tells: bool) -> Delivered:
        """Wait until everything is sent, and written, unless the rank `tells` the meeting of that
        later.
        """
        if self._sending_lane is not None:
            try:
                self._sending_lane.finish()
            except (WeightsError, RuntimeError, OSError) as error:
                self._not_sent = str(error)
                self._break_off()
        files, what = self._files, self._what
        if files is None:
            return Delivered(None, False, {}, self._not_sent)
        if tells:
            with suppress(WeightsError, OSError):  # the meeting is gone: the answer says it
                _late[what.lanes.id] = files.tell(
                    _meeting_of(what.lanes), files_of(what.key, self._source.rank)
                )
                return Delivered(None, True, files.sums, self._not_sent)
        written = files.written()
        files.close()
        if what.sums is not None and not files.sums.items() <= what.sums.items():
            written = RankFiles(error="the ranks that had it died, and the trainer has gone on")
        return Delivered(written, False, files.sums, self._not_sent)


class _Reading:
    """A reader's end of the lanes of a transport, from one version to the next."""

    def __init__(self, lanes: Lanes, reader: Reader) -> None:
        from agentrl.weights.meeting import Meeting

        self._lanes = lanes
        self._reader = reader
        self._meeting = Meeting.at(lanes.address, lanes.seconds)
        self._attendance: Attendance | None = None
        self._roll: Roll | None = None
        self._groups: list[Any] = []

    def enroll(self, key: str) -> None:
        """See `Shipment.enroll`. From then on, this process gives signs of life until it leaves."""
        if self._attendance is None or self._attendance.has_ended:
            self._attendance = self._meeting.attend(self._reader.name)
        group = None if self._roll is None else self._roll.group
        self._meeting.enroll(key, self._reader, group)

    def join(self, key: str) -> None:
        """See `Shipment.join`."""
        try:
            self._connect(self._meeting.join(key, self._reader.name))
        except BaseException:
            self.leave()
            raise

    def _connect(self, roll: "Roll") -> None:
        """Form the groups of a roll, unless they are those of the last version."""
        if self._lanes.kind == "stream" and (self._roll is None or self._roll.group != roll.group):
            self._groups = []
            place = 1 + roll.names.index(self._reader.name)
            try:
                from agentrl.weights.lanes import broadcast_group

                self._groups = [
                    broadcast_group(self._meeting, roll, sender, place, self._lanes.seconds)
                    for sender in self._lanes.senders
                ]
            except RuntimeError as error:
                self._roll = None
                raise WeightsError(f"no connection to the trainer's ranks: {error}") from error
        self._roll = roll

    def arrivals(self, key: str) -> Generator[tuple[str, "Tensor"]]:
        """See `Shipment.arrivals`."""
        try:
            yield from self._weights(key)
        except BaseException:  # also if nobody asks for the rest
            self.leave()
            raise

    def _weights(self, key: str) -> Iterator[tuple[str, "Tensor"]]:
        import torch

        plan = self._lanes.plan
        dtype: torch.dtype = getattr(torch, plan.dtype)
        buckets = self._buckets(key)
        for number, bucket in enumerate(plan.buckets):
            try:
                buffer = next(buckets)
            except RuntimeError as error:
                raise WeightsError(
                    f"the trainer, or another engine, broke off at bucket {number} of"
                    f" {len(plan.buckets)}: {error}"
                ) from error
            if not is_intact(buffer, bucket, f"{key}/{number}"):
                raise WeightsError(
                    f"bucket {number} of {len(plan.buckets)} is damaged: its sum differs"
                )
            yield from weights_in(buffer, bucket, dtype)
            del buffer

    def leave(self) -> None:
        """Leave the groups, so that nobody waits for this reader: their connections close when
        nothing refers to them.
        """
        if self._attendance is not None:
            self._attendance.end()
            self._attendance = None
        self._roll = None
        self._groups.clear()

    def _buckets(self, key: str) -> Iterator["Tensor"]:
        import torch

        from agentrl.weights import lanes as kinds

        assert self._roll is not None
        sizes = [bucket.size for bucket in self._lanes.plan.buckets]
        reading: ReadingLane
        if self._lanes.kind == "handles":
            reading = kinds.HandleReading(
                self._meeting, f"{key}/{self._reader.place}", self._reader.name
            )
        else:
            device = kinds.device_of_group(self._roll, torch.device(self._reader.device))
            reading = kinds.GroupReading(self._groups, device, self._meeting, key)
        return reading.buckets(sizes)


_opened: dict[str, _RankLanes] = {}
"""The lanes that this process sends by, by their id."""
_late: "dict[str, Future[None]]" = {}
"""What this process still writes of the last version, by the id of its lanes."""
_readings: dict[tuple[str, str, str], _Reading] = {}
"""The lanes that readers of this process read from, by id, address and the reader's name."""


def _reading(lanes: Lanes, reader: Reader) -> _Reading:
    which = lanes.id, lanes.address, reader.name
    if which not in _readings:
        for old in [old for old in _readings if old[::2] == which[::2]]:
            _readings.pop(old).leave()  # of a rank 0 that is gone
        _readings[which] = _Reading(lanes, reader)
    return _readings[which]


def stream(config: WeightsConfig) -> LiveTransport:
    """From the memory of the ranks into that of engines on other devices, over the network
    (`weights.transport=stream`).
    """
    return LiveTransport(config, "stream")


def handles(config: WeightsConfig) -> LiveTransport:
    """Through memory that ranks and engines on the same device, or on CPUs of the same machine,
    have open together (`weights.transport=handles`).
    """
    return LiveTransport(config, "handles")
