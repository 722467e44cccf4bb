"""The client's line to a server: what goes into a frame, lines that break, and servers that are
none.
"""

import asyncio
import itertools
import json
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.asyncio.server import ServerConnection, serve

from agentrl.envs.frozen_lake import FrozenLake
from agentrl.errors import DeadlineError, EnvError
from agentrl.flow import now
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.live_env import LiveEnv
from agentrl.remote import choice, link
from agentrl.remote.client import RemoteEnv
from agentrl.remote.protocol import MOST_MESSAGES, packed
from tests.remote.served import served
from tests.remote.test_remote import Counting


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(20, 60))
def test_frames_hold_every_message_in_order_and_keep_to_their_bound(lengths, max_bytes):
    messages = [b'"%b"' % (b"x" * length) for length in lengths]
    frames = list(packed(messages, max_bytes))
    assert [text for frame in frames for text in json.loads(frame)] == [
        "x" * length for length in lengths
    ]
    assert all(len(frame) <= max_bytes or len(json.loads(frame)) == 1 for frame in frames)
    for one, after in itertools.pairwise(frames):  # no frame more than is needed
        assert len(one) + len(b",%b" % json.dumps(json.loads(after)[0]).encode()) > max_bytes


def test_a_frame_holds_no_more_messages_than_a_server_takes():
    assert [len(json.loads(frame)) for frame in packed([b"1"] * 2500, 1 << 20)] == [
        MOST_MESSAGES,
        MOST_MESSAGES,
        452,
    ]


@pytest.mark.parametrize("factory", [FrozenLake, Counting])  # inline, and in threads
def test_what_is_asked_at_once_goes_as_one_frame_and_is_answered_in_few(factory, monkeypatch):
    frames: list[int] = []

    class Counted(link.Line):
        def take(self, message: bytes) -> None:
            frames.append(len(json.loads(message)))
            super().take(message)

    def counted(messages: list[bytes], max_bytes: int) -> Any:
        asked.append(len(messages))
        return packed(messages, max_bytes)

    async def at_once(calls: list[Awaitable[Any]]) -> None:
        async with asyncio.TaskGroup() as group:
            for call in calls:
                group.create_task(call)

    async def main(url: str) -> None:
        envs = [RemoteEnv([url]) for _ in range(100)]
        await at_once([env.reset(seed=seed, options={}) for seed, env in enumerate(envs)])
        asked.clear()
        frames.clear()
        await at_once([env.step("left") for env in envs])
        assert asked == [100]
        assert sum(frames) == 100
        assert len(frames) < 60
        await at_once([env.close() for env in envs])

    asked: list[int] = []
    monkeypatch.setattr(link, "Line", Counted)
    monkeypatch.setattr(link, "packed", counted)
    with served(factory) as server:
        asyncio.run(main(server.url))


@pytest.mark.parametrize("seed", range(3))
def test_steps_happen_once_however_often_the_line_breaks_under_them(seed):
    turns = [0] * 20

    async def play(env: RemoteEnv, number: int, rng: random.Random) -> None:
        await env.reset(seed=number, options={})
        for turn in range(1, 16):
            said = await env.step(f"sleep {rng.choice([0, 0, 0.002, 0.01])}")
            assert said[4] == {"count": turn}
            turns[number] = turn
        await env.close()

    async def cut(rng: random.Random, line_of: link.Link) -> int:
        """Break the line under those who wait, again when all that met it have been answered: one
        request meets one.
        """
        cuts = 0
        while min(turns) < 14:
            await asyncio.sleep(rng.uniform(0, 0.01))
            before = turns.copy()
            if line_of._line is not None and line_of._line.is_open:
                line_of._line.abort()
                cuts += 1
            for _ in range(5000):
                if all(now > was or now == 15 for now, was in zip(turns, before, strict=True)):
                    break
                await asyncio.sleep(0.001)
        return cuts

    async def main(url: str) -> None:
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(play(RemoteEnv([url]), number, random.Random(number)))
            cuts = group.create_task(cut(random.Random(seed), link.link_to(url, None)))
        assert cuts.result() >= 3

    with served(Counting) as server:
        asyncio.run(main(server.url))


async def _garbage(client: ServerConnection) -> None:
    async for _ in client:
        await client.send("no json")


async def _unknown(client: ServerConnection) -> None:
    async for _ in client:
        await client.send('[{"id": null, "status": 422, "body": {"detail": "what is this?"}}]')


async def _farewell(client: ServerConnection) -> None:
    await client.close(1011, "tired")


async def _millions(client: ServerConnection) -> None:
    async for _ in client:
        await client.send(f"[{','.join(['5'] * 50_000)}]")


async def _verbose(client: ServerConnection) -> None:
    async for frame in client:
        number, said = json.loads(frame)[0]["id"], {"detail": "x" * 1_000_000}
        await client.send(json.dumps([{"id": number, "status": 500, "body": said}]))


async def _no_shape(client: ServerConnection) -> None:
    async for frame in client:
        await client.send(
            json.dumps([{"id": json.loads(frame)[0]["id"], "status": 200, "body": {"session": 3}}])
        )


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        (_garbage, "no list of replies"),
        (_unknown, "422: what is this"),
        (_farewell, "1011 tired"),
        (_no_shape, "should not have"),
        (_millions, "no list of replies"),
        (_verbose, "answered 500: xxx"),
    ],
)
def test_a_server_that_answers_nonsense_is_an_env_error_and_not_a_wait(handler, says):
    async def main() -> None:
        async with asyncio.timeout(60), serve(handler, "127.0.0.1", 0) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            with pytest.raises(EnvError, match=says) as failed:
                await RemoteEnv([f"http://127.0.0.1:{port}"]).reset(seed=1, options={})
            assert len(str(failed.value)) < 3000  # it is kept with the episode

    asyncio.run(main())


def _answering(**stepped: Any) -> Callable[[ServerConnection], Awaitable[None]]:
    """A server whose steps are answered with these fields."""
    bodies = {
        "open": {"session": "s", "idle_seconds": 9.0, "max_body_bytes": 9999},
        "reset": {"observation": "o", "info": {}, "system_prompt": "", "tools": []},
        "step": {
            "observation": "o",
            "reward": 0.5,
            "terminated": False,
            "truncated": False,
            "info": {},
            **stepped,
        },
    }

    async def serve_frames(client: ServerConnection) -> None:
        async for frame in client:
            asked = [one for one in json.loads(frame) if one["op"] in bodies]
            answers = [{"id": one["id"], "status": 200, "body": bodies[one["op"]]} for one in asked]
            await client.send(json.dumps(answers))

    return serve_frames


@pytest.mark.parametrize(
    "stepped",
    [
        *({"reward": reward} for reward in ("1", True, None, [1.0], 10**400, float("nan"))),
        {"terminated": "yes"},
        {"truncated": 1},
        {"observation": 5},
    ],
    ids=str,
)
def test_what_is_no_number_pays_nothing_and_what_is_no_bool_ends_nothing(stepped):
    async def step(fields: dict[str, Any]) -> Any:
        async with asyncio.timeout(60), serve(_answering(**fields), "127.0.0.1", 0) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            live = LiveEnv(RemoteEnv([f"http://127.0.0.1:{port}"]), EnvDeadlines())
            await live.reset(1, {})
            try:
                return await live.step("a")
            finally:
                await live.close()

    assert asyncio.run(step({"reward": 1}))[1] == 1.0
    with pytest.raises(EnvError):
        asyncio.run(step(stepped))


@pytest.mark.parametrize(
    ("asked", "waited"),
    [
        *((nothing, 1.0) for nothing in (None, 0.0, -5.0, float("nan"))),
        *((too_long, choice.FULL_SECONDS) for too_long in (1e9, float("inf"))),
        (1e-9, 0.05),
        (3.0, 3.0),
    ],
)
def test_a_full_server_is_neither_asked_without_pause_nor_left_alone_for_ever(
    virtual, asked, waited
):
    """It says itself when it wants to be asked again, and that may be any number."""
    times: list[float] = []

    async def open_at(server: link.Link) -> str:
        times.append(now())
        if len(times) == 12:
            return "opened"
        error = choice.FullError("full")
        error.retry_seconds = asked
        raise error

    async def main() -> None:
        servers = [link.Link("http://one", None)]
        opened = choice.open_at_any(servers, open_at, kind="server", kind_when_full="servers")
        with suppress(choice.UnreachableError):
            assert await opened == "opened"

    virtual(main)
    assert times[-1] - times[-2] == pytest.approx(waited)


@pytest.mark.parametrize(
    ("bytes_sent", "says"),
    [
        (
            b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
            "404 where /sessions/ws should be",
        ),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "no WebSocket"),
        (b"", "no WebSocket"),
    ],
)
def test_what_speaks_no_websocket_is_an_env_error(bytes_sent, says):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(bytes_sent)
        await writer.drain()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with asyncio.timeout(60), server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(EnvError, match=says):
                await RemoteEnv([f"http://127.0.0.1:{port}"]).reset(seed=1, options={})

    asyncio.run(main())


def test_a_server_that_does_not_answer_costs_one_at_a_time_and_serves_again_when_it_does(
    monkeypatch,
):
    # Longer than this takes on the busiest machine.
    monkeypatch.setattr(link, "REST_SECONDS", 1000.0)

    async def main(sound: str) -> None:
        answers: Callable[[], bool] = lambda: False  # noqa: E731
        held: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(65536):
                writer.write(data)
            writer.close()

        async def proxied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                if not answers():
                    await reader.read()  # as long as the client waits
                    return
                there, to_there = await asyncio.open_connection(
                    "127.0.0.1", int(sound.rpartition(":")[2])
                )
                held.append((writer, to_there))
                async with asyncio.TaskGroup() as group:
                    group.create_task(forward(reader, to_there))
                    group.create_task(forward(there, writer))
            finally:
                # the loop may end with the connection: what is left open then warns when it is
                # collected
                for one in (writer, *(other for mine, other in held if mine is writer)):
                    one.transport.abort()

        async with await asyncio.start_server(proxied, "127.0.0.1", 0) as proxy:
            silent = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
            hasty = LiveEnv(RemoteEnv([silent, sound]), EnvDeadlines(reset=0.3))
            with pytest.raises(DeadlineError):
                await hasty.reset(1, {})  # both have no session: the first is asked
            await hasty.close()
            lives = [LiveEnv(RemoteEnv([silent, sound]), EnvDeadlines()) for _ in range(2)]
            for live in lives:
                assert await live.reset(2, {}) == ("seed 2", {})  # asked last now
            in_doubt = link.link_to(silent, None)
            assert in_doubt.sessions == 0
            answers = lambda: True  # noqa: E731
            in_doubt._rests_until = 0.0
            again = LiveEnv(RemoteEnv([silent, sound]), EnvDeadlines())
            assert await again.reset(3, {}) == ("seed 3", {})
            assert in_doubt.sessions == 1
            for live in (*lives, again):
                await live.close()

    with served(Counting) as server:
        asyncio.run(main(server.url))


@pytest.mark.parametrize("connected", [False, True])
def test_who_waits_for_a_server_that_is_gone_is_told_at_once_and_its_address_can_be_used_again(
    connected,
):
    async def silent(client: ServerConnection) -> None:
        await client.wait_closed()

    async def ask(url: str) -> None:
        with pytest.raises(EnvError, match=r"is gone|the connection ended"):
            await RemoteEnv([url]).reset(seed=1, options={})

    async def main() -> None:
        async with asyncio.timeout(5), serve(silent, "127.0.0.1", 0) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            url = f"http://127.0.0.1:{port}"
            async with asyncio.TaskGroup() as group:
                for _ in range(3):
                    group.create_task(ask(url))
                there = link.link_to(url, None)
                await asyncio.sleep(0)
                if connected:
                    await there._get_line()
                link.end_link(url, None)
            assert there.sessions == 0
            with pytest.raises(EnvError, match="its server is gone"):
                await there.ask("open")
        async with asyncio.timeout(5), serve(_farewell, "127.0.0.1", port):
            with pytest.raises(EnvError, match="1011 tired"):
                await RemoteEnv([url]).reset(seed=1, options={})

    asyncio.run(main())
