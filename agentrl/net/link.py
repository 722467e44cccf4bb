"""`MessageLink`: a stream of messages between two processes of a run, over a socket.

All messages of one turn of the event loop are pickled together and sent as one frame, so that the
busier the loop is, the less each message costs. Large buffers of them, such as the tokens of an
episode, follow as they are, and arrive where they stay:

    | number of parts | size of each | messages, pickled | buffer | buffer | ...

A rollout worker connects to the `Door` of the controller, and to those of engines. It shows the
token of a door before anything of it is unpickled.
"""

import asyncio
import hmac
import secrets
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from agentrl.net.pickled import Pickled

_COUNT = struct.Struct("!I")
_SIZE_BYTES = 8
_BUFFER_BYTES = 1 << 16
"""Most that is read at once of frames whose sizes are not known. The beginning of a frame fits."""
_TOKEN_BYTES = 32
_RANK_BYTES = 4
CONNECT_SECONDS = 60.0
"""How long a connection may take to be made and to show its token."""


@dataclass(frozen=True, slots=True)
class Door:
    """Where workers connect to, and the token that they show there."""

    host: str
    port: int
    token: bytes


@dataclass(frozen=True, slots=True)
class RemoteDoor:
    """The door of an engine in another process, as the controller uses it (`EngineDoor`). All calls
    raise EngineDeadError if the engine is not running.
    """

    open: Callable[[], Awaitable[Door]]
    """Listen there, and return where workers connect to. Repeating it changes nothing."""
    hold: Callable[[], Awaitable[None]]
    """Let new requests wait."""
    drain: Callable[[], Awaitable[None]]
    """Return when the engine works on nothing that was asked there."""
    release: Callable[[], Awaitable[None]]
    """Let requests pass."""


class _Frame:
    """A frame of which the sizes of all parts have arrived."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.parts = [np.empty(size, np.uint8).data for size in sizes]
        self._place = 0
        self.missing = self.parts[0]
        """What is to be filled next, in place; empty when the frame has arrived."""

    def fill(self, received: memoryview) -> int:
        """Copy received bytes into the missing parts; returns how many were used."""
        taken = 0
        while self.missing and taken < len(received):
            size = min(len(self.missing), len(received) - taken)
            self.missing[:size] = received[taken : taken + size]
            taken += size
            self.note_filled(size)
        return taken

    def note_filled(self, size: int) -> None:
        """The next bytes have been written into `missing`."""
        self.missing = self.missing[size:]
        if not self.missing and self._place + 1 < len(self.parts):
            self._place += 1
            self.missing = self.parts[self._place]


class MessageLink(asyncio.BufferedProtocol):
    """One side of the stream. `take` gets each message, in order. What it raises is a defect: the
    event loop reports it, and the link ends.
    """

    def __init__(self, take: Callable[[Any], object]) -> None:
        self._take = take
        self._transport: asyncio.Transport | None = None
        self._area = memoryview(bytearray(_BUFFER_BYTES))
        self._filled = 0
        self._frame: _Frame | None = None
        self._outbox: list[Any] = []
        self._loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[BaseException | None] = self._loop.create_future()
        """Done when the link has ended: the reason, if it was an error."""

    @property
    def is_open(self) -> bool:
        """True while messages can be sent."""
        return self._transport is not None and not self.closed.done()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BufferedProtocol`."""
        # Those of uvloop, on which actors of Ray run, only look like an asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.BufferedProtocol`."""
        if not self.closed.done():
            self.closed.set_result(error)

    def get_buffer(self, sizehint: int) -> memoryview:
        """See `asyncio.BufferedProtocol`."""
        return self._area[self._filled :] if self._frame is None else self._frame.missing

    def buffer_updated(self, nbytes: int) -> None:
        """See `asyncio.BufferedProtocol`."""
        if self._frame is not None:
            self._frame.note_filled(nbytes)
            if not self._frame.missing:
                frame, self._frame = self._frame, None
                self._deliver(frame.parts)
            return
        filled = self._filled + nbytes
        read = self._read(self._area[:filled])
        self._filled = filled - read
        if self._filled:
            self._area[: self._filled] = self._area[read:filled]

    def _read(self, received: memoryview) -> int:
        """Take the frames that have arrived; returns the bytes that are not needed any more."""
        read, stop = 0, len(received)
        while stop - read >= _COUNT.size:
            (count,) = _COUNT.unpack_from(received, read)
            begin = read + _COUNT.size + _SIZE_BYTES * count
            if begin > stop:
                break
            sizes = struct.unpack_from(f"!{count}Q", received, read + _COUNT.size)
            if count == 1 and begin + sizes[0] <= stop:
                # Most frames are small and whole, and are read without a copy.
                read = begin + sizes[0]
                self._deliver([received[begin:read]])
                continue
            frame = _Frame(sizes)
            read = begin + frame.fill(received[begin:])
            if frame.missing:
                self._frame = frame
                break
            self._deliver(frame.parts)
        return read

    def _deliver(self, parts: Sequence[memoryview]) -> None:
        for message in Pickled(parts[0], parts[1:]).open():
            self._take(message)

    def send(self, message: Any) -> None:
        """Send a message, after all earlier ones. It is lost if the link has ended."""
        if not self.is_open:
            return
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(message)

    def close(self) -> None:
        """End the link when everything has been sent."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        if not outbox or not self.is_open:
            return
        assert self._transport is not None
        pickled = Pickled.of(outbox)
        parts = [pickled.rest, *pickled.buffers]
        sizes = struct.pack(f"!{len(parts)}Q", *map(len, parts))
        self._transport.writelines([_COUNT.pack(len(parts)), sizes, pickled.rest])
        for buffer in pickled.buffers:
            self._transport.write(buffer)


class _Entrance(MessageLink):
    """The side of a connection behind the door, which first waits for the token."""

    def __init__(
        self, token: bytes, admit: Callable[[int, MessageLink], Callable[[Any], object]]
    ) -> None:
        super().__init__(lambda message: None)
        self._token, self._admit = token, admit
        self._admitted = False
        # Whoever shows no token in time is disconnected.
        self._deadline = self._loop.call_later(CONNECT_SECONDS, self._refuse)

    def _read(self, received: memoryview) -> int:
        if self._admitted:
            return super()._read(received)
        begin = _TOKEN_BYTES + _RANK_BYTES
        if len(received) < begin:
            return 0
        if not hmac.compare_digest(received[:_TOKEN_BYTES], self._token):
            self._refuse()
            return len(received)
        self._deadline.cancel()
        self._admitted = True
        self._take = self._admit(int.from_bytes(received[_TOKEN_BYTES:begin]), self)
        return begin + super()._read(received[begin:])

    def connection_lost(self, error: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(error)

    def _refuse(self) -> None:
        if self._transport is not None:
            self._transport.abort()


@asynccontextmanager
async def open_door(
    host: str, admit: Callable[[int, MessageLink], Callable[[Any], object]]
) -> AsyncIterator[Door]:
    """Listen at an address of this machine. `admit` gets the rank and the link of each worker that
    has shown the token, and returns what takes its messages.
    """
    token = secrets.token_bytes(_TOKEN_BYTES)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Entrance(token, admit), host, 0)
    try:
        yield Door(host, server.sockets[0].getsockname()[1], token)
    finally:
        server.close()


async def connect(door: Door, rank: int, take: Callable[[Any], object]) -> MessageLink:
    """Connect a worker to a door. `take` gets the messages.

    Raises:
        OSError: nobody listens behind the door, or it cannot be reached.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(CONNECT_SECONDS):
        transport, link = await loop.create_connection(
            lambda: MessageLink(take), door.host, door.port
        )
    transport.write(door.token + rank.to_bytes(_RANK_BYTES))
    return link
