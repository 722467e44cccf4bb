"""`MessageLink`: a stream of messages between two processes of a run, over a socket.

All messages of one turn of the event loop are pickled together and sent as one frame, so that the
busier the loop is, the less each message costs. A rollout worker connects to the `Door` of the
controller, and to those of engines. It shows the token of a door before anything of it is
unpickled.
"""

import asyncio
import hmac
import pickle
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

_LENGTH_BYTES = 8
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


class MessageLink(asyncio.Protocol):
    """One side of the stream. `take` gets each message, in order. What it raises is a defect: the
    event loop reports it, and the link ends.
    """

    def __init__(self, take: Callable[[Any], object]) -> None:
        self._take = take
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._outbox: list[Any] = []
        self._loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[BaseException | None] = self._loop.create_future()
        """Done when the link has ended: the reason, if it was an error."""

    @property
    def is_open(self) -> bool:
        """True while messages can be sent."""
        return self._transport is not None and not self.closed.done()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        # Those of uvloop, on which actors of Ray run, only look like an asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        if not self.closed.done():
            self.closed.set_result(error)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        received = self._received
        received += data
        begin = 0
        while len(received) - begin >= _LENGTH_BYTES:
            end = begin + _LENGTH_BYTES
            end += int.from_bytes(received[begin:end])
            if len(received) < end:
                break
            with memoryview(received) as view, view[begin + _LENGTH_BYTES : end] as frame:
                messages: Sequence[Any] = pickle.loads(frame)
            begin = end
            for message in messages:
                self._take(message)
        del received[:begin]

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
        frame = pickle.dumps(outbox, protocol=pickle.HIGHEST_PROTOCOL)
        self._transport.writelines([len(frame).to_bytes(_LENGTH_BYTES), frame])


class _Entrance(MessageLink):
    """The side of a connection behind the door, which first waits for the token."""

    def __init__(
        self, token: bytes, admit: Callable[[int, MessageLink], Callable[[Any], object]]
    ) -> None:
        super().__init__(lambda message: None)
        self._token, self._admit = token, admit
        self._admitted = False
        self._patience = self._loop.call_later(CONNECT_SECONDS, self._refuse)

    def data_received(self, data: bytes) -> None:
        if self._admitted:
            super().data_received(data)
            return
        self._received += data
        if len(self._received) < _TOKEN_BYTES + _RANK_BYTES:
            return
        token = bytes(self._received[:_TOKEN_BYTES])
        rank = int.from_bytes(self._received[_TOKEN_BYTES : _TOKEN_BYTES + _RANK_BYTES])
        if not hmac.compare_digest(token, self._token):
            self._refuse()
            return
        self._patience.cancel()
        rest = bytes(self._received[_TOKEN_BYTES + _RANK_BYTES :])
        self._received.clear()
        self._admitted = True
        self._take = self._admit(rank, self)
        super().data_received(rest)

    def connection_lost(self, error: Exception | None) -> None:
        self._patience.cancel()
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
