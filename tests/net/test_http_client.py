"""The HTTP client of judges and OpenEnv: it leaks no connection, fails as httpx does, and keeps no
cookies.
"""

import asyncio
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import pytest

from agentrl.net.http_client import http_client, proxy_note
from tests.processes import PATIENCE_SECONDS

HALF = 100_000


@dataclass
class Server:
    """A server that answers in two halves with a pause before each. `/garbage` is no HTTP, `/drop`
    cuts the line.
    """

    url: str = ""
    seconds: float = 0.0
    open: set[asyncio.StreamWriter] = field(default_factory=set)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    cookies: list[bytes] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.cookies += [
                    line for line in head.splitlines() if line.lower().startswith(b"cookie")
                ]
                if b"/drop" in head:
                    return
                await asyncio.sleep(random.random() * self.seconds)
                if b"/garbage" in head:
                    writer.write(b"nonsense\r\n\r\n")
                    return
                writer.write(
                    b"HTTP/1.1 200 OK\r\nSet-Cookie: a=b\r\nContent-Length: %d\r\n\r\n" % (2 * HALF)
                )
                writer.write(HALF * b"x")
                await writer.drain()
                await asyncio.sleep(random.random() * self.seconds)
                writer.write(HALF * b"x")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open.discard(writer)
            self.ended.set()
            writer.close()


@asynccontextmanager
async def serving(seconds: float = 0.0) -> AsyncIterator[Server]:
    server = Server(seconds=seconds)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listening.close()


async def at_most(server: Server, connections: int) -> None:
    """Wait until the server has at most these connections: it learns of ends late."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(server.open) > connections:
            server.ended.clear()
            await server.ended.wait()


def test_requests_that_are_cancelled_at_any_moment_leak_no_connection() -> None:
    async def main() -> None:
        async with serving(seconds=0.01) as server, http_client() as client:

            async def ask() -> bool:
                try:
                    async with asyncio.timeout(random.random() * 0.03):
                        return len((await client.get(server.url)).content) == 2 * HALF
                except TimeoutError:
                    return False

            for _ in range(8):
                await asyncio.gather(*[ask() for _ in range(32)])
            answers = await asyncio.gather(*[client.get(server.url) for _ in range(32)])
            assert {len(answer.content) for answer in answers} == {2 * HALF}
            # Those that the 32 requests have used; each other one would be a leak.
            await at_most(server, 32)
            await client.aclose()
            await at_most(server, 0)

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/garbage", "/drop", None])
def test_whatever_goes_wrong_on_the_way_is_an_error_of_httpx(path: str | None) -> None:
    async def main() -> None:
        async with serving() as server, http_client() as client:
            url = f"{server.url}{path}" if path else "http://127.0.0.1:9"
            with pytest.raises(httpx.TransportError, match=r"."):
                await client.get(url)

    asyncio.run(main())


def test_cookies_are_not_kept() -> None:
    async def main() -> None:
        async with serving() as server, http_client() as client:
            for _ in range(2):
                await client.get(server.url)
            assert server.cookies == []

    asyncio.run(main())


def test_a_proxy_of_the_environment_is_used_where_it_is_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with serving() as proxy:
            monkeypatch.setenv("HTTP_PROXY", proxy.url)
            async with http_client() as client:
                assert (await client.get("http://nowhere.invalid/")).status_code == 200
            async with http_client(trust_env=False) as client:
                with pytest.raises(httpx.TransportError):
                    await client.get("http://nowhere.invalid/")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("variables", "url", "used", "said"),
    [
        ({}, "http://judge:8/v1", True, ""),
        (
            {"HTTP_PROXY": "http://p:1"},
            "http://judge:8/v1",
            True,
            "HTTP_PROXY is set, so its proxy was asked: .* NO_",
        ),
        ({"HTTP_PROXY": "http://p:1"}, "https://judge:8/v1", True, ""),
        (
            {"https_proxy": "http://p:1"},
            "https://judge:8/v1",
            False,
            "HTTPS_PROXY is set, and is not used here",
        ),
        (
            {"ALL_PROXY": "http://p:1"},
            "https://judge:8/v1",
            False,
            "ALL_PROXY is set, and is not used here",
        ),
        (
            {"HTTP_PROXY": "http://p:1", "NO_PROXY": "judge,localhost"},
            "http://judge:8/v1",
            True,
            "",
        ),
    ],
)
def test_an_error_tells_of_the_proxies_that_are_set(
    variables: dict[str, str], url: str, used: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    note = proxy_note(url, used=used)
    assert re.search(said, note) if said else note == ""
