"""Admits only requests that carry the token, arrive in time, and are not too long."""

import asyncio
import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Collection
from typing import Any
from urllib.parse import urlsplit

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

OPEN_TO_ALL = ("/health", "/metrics", "/openapi.json", "/docs")
"""Paths that need no token."""


_MAX_HEAD_BYTES = 64 * 1024
"""Most bytes of a request's head, or between the pieces of its body, that are kept while the rest
is yet to come.
"""


def idle_timeout(seconds: float) -> type[asyncio.Protocol]:
    """A protocol for uvicorn that closes connections that send nothing, or only part of a request,
    for `seconds`.

    After an answer it may take twice as long. It also refuses heads that are too long, which its
    parser would not, and puts the connection's transport into each request's `state`, which tells
    applications whether the client is gone.
    """

    class IdleTimeout(HttpToolsProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.app_state = {**self.app_state, "transport": transport}
            self._unparsed = 0
            self._last_cycle: Any = None
            self.loop.call_later(seconds, self._close_if_idle)

        def _close_if_idle(self) -> None:
            if self.transport.is_closing() or self.transport.get_protocol() is not self:
                return  # the connection has ended, or is a WebSocket now
            # A cycle is one request with its answer. If it is the same as at the last look, and has
            # been answered, no whole request has come since.
            if self.cycle is self._last_cycle and (
                self.cycle is None or self.cycle.response_complete
            ):
                self.transport.close()
                return
            self._last_cycle = self.cycle
            self.loop.call_later(seconds, self._close_if_idle)

        def data_received(self, data: bytes) -> None:
            self._unparsed += len(data)
            super().data_received(data)
            if self._unparsed > _MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The head of the request is too long.")

        def on_headers_complete(self) -> None:
            self._unparsed = 0
            super().on_headers_complete()

        def on_chunk_header(self) -> None:
            self._unparsed = 0

        def on_body(self, body: bytes) -> None:
            self._unparsed = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._unparsed = 0
            super().on_message_complete()

    return IdleTimeout


class RequestGate:
    """Middleware that answers 401, 403, 408 and 413: the application sees authorized requests with
    complete bodies.

    A browser names the site of the page that sends a request (`Origin`), and requests of other
    sites are refused. A server without a token trusts its machine, and otherwise any page that is
    open in a browser there could play. The name of a page's own site may lead here too (DNS
    rebinding), so without a token `Host` must be an address or localhost; unless `any_host`, for
    applications that ask for a key of their own. Paths in `open_paths` need no token. `said`: the
    body that says a refusal, by path and status.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str | None,
        max_body_bytes: int,
        request_seconds: float,
        *,
        any_host: bool = False,
        open_paths: Collection[str] = OPEN_TO_ALL,
        said: Callable[[str, int, str], Any] = lambda path, status, detail: {"detail": detail},
    ) -> None:
        self._app = app
        self._any_host = any_host
        self._open = open_paths
        self._said = said
        self._expected = f"Bearer {token}".encode() if token else None
        self._max = max_body_bytes
        self._seconds = request_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if (
            self._expected is None
            and not self._any_host
            and not _is_address(headers.get(b"host", b""))
        ):
            detail = "a server without a token must be called by its IP address or as localhost"
            await self._refuse(scope, receive, send, 403, detail)
            return
        origin = headers.get(b"origin")
        if origin is not None and origin.rpartition(b"://")[2] != headers.get(b"host"):
            await self._refuse(
                scope, receive, send, 403, "a web page of another site may not send requests"
            )
            return
        if self._expected is not None and scope["path"] not in self._open:
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                await self._refuse(
                    scope, receive, send, 401, "the bearer token is missing or wrong"
                )
                return
        if scope["type"] == "http":
            try:
                async with asyncio.timeout(self._seconds):
                    body = await self._read(headers, receive)
            except TimeoutError:
                await self._refuse(
                    scope, receive, send, 408, f"the body took longer than {self._seconds:g} s"
                )
                return
            if body is None:
                await self._refuse(
                    scope, receive, send, 413, f"the body is longer than {self._max} bytes"
                )
                return
            receive = _receive_again(body, receive)
        await self._app(scope, receive, send)

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """The whole body, or None if it is too long.

        The rest of a long body is read and dropped, up to a bound: a client that is still writing
        when the connection closes may never read the answer.
        """
        stated = headers.get(b"content-length", b"0")
        far_too_long = 16 * self._max
        if not (stated.isascii() and stated.isdigit()) or int(stated) > far_too_long:
            return None
        body, length = bytearray(), 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            length += len(message.get("body", b""))
            if length <= self._max:
                body += message.get("body", b"")
            if length > far_too_long or not message.get("more_body"):
                return bytes(body) if length <= self._max else None

    async def _refuse(
        self, scope: Scope, receive: Receive, send: Send, status: int, detail: str
    ) -> None:
        if scope["type"] == "websocket":
            await receive()
            # Not accepted yet, so the answer is 403.
            await send({"type": "websocket.close", "code": 1008})
            return
        body = self._said(scope["path"], status, detail)
        await JSONResponse(body, status, {"Connection": "close"})(scope, receive, send)


def _is_address(host: bytes) -> bool:
    """True if a `Host` header is empty, an IP address or localhost: no name that someone else could
    point here.
    """
    try:
        name = (urlsplit(b"//" + host).hostname or b"").decode("ascii")
        if name not in ("", "localhost"):
            ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _receive_again(body: bytes, receive: Receive) -> Callable[[], Awaitable[Message]]:
    """A `receive` that returns the body that was read, and then the messages that follow."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay
