"""The one WebSocket connection: redirects, floods, servers that never accept, and how it ended."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus

import pytest
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import InvalidHandshake, InvalidStatus
from websockets.http11 import Request, Response

from agentrl.remote import connection
from agentrl.remote.connection import Connection, LostConnectionError, connect


class Notes:
    """A dialect that keeps what it is told."""

    connection: Connection

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.lost: list[LostConnectionError] = []
        self.news = asyncio.Event()

    def take(self, message: bytes) -> None:
        self.messages.append(message)
        self.news.set()

    def lose(self, error: LostConnectionError) -> None:
        self.lost.append(error)
        self.news.set()

    async def wait(self, done: Callable[[], bool]) -> None:
        while not done():
            self.news.clear()
            await self.news.wait()


def address(server: Server) -> str:
    return f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}/ws"


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def patiently() -> None:
        async with asyncio.timeout(30):
            await main()

    asyncio.run(patiently())


def test_a_redirect_is_followed_and_the_token_stays_with_the_first_server() -> None:
    async def tell_token(client: ServerConnection) -> None:
        assert client.request is not None
        await client.send(client.request.headers.get("Authorization", "none"))

    async def main() -> None:
        async with serve(tell_token, "127.0.0.1", 0) as elsewhere:

            def redirect(client: ServerConnection, request: Request) -> Response | None:
                if request.path == "/here":
                    return None
                there = {"/ws": address(elsewhere), "/moved": "/here"}.get(request.path, "/ring")
                return Response(HTTPStatus.FOUND, "Found", Headers(Location=there))

            async with serve(tell_token, "127.0.0.1", 0, process_request=redirect) as first:
                headers = {"Authorization": "Bearer secret"}
                for path, token in (("/ws", b"none"), ("/moved", b"Bearer secret")):
                    notes, url = Notes(), address(first).replace("/ws", path)
                    opened = await connect(url, notes, headers=headers, max_bytes=1000)
                    await notes.wait(partial(bool, notes.messages))
                    assert notes.messages == [token]
                    await opened.close()
                url = address(first).replace("/ws", "/ring")
                with pytest.raises(InvalidHandshake, match="more than 10 redirects"):
                    await connect(url, Notes(), headers=headers, max_bytes=1000)

    run(main)


def test_how_a_connection_ended_is_told_once_it_was_open() -> None:
    async def leave(client: ServerConnection) -> None:
        await client.close(1011, "tired")

    async def vanish(client: ServerConnection) -> None:
        client.transport.abort()

    async def flood(client: ServerConnection) -> None:
        await client.send("x" * 2000)
        await client.wait_closed()

    async def lost(handler: Callable[[ServerConnection], Awaitable[None]]) -> LostConnectionError:
        async with serve(handler, "127.0.0.1", 0) as server:
            notes = Notes()
            opened = await connect(address(server), notes, headers={}, max_bytes=1000)
            await notes.wait(lambda: bool(notes.lost))
            await opened.close()
            assert not opened.is_open
            return notes.lost[0]

    async def main() -> None:
        left, vanished, flooded = await lost(leave), await lost(vanish), await lost(flood)
        assert (str(left), left.is_closed_by_server) == ("the connection ended (1011 tired)", True)
        assert left.closing.startswith("received 1011 (internal error) tired")
        assert not vanished.is_closed_by_server
        assert vanished.closing == "no close frame received or sent"
        assert "2000 bytes" in str(flooded)
        assert "1009" in flooded.closing

    run(main)


def test_a_server_that_never_accepts_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CONNECT_SECONDS", 0.05)

    async def main() -> None:
        left = asyncio.Event()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()  # as long as the client waits
            writer.transport.abort()
            left.set()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(TimeoutError):
                await connect(f"http://127.0.0.1:{port}/", Notes(), headers={}, max_bytes=1000)
            await left.wait()

    run(main)


def test_an_answer_that_is_no_redirect_is_raised() -> None:
    def refuse(client: ServerConnection, request: Request) -> Response:
        return Response(HTTPStatus.FORBIDDEN, "Forbidden", Headers())

    async def main() -> None:
        async with serve(
            lambda client: client.close(), "127.0.0.1", 0, process_request=refuse
        ) as s:
            with pytest.raises(InvalidStatus):
                await connect(address(s), Notes(), headers={}, max_bytes=1000)

    run(main)
