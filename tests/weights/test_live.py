"""What `stream` and `handles` do when something breaks off: whoever has not got all of a version
says so at once, and the others, and the next version, do not suffer.
"""

import asyncio
import itertools
import pickle
import re
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl import plugins
from agentrl.errors import WeightsError
from agentrl.flow import Flow
from agentrl.protocols import Trainer
from agentrl.weights import plan, store
from agentrl.weights.attendance import Attendance
from agentrl.weights.bundle import Bucket, BundlePlace
from agentrl.weights.config import WeightsConfig
from agentrl.weights.publisher import checksum
from agentrl.weights.shipment import Reader, Shipment
from agentrl.weights.transport import Transport
from agentrl.weights.transports import live
from agentrl.weights.transports.late_files import RankFiles, told_by
from tests.processes import PATIENCE_SECONDS

Weights = Mapping[str, Tensor]
BUCKETS = 6


def made(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # A bucket each.
    return {f"w{i}": torch.randn(300_000, generator=generator) for i in range(BUCKETS)}


class Holds(Trainer):
    """A trainer that has these weights."""

    def __init__(self, weights: Weights) -> None:
        self.now = weights

    async def weights(self) -> Weights:
        return self.now


def given(weights: Weights) -> Holds:
    return Holds(weights)  # type: ignore[abstract]


class Breaks(dict[str, Tensor]):
    """Weights that cannot be read any more from the fourth on."""

    def __getitem__(self, name: str) -> Tensor:
        if name == "w3":
            raise OSError("the trainer has died")
        return super().__getitem__(name)


@pytest.fixture(params=["handles", "stream"])
def transport(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Transport]:
    monkeypatch.setattr(store, "default_parent", lambda: tmp_path)
    config = WeightsConfig(transport=request.param, bucket_mib=1, deadline=60)
    made: Transport = plugins.load("weight_transports", request.param)(config)
    yield made
    made.close()


async def enrolled(sent: Shipment, readers: list[Reader]) -> Shipment:
    shipment: Shipment = pickle.loads(pickle.dumps(sent))
    for reader in readers:
        await asyncio.to_thread(shipment.enroll, reader)
    return shipment


def read(shipment: Shipment, reader: Reader, count: int = BUCKETS) -> str:
    """The checksum of the first weights that arrive, or why they do not."""
    try:
        shipment.join(reader)
        arrivals = shipment.arrivals(reader)
        return checksum(dict(itertools.islice(arrivals, count)))
    except WeightsError as error:
        return str(error)


def folders(parent: Path) -> list[str]:
    """The names of the folders of versions there."""
    return [folder.name for folder in parent.glob("*/v*")]


async def said_by(shipment: Awaitable[Shipment]) -> str:
    """The checksum of the weights, or why there are none."""
    try:
        return checksum(await shipment)
    except WeightsError as error:
        return str(error)


async def answers(
    transport: Transport, trainer: Trainer, sent: Shipment, readers: list[tuple[Reader, int]]
) -> list[str]:
    """What each reader says that reads so many weights."""
    shipment = await enrolled(sent, [reader for reader, _ in readers])
    async with Flow("update") as flow:
        flow.start(transport.deliver(trainer, sent), name="deliver")
        readings = [
            flow.start(asyncio.to_thread(read, shipment, reader, count), name=reader.name)
            for reader, count in readers
        ]
    return [reading.result() for reading in readings]


def attendance_of(reader: Reader) -> Attendance:
    (reading,) = [found for which, found in live._readings.items() if which[2] == reader.name]
    assert reading._attendance is not None
    return reading._attendance


def ends(reader: Reader) -> None:
    """As the end of its process does: the kernel closes its connections."""
    attendance_of(reader)._connection.close()


def stands_still(reader: Reader) -> None:
    """As a process does that is stopped, or cut off."""
    attendance_of(reader)._has_ended.set()


@pytest.mark.parametrize(("what_happens", "lease"), [(ends, 600.0), (stands_still, 2.0)])
def test_a_reader_that_is_lost_before_it_joins_is_not_waited_for(
    what_happens: Callable[[Reader], None],
    lease: float,
    transport: Transport,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "_LEASE_SECONDS", lease)

    async def main() -> None:
        trainer, alive, dead = given(made(1)), Reader.on("cpu"), Reader.on("cpu")
        sent = await transport.send(trainer, 1)
        await enrolled(sent, [dead])
        what_happens(dead)
        assert await answers(transport, trainer, sent, [(alive, BUCKETS)]) == [checksum(made(1))]
        late = read(sent, dead)
        assert "before this engine was ready" in late

    asyncio.run(main())


def test_a_reader_that_dies_in_the_middle_costs_at_most_those_of_its_group(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_LEASE_SECONDS", 600.0)

    async def main() -> None:
        trainer, alive, dies = given(made(1)), Reader.on("cpu"), Reader.on("cpu")
        sent = await transport.send(trainer, 1)
        told = await answers(transport, trainer, sent, [(alive, BUCKETS), (dies, 2)])
        whole = checksum(made(1))
        assert told[0] == whole or "another engine, broke off" in told[0]
        # An engine that starts then gets all of it.
        assert checksum(await sent.at_rest()) == whole
        trainer.now = made(2)
        sent = await transport.send(trainer, 2)
        assert await answers(transport, trainer, sent, [(alive, BUCKETS)]) == [checksum(made(2))]

    asyncio.run(main())


def test_a_reader_that_stands_still_in_the_middle_costs_at_most_those_of_its_group(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_LEASE_SECONDS", 2.0)

    async def main() -> None:
        trainer, alive, still = given(made(1)), Reader.on("cpu"), Reader.on("cpu")
        sent = await transport.send(trainer, 1)
        shipment = await enrolled(sent, [alive, still])

        def read_two() -> Generator[object]:
            shipment.join(still)
            arrivals = shipment.arrivals(still)
            next(arrivals), next(arrivals)
            stands_still(still)
            return arrivals

        async with Flow("update") as flow:
            delivered = flow.start(transport.deliver(trainer, sent), name="deliver")
            reading = flow.start(asyncio.to_thread(read, shipment, alive), name="alive")
            stopped = flow.start(asyncio.to_thread(read_two), name="still")
            await asyncio.wait({delivered, reading}, timeout=PATIENCE_SECONDS)
            assert delivered.done()
            whole = checksum(made(1))
            assert reading.result() == whole or re.search("broke(n)? off", reading.result())
            assert checksum(await sent.at_rest()) == whole
        trainer.now = made(2)
        sent = await transport.send(trainer, 2)
        assert await answers(transport, trainer, sent, [(alive, BUCKETS)]) == [checksum(made(2))]
        stopped.result().close()

    asyncio.run(main())


def test_the_trainer_goes_on_while_the_files_of_its_last_version_are_written(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, write = threading.Event(), BundlePlace.write_bucket

    def write_later(*args: Any) -> Bucket:
        assert may_write.wait(PATIENCE_SECONDS)
        return write(*args)

    monkeypatch.setattr(BundlePlace, "write_bucket", write_later)

    async def main() -> None:
        trainer, reader = given(made(1)), Reader.on("cpu")
        sent = await transport.send(trainer, 1)
        assert await answers(transport, trainer, sent, [(reader, BUCKETS)]) == [checksum(made(1))]
        await transport.keep_only([sent])
        async with Flow("late") as flow:
            late = flow.start(sent.at_rest(), name="an engine that starts")
            for weight in trainer.now.values():
                weight.mul_(2)
            assert not late.done()
            may_write.set()
        assert checksum(late.result()) == checksum(made(1))

    asyncio.run(main())


def test_files_that_were_not_complete_when_a_newer_version_replaced_them_do_not_appear(
    transport: Transport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_looking, is_complete = threading.Event(), threading.Event()

    def told_later(*args: Any) -> list[RankFiles] | None:
        is_looking.set()
        return told_by(*args) if is_complete.is_set() else None

    monkeypatch.setattr(live, "told_by", told_later)

    async def main() -> None:
        trainer, reader = given(made(1)), Reader.on("cpu")
        sent = await transport.send(trainer, 1)
        assert await answers(transport, trainer, sent, [(reader, BUCKETS)]) == [checksum(made(1))]
        async with Flow("late") as flow:
            files = flow.start(said_by(sent.at_rest()), name="its files")
            assert await asyncio.to_thread(is_looking.wait, PATIENCE_SECONDS)
            await transport.keep_only([])
            is_complete.set()
        assert files.result() == "a newer version of the weights has replaced this one"

    asyncio.run(main())
    assert folders(tmp_path) == []


def test_files_are_not_made_of_a_version_that_has_been_replaced(
    transport: Transport, tmp_path: Path
) -> None:
    async def main() -> None:
        trainer, reader = given(made(1)), Reader.on("cpu")
        sent = await transport.send(trainer, 1)
        assert await answers(transport, trainer, sent, [(reader, BUCKETS)]) == [checksum(made(1))]
        newer = await transport.send(trainer, 2)
        # The reader has left after the last weight of the first version, and comes back at once.
        assert await answers(transport, trainer, newer, [(reader, BUCKETS)]) == [checksum(made(1))]
        await transport.keep_only([newer])
        with pytest.raises(WeightsError, match="a newer version"):
            await sent.at_rest()
        assert checksum(await newer.at_rest()) == checksum(made(1))
        assert newer.folder is not None
        assert folders(tmp_path) == [newer.folder.name]

    asyncio.run(main())


def test_a_damaged_bucket_is_noticed(transport: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_LEASE_SECONDS", 600.0)  # the reader gives up in the middle

    def damages(bucket: plan.BucketPlan, buffer: Tensor, label: str) -> None:
        plan.seal(bucket, buffer, label)
        if bucket.slots[0].name == "w2":
            buffer[1000] += 1

    async def main() -> None:
        trainer, reader = given(made(1)), Reader.on("cpu")
        monkeypatch.setattr(live, "seal", damages)
        sent = await transport.send(trainer, 1)
        (said,) = await answers(transport, trainer, sent, [(reader, BUCKETS)])
        assert said == "bucket 2 of 6 is damaged: its sum differs"
        monkeypatch.setattr(live, "seal", plan.seal)
        sent = await transport.send(trainer, 2)
        assert await answers(transport, trainer, sent, [(reader, BUCKETS)]) == [checksum(made(1))]

    asyncio.run(main())


def test_a_trainer_that_dies_in_the_middle_lets_no_reader_wait(transport: Transport) -> None:
    async def main() -> None:
        readers = [(Reader.on("cpu"), BUCKETS) for _ in range(2)]
        sent = await transport.send(given(Breaks(made(1))), 1)
        shipment = await enrolled(sent, [reader for reader, _ in readers])
        async with Flow("update") as flow:
            readings = [
                flow.start(asyncio.to_thread(read, shipment, reader), name=reader.name)
                for reader, _ in readers
            ]
            with pytest.raises(OSError, match="the trainer has died"):
                await transport.deliver(given(Breaks(made(1))), sent)
        for reading in readings:
            assert re.search("broke(n)? off", reading.result())
        with pytest.raises(WeightsError, match="the trainer has died"):
            await sent.at_rest()
        # The ranks begin again.
        trainer = given(made(2))
        sent = await transport.send(trainer, 2)
        assert await answers(transport, trainer, sent, readers) == [checksum(made(2))] * 2

    asyncio.run(main())


def test_engines_on_other_devices_than_the_ranks_are_refused_by_handles(tmp_path: Path) -> None:
    transport = live.handles(WeightsConfig(transport="handles", deadline=60))

    async def main() -> None:
        sent = await transport.send(given(made(1)), 1)
        elsewhere = Reader("r", "cpu", "another machine")
        with pytest.raises(WeightsError, match=r"none on another machine, .*transport=stream"):
            await asyncio.to_thread(sent.enroll, elsewhere)

    asyncio.run(main())
    transport.close()
