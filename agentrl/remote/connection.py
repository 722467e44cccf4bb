"""`Connection`: a WebSocket to a server of environments. Its `Dialect` gives messages a meaning.

There are two dialects: agentrl's own, many sessions on a connection (`link.py`), and OpenEnv's, a
connection for each session (`openenv/socket.py`).

A `Connection` is an `asyncio.Protocol`, so it needs no task to read: messages go straight from the
transport to the dialect.
"""

import asyncio
import ssl
from collections.abc import Iterable, Mapping
from typing import Protocol, cast
from urllib.parse import urljoin, urlsplit

from websockets.client import ClientProtocol
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.uri import WebSocketURI, parse_uri

CONNECT_SECONDS = 10.0
"""Time for a server to accept a connection, in seconds."""
CLOSE_SECONDS = 1.0
"""Time for a server to confirm a close, in seconds."""
MAX_REDIRECTS = 10
"""Redirects that are followed, one after another."""

_MESSAGE_OPCODES = (Opcode.TEXT, Opcode.BINARY, Opcode.CONT)


class LostConnectionError(Exception):
    """The connection has ended. Its text is the server's reason, or what broke."""

    closing: str = ""
    """The close frames of both sides, in words."""
    is_closed_by_server: bool = False
    """True if the server sent a close frame. One that dies sends none."""


class Dialect(Protocol):
    """The reader of a connection's messages."""

    connection: "Connection"
    """Set when the connection is made."""

    def take(self, message: bytes) -> None:
        """Take a whole message from the server."""
        ...

    def lose(self, error: LostConnectionError) -> None:
        """Fail what waits for an answer, as an open connection has ended. May be called twice."""
        ...


async def connect(
    url: str, dialect: Dialect, *, headers: Mapping[str, str], max_bytes: int
) -> "Connection":
    """Open a connection to `url` (http or https), within `CONNECT_SECONDS`.

    Messages may have at most `max_bytes`. Redirects are followed; credentials go to the first
    server only.

    Raises:
        OSError: there is no server, or it does not accept the connection in time (`TimeoutError`).
        InvalidHandshake: it does not speak WebSocket there; `InvalidStatus` has its answer.
    """
    ws_url = "ws" + url.removeprefix("http")
    async with asyncio.timeout(CONNECT_SECONDS):
        for _ in range(MAX_REDIRECTS):
            try:
                return await _connect_once(parse_uri(ws_url), dialect, headers, max_bytes)
            except InvalidStatus as error:
                target = _redirect_target(ws_url, error)
                if target is None:
                    raise
                if _origin(target) != _origin(ws_url):
                    headers = {name: headers[name] for name in headers if name != "Authorization"}
                ws_url = target
        raise InvalidHandshake(f"more than {MAX_REDIRECTS} redirects")


async def _connect_once(
    uri: WebSocketURI, dialect: Dialect, headers: Mapping[str, str], max_bytes: int
) -> "Connection":
    _, connection = await asyncio.get_running_loop().create_connection(
        lambda: Connection(ClientProtocol(uri, max_size=max_bytes), dialect, headers),
        uri.host,
        uri.port,
        ssl=ssl.create_default_context() if uri.secure else None,
    )
    try:
        await connection.opened
    except BaseException as error:
        connection.abort()
        # The server is there, but what it says is no handshake.
        if isinstance(error, OSError):
            raise InvalidHandshake(str(error)) from error
        raise
    return connection


def _redirect_target(ws_url: str, error: InvalidStatus) -> str | None:
    """The address that a server redirects to; None if it does not, or if TLS would be lost."""
    location = error.response.headers.get("Location")
    if location is None or not 300 <= error.response.status_code < 400:
        return None
    target = urljoin(ws_url, location)
    target = "ws" + target.removeprefix("http") if target.startswith("http") else target
    return None if urlsplit(ws_url).scheme == "wss" != urlsplit(target).scheme else target


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


class Connection(asyncio.Protocol):
    """A WebSocket. Get one from `connect`."""

    def __init__(self, wire: ClientProtocol, dialect: Dialect, headers: Mapping[str, str]) -> None:
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = loop.create_future()
        """Done when the server has accepted the connection."""
        self.ended: asyncio.Future[None] = loop.create_future()
        """Done when the connection is gone."""
        self._wire = wire
        self._dialect = dialect
        dialect.connection = self
        self._headers = headers
        self._fragments: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    @property
    def is_open(self) -> bool:
        """True if messages can be sent."""
        transport = self._transport
        return (
            transport is not None and not transport.is_closing() and self._wire.state is State.OPEN
        )

    def send(self, messages: Iterable[bytes]) -> None:
        """Send messages of text. If the connection has ended, the dialect knows that already."""
        if self.is_open:
            for message in messages:
                self._wire.send_text(message)
            self._write()

    def pause_reading(self) -> None:
        """Read no more messages from the server until `resume_reading`."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read messages again."""
        if self._transport is not None:
            self._transport.resume_reading()

    async def close(self) -> None:
        """Close the connection; wait up to `CLOSE_SECONDS` for the server to confirm."""
        if self.is_open:
            self._wire.send_close()
            self._write()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await asyncio.shield(self.ended)
        except TimeoutError:
            pass  # the server has all messages, and its idle sessions expire by themselves
        finally:
            self.abort()

    def abort(self) -> None:
        """Close the connection immediately."""
        if self._transport is not None:
            self._transport.abort()

    def loss(self, error: Exception | None = None) -> LostConnectionError:
        """The reason why the connection has ended; `error` is the transport's, if it has one."""
        received = self._wire.close_rcvd
        if received is not None:
            reason = f"{received.code} {received.reason}".strip()
        else:
            reason = str(error or self._wire.parser_exc or "no close frame")
        lost = LostConnectionError(f"the connection ended ({reason})")
        lost.is_closed_by_server = received is not None
        lost.closing = str(
            ConnectionClosed(received, self._wire.close_sent, self._wire.close_rcvd_then_sent)
        )
        return lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Request a WebSocket."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        request = self._wire.connect()
        for name, value in self._headers.items():
            request.headers[name] = value
        self._wire.send_request(request)
        self._write()

    def data_received(self, data: bytes) -> None:
        """Pass whole messages to the dialect."""
        self._wire.receive_data(data)
        self._write()  # replies to pings, and to a close
        if not self.opened.done():
            if self._wire.handshake_exc is not None:
                self._refuse(self._wire.handshake_exc)
            elif self._wire.state is not State.CONNECTING:  # these bytes may hold a close frame too
                self.opened.set_result(None)
        for event in self._wire.events_received():
            if isinstance(event, Frame):
                self._take_frame(event)
        if self._wire.close_rcvd is not None or self._wire.parser_exc is not None:
            self.drop(self.loss())

    def eof_received(self) -> None:
        """The server has closed the connection; the transport closes by itself."""
        self._wire.receive_eof()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail whatever waits."""
        self._transport = None
        self.ended.set_result(None)
        if self.opened.done() and self.opened.exception() is None:
            self._dialect.lose(self.loss(exc))
        else:  # the dialect may be on another connection by now, after a redirect
            self._refuse(self._wire.handshake_exc or exc or ConnectionError("the connection ended"))

    def drop(self, error: LostConnectionError) -> None:
        """Fail whatever waits, and close the connection."""
        self._dialect.lose(error)
        if self._transport is not None:
            self._transport.close()

    def _refuse(self, error: Exception) -> None:
        if not self.opened.done():
            self.opened.set_exception(error)
            self.opened.exception()  # marks it as retrieved: its waiter may be gone

    def _take_frame(self, frame: Frame) -> None:
        if frame.opcode not in _MESSAGE_OPCODES:
            return
        self._fragments.append(bytes(frame.data))
        if frame.fin:
            message = b"".join(self._fragments)
            self._fragments.clear()
            self._dialect.take(message)

    def _write(self) -> None:
        if self._transport is None:
            return
        for data in self._wire.data_to_send():
            if data:
                self._transport.write(data)
            else:  # an empty item is the library's request to half-close
                self._transport.close()
