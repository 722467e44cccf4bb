"""The stream of messages: whatever the pieces in which it arrives, the same messages come out."""

import asyncio
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.net.link import MessageLink, connect, open_door
from agentrl.net.pickled import Pickled
from tests.processes import PATIENCE_SECONDS


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data


def receive(link: MessageLink, sent: bytes, sizes: Sequence[int]) -> None:
    """Let bytes arrive in pieces of at most these sizes, in turn."""
    rest = memoryview(sent)
    for size in cycle(sizes):
        if not rest:
            return
        into = link.get_buffer(-1)
        count = min(size, len(into), len(rest))
        into[:count] = rest[:count]
        link.buffer_updated(count)
        rest = rest[count:]


@given(
    st.lists(st.lists(st.integers(0, 40_000), max_size=4), min_size=1, max_size=4),
    st.lists(st.sampled_from([1, 3, 7, 100, 5_000, 65_536, 1 << 20]), min_size=1, max_size=3),
)
def test_messages_arrive_as_they_were_sent_in_whatever_pieces(
    frames: list[list[int]], sizes: list[int]
) -> None:
    if max(sizes) < 100 and sum(map(sum, frames)) > 30_000:
        sizes = [*sizes, 5_000]  # else it takes long, byte by byte

    async def main() -> None:
        taken: list[Any] = []
        sender, receiver, wire = MessageLink(print), MessageLink(taken.append), Wire()
        sender.connection_made(wire)
        sent = []
        for number, lengths in enumerate(frames):
            arrays = [np.arange(number, number + length, dtype=np.int32) for length in lengths]
            for message in ((number, "text", arrays), Pickled.of(arrays)):
                sender.send(message)
                sent.append(message)
            await asyncio.sleep(0)  # a frame for each turn of the loop
        receive(receiver, bytes(wire.written), sizes)
        assert len(taken) == len(sent)
        for (number, text, arrays), inner in zip(taken[::2], taken[1::2], strict=True):
            assert (number, text) == sent[2 * number][:2]
            for found in (arrays, inner.open()):
                assert [one.tolist() for one in found] == [
                    one.tolist() for one in sent[2 * number][2]
                ]
        assert not receiver.get_buffer(-1).nbytes < 1 << 16  # nothing is left over

    asyncio.run(main())


def test_large_arrays_stay_where_they_arrive_and_cannot_be_written() -> None:
    async def main() -> None:
        taken: list[Any] = []
        link, sender, wire = MessageLink(taken.append), MessageLink(print), Wire()
        sender.connection_made(wire)
        sender.send({"large": np.arange(50_000), "small": np.arange(3), "bytes": b"a" * 50_000})
        await asyncio.sleep(0)
        receive(link, bytes(wire.written), [1 << 20])
        (found,) = taken
        assert not found["large"].flags.writeable
        assert not found["large"].flags.owndata
        found["small"][0] = 7  # pickled with everything else
        assert found["bytes"] == b"a" * 50_000

    asyncio.run(main())


def test_more_arrays_than_a_frame_names_arrive_too() -> None:
    async def main() -> None:
        taken: list[Any] = []
        link, sender, wire = MessageLink(taken.append), MessageLink(print), Wire()
        sender.connection_made(wire)
        arrays = [np.full(3000, number, np.int64) for number in range(1200)]
        sender.send(arrays)
        await asyncio.sleep(0)
        receive(link, bytes(wire.written), [10_000])
        assert np.array_equal(np.stack(taken[0]), np.stack(arrays))

    asyncio.run(main())


def test_a_pickled_value_inside_of_another_keeps_its_arrays_apart() -> None:
    numbers = np.arange(100_000)
    inner = Pickled.of({"numbers": numbers, "text": "a" * 200})
    assert inner.buffer_bytes == numbers.nbytes
    outer = Pickled.of(("message", inner))
    assert len(outer.rest) < 1000
    _, again = outer.open()
    assert np.array_equal(again.open()["numbers"], numbers)
    assert np.shares_memory(again.open()["numbers"], numbers)


@pytest.mark.parametrize("size", [10, 3_000_000])
def test_a_message_of_any_size_goes_through_a_door(size: int) -> None:
    async def main() -> None:
        taken = asyncio.Queue[Any]()
        async with open_door("127.0.0.1", lambda rank, link: taken.put_nowait) as door:
            link = await connect(door, 3, print)
            link.send(("numbers", np.arange(size)))
            link.send("the end")
            async with asyncio.timeout(PATIENCE_SECONDS):
                what, numbers = await taken.get()
                assert await taken.get() == "the end"
            assert what == "numbers"
            assert np.array_equal(numbers, np.arange(size))
            link.close()

    asyncio.run(main())
