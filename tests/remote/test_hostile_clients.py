"""`agentrl serve` and those who mean no good: silent and half-written connections, sessions that
nobody uses, floods, and requests that are made from its own schema.
"""

import asyncio
import contextlib
import gc
import http.client
import itertools
import json
import re
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from websockets.asyncio.client import ClientConnection, connect

from agentrl.envs.base import TextEnv
from agentrl.net.http_client import http_client
from agentrl.protocols import StepResult
from agentrl.remote.client import RemoteEnv
from agentrl.remote.server import EnvServer
from tests.processes import PATIENCE_SECONDS
from tests.remote.served import served

SESSIONS = 10_000


class Echo(TextEnv):
    """Says what it is told. It has a thread, as what may block has."""

    isolation = "thread"

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        return f"seed {seed}"

    def step(self, action: str) -> StepResult:
        return action, 0.0, False, False, {}


def connected(url: str, data: bytes = b"") -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    client = socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS)
    client.sendall(data)
    return client


def answer_of(client: socket.socket) -> bytes:
    """What the server says until it ends the connection."""
    with client:
        return b"".join(iter(lambda: client.recv(65536), b""))


HALVES = {
    "silence": b"",
    "half a head": b"POST /sessions HTTP/1.1\r\nHost: localhost\r\nX-Endless: " + b"a" * 500,
    "half a handshake": b"GET /sessions/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n",
}


@pytest.mark.slow
def test_connections_that_ask_nothing_or_half_of_it_are_closed_and_others_served():
    with served(Echo, drain_seconds=0, request_seconds=0.3) as server:
        url = server.url
        waiting = {name: connected(url, data) for name, data in HALVES.items()}
        body = connected(
            url, b"POST /sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
        )
        slow = http.client.HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE_SECONDS)
        asked = time.monotonic()
        # A slow client that does ask.
        while len(select.select(waiting.values(), [], [], 0.1)[0]) < len(waiting):
            try:
                slow.request("GET", "/health")
                assert slow.getresponse().read().startswith(b'{"status":"healthy"')
            except ConnectionError:
                assert time.monotonic() - asked > 0.3, (
                    "its connection was closed although it asked in time"
                )
                slow.close()
            asked = time.monotonic()
        slow.close()
        for name, client in waiting.items():
            assert answer_of(client) == b"", name
        assert answer_of(body).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    "begun",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n",
        b"POST /sessions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
    ],
    ids=["head", "trailer"],
)
def test_headers_without_end_are_refused_and_not_remembered(begun):
    with served(Echo, drain_seconds=0) as server:
        client = connected(server.url, begun)
        endless = b"".join(f"X-{number}: {'a' * 1000}\r\n".encode() for number in range(10_000))
        # The answer is 400; it may be lost with what nobody reads.
        with (
            client,
            pytest.raises(ConnectionError),
        ):
            client.sendall(endless)


def test_a_body_may_come_in_any_pieces():
    head = b"POST /sessions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with served(Echo, drain_seconds=0) as server:
        client = connected(server.url, head + b"1\r\n \r\n" * 30_000 + b"2\r\n{}\r\n0\r\n\r\n")
        assert answer_of(client).startswith(b"HTTP/1.1 200")


@pytest.mark.slow
def test_a_client_that_reads_no_answers_is_not_read_and_holds_nobody_up():
    async def flood(deaf: ClientConnection) -> int:
        """How many bytes it takes before it takes no more for half a second."""
        frame = json.dumps([{"id": 1, "op": "close", "session": "x" * 100}] * 500)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while True:
                await asyncio.wait_for(deaf.send(frame), 0.5)
                sent += len(frame)
        return sent

    async def main(url: str) -> None:
        deaf = await connect(f"{url.replace('http', 'ws')}/sessions/ws")
        assert await flood(deaf) < 64 << 20
        env = RemoteEnv([url])
        await env.reset(seed=1, options={})
        assert (await env.step("still here"))[0] == "still here"
        await env.close()
        deaf.transport.abort()  # a close would wait for the server to read what it never will

    with served(Echo, drain_seconds=0, max_sessions=8) as server:
        asyncio.run(main(server.url))


def test_a_frame_of_too_many_messages_is_refused_whole():
    async def main(url: str) -> None:
        async with aiohttp.ClientSession() as http, http.ws_connect(f"{url}/sessions/ws") as client:
            await client.send_json([{"id": 1, "op": "open"}] * 1025)
            assert [(reply["id"], reply["status"]) for reply in await client.receive_json()] == [
                (None, 422)
            ]
            assert await sessions_now(url) == 0

    with served(Echo, drain_seconds=0) as server:
        asyncio.run(main(server.url))


async def open_sessions(http: aiohttp.ClientSession, url: str, count: int) -> list[int]:
    """Open that many over one WebSocket, which then breaks; the statuses."""
    async with http.ws_connect(f"{url}/sessions/ws") as client:
        numbers = iter(range(count))
        while chunk := list(itertools.islice(numbers, 500)):
            await client.send_json([{"id": number, "op": "open"} for number in chunk])
        statuses: list[int] = []
        while len(statuses) < count:
            statuses += [reply["status"] for reply in await client.receive_json()]
    return statuses


async def sessions_now(url: str) -> int:
    async with asyncio.timeout(20), http_client() as http:
        return int((await http.get(f"{url}/health")).json()["sessions"])


async def half_open(server: EnvServer, sockets: int) -> int:
    """Leave 10,000 sessions unused and so many connections half-open until all have lapsed; this
    process's memory.
    """
    kinds = itertools.cycle(HALVES.values())
    patient = server.sessions.limits
    async with aiohttp.ClientSession() as http:
        with contextlib.ExitStack() as stack:
            clients = [
                stack.enter_context(connected(server.url, next(kinds))) for _ in range(sockets)
            ]
            statuses = await open_sessions(http, server.url, SESSIONS + 100)
            assert (statuses.count(200), statuses.count(429)) == (SESSIONS, 100)
            # A session that was never asked anything has none.
            assert threading.active_count() < 100
            assert await sessions_now(server.url) == SESSIONS
            server.sessions.limits = patient.model_copy(update={"idle_seconds": 0.1})
            for _ in range(300):
                if await sessions_now(server.url) == 0:
                    break
                await asyncio.sleep(0.1)
            assert await sessions_now(server.url) == 0
            server.sessions.limits = patient
            for client in clients:
                client.settimeout(20)
                assert answer_of(client) == b""
        env = RemoteEnv([server.url])
        assert await env.reset(seed=4, options={}) == ("seed 4", {})
        await env.close()
    gc.collect()
    return psutil.Process().memory_info().rss


@pytest.mark.long
def test_ten_thousand_unused_sessions_and_half_open_connections_lapse_and_leave_memory_flat():
    # Both ends of a connection are this process's.
    sockets = min(2000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 - 200)
    with served(Echo, drain_seconds=0, max_sessions=SESSIONS, request_seconds=3) as server:
        before = asyncio.run(half_open(server, sockets))  # the allocator takes what it will keep
        assert asyncio.run(half_open(server, sockets)) < before * 1.05


@pytest.mark.long
def test_requests_made_from_the_schema_find_nothing(tmp_path):
    """schemathesis: every answer is one that the OpenAPI document names, in its shape; what does
    not fit is refused.
    """
    with served(Echo, drain_seconds=0) as server:
        run = subprocess.run(
            [
                str(Path(sys.executable).with_name("st")),
                "run",
                f"{server.url}/openapi.json",
                "--include-path-regex=^/(?!openapi|docs)",
                "--max-examples=12",
                "--seed=1",
                "--no-color",
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
    assert run.returncode == 0, run.stdout
    generated, passed = re.findall(r"(\d+) generated, (\d+) passed", run.stdout)[0]
    assert generated == passed
    assert int(passed) > 150
