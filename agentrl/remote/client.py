"""`RemoteEnv`: an environment that an `agentrl serve` somewhere else plays.

All that a process asks of one server goes through one WebSocket. No task reads it: of those who wait for an answer,
one reads for all, and hands over to another when it has its own. An answer that nobody waits for any more is dropped.
"""

import asyncio
import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import aiohttp
from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from agentrl.errors import ConfigError, EnvError
from agentrl.flow import now
from agentrl.protocols import Env, ResetResult, StepResult
from agentrl.remote.protocol import (
    TOKEN_VARIABLE,
    Began,
    CloseFrame,
    Opened,
    OpenFrame,
    Reply,
    ResetFrame,
    StepFrame,
    Stepped,
)

logger = logging.getLogger(__name__)

SHUN_SECONDS = 5.0
"""How long a server that could not be reached is asked last."""

_Shape = TypeVar("_Shape", bound=BaseModel)
_LARGEST_ANSWER = 64 << 20


class RemoteEnv:
    """An environment on one of the servers at `urls`: the one with the fewest sessions of this process.

    A session is opened by the first `reset`, and used for all episodes of this instance. Where it has lapsed, or its
    server drains, `reset` opens another. A server that is full is asked again until the caller's deadline.

    Raises:
        ConfigError: an address or the token is wrong.
    """

    isolation = "inline"

    def __init__(self, urls: Sequence[str], token: str | None = None) -> None:
        self.system_prompt = ""
        self.tools: Sequence[Mapping[str, Any]] = ()
        self._urls = tuple(_checked(url) for url in urls)
        self._token = token if token is not None else os.environ.get(TOKEN_VARIABLE)
        self._lease: _Lease | None = None

    async def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetResult:
        """Begin an episode.

        Raises:
            EnvError: no server can be reached, or the environment failed.
            ConfigError: the environment does not take these options, or the server does not take the token.
        """
        if self._lease is not None:
            try:
                reply = await self._begin(self._lease, seed, options)
                if reply.status in (404, 503):
                    await self.close()
            except _UnreachableError:
                await self.close()  # nothing of an episode is lost yet
        if self._lease is None:
            self._lease = await _open([_link(url, self._token) for url in self._urls])
            reply = await self._begin(self._lease, seed, options)
        began = _read(Began, reply)
        self.system_prompt, self.tools = began.system_prompt, tuple(began.tools)
        return began.observation, began.info

    async def step(self, action: str) -> StepResult:
        """Send the model's message.

        Raises:
            EnvError: the server or the environment failed, or no episode is being played.
        """
        lease = self._lease
        if lease is None:
            raise EnvError("no episode is being played; call reset first")
        lease.seq += 1
        reply = await lease.link.ask(
            lambda number: StepFrame(id=number, op="step", session=lease.session, seq=lease.seq, action=action),
            lease.max_bytes,
        )
        said = _read(Stepped, reply)
        return said.observation, said.reward, said.terminated, said.truncated, said.info

    async def close(self) -> None:
        """Give the session back. Nobody waits for the server's answer."""
        lease, self._lease = self._lease, None
        if lease is not None:
            await lease.link.give_back(lease.session)

    @staticmethod
    async def _begin(lease: "_Lease", seed: int, options: Mapping[str, Any]) -> Reply:
        lease.seq += 1
        return await lease.link.ask(
            lambda number: ResetFrame(
                id=number, op="reset", session=lease.session, seq=lease.seq, seed=seed, options=dict(options)
            ),
            lease.max_bytes,
        )


@dataclass(frozen=True, slots=True)
class RemoteEnvs:
    """Makes environments on the servers at `urls`; it pickles as texts."""

    urls: tuple[str, ...]

    def __call__(self) -> Env:
        """The environment."""
        return RemoteEnv(self.urls)


def remote(rest: str) -> RemoteEnvs:
    """remote:http://one:8800,http://two:8800: an environment that `agentrl serve` plays, on any of these servers.

    Raises:
        ConfigError: that is no address.
    """
    return RemoteEnvs(tuple(_checked(url) for url in rest.split(",")))


def http(rest: str) -> RemoteEnvs:
    """http://localhost:8800: an environment that `agentrl serve` plays there."""
    return remote(f"http:{rest}")


def https(rest: str) -> RemoteEnvs:
    """https://games.example.org: an environment that `agentrl serve` plays there, behind a proxy that speaks TLS."""
    return remote(f"https:{rest}")


@dataclass(eq=False)
class _Lease:
    """A session, and the number of what was asked of it last."""

    link: "_Link"
    session: str
    max_bytes: int
    seq: int = 0


class _UnreachableError(EnvError):
    """The server cannot be used; another may be."""


class _LostError(Exception):
    """The socket broke before the answer came."""


class _Link:
    """The one WebSocket to a server, opened again when it broke. `sessions` is how many of this process it carries."""

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url
        self.sessions = 0
        self.unanswered = 0  # waits given up since the server last said anything
        self.shunned_until = 0.0
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._connecting = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Reply | None]] = {}
        self._has_reader = False

    @property
    def load(self) -> tuple[bool, bool, int]:
        """The least is the best to open a session at."""
        return self.shunned_until > now(), self.unanswered > 0, self.sessions

    async def ask(self, frame: Callable[[int], BaseModel], max_bytes: int = 1 << 20) -> Reply:
        """Send a request and wait for its answer; where the socket breaks, open another and send it again.

        Raises:
            EnvError: the server cannot be reached, or the request is larger than it takes.
            ConfigError: the server does not take the token.
        """
        number = next(self._numbers)
        data = to_json(frame(number))
        if len(data) > max_bytes:
            raise EnvError(f"{self.url} takes messages of {max_bytes} bytes, and this has {len(data)}")
        lost = ""
        for _ in range(2):
            try:
                return await self._exchange(await self._connected(), number, data)
            except _LostError as error:
                lost = str(error)
        self.shunned_until = now() + SHUN_SECONDS
        raise _UnreachableError(f"{self.url} cannot be used: {lost}")

    async def give_back(self, session: str) -> None:
        """Say that a session is not needed any more."""
        socket = self._socket
        if socket is not None and not socket.closed:
            frame = CloseFrame(id=next(self._numbers), op="close", session=session)
            try:
                await socket.send_str(to_json(frame).decode())
            except (aiohttp.ClientError, ConnectionError) as error:
                logger.info("session of %s not given back: %s", self.url, error)  # it lapses by itself
        await self.release()

    async def release(self) -> None:
        """Count a session less; close the socket after the last one."""
        self.sessions -= 1
        if self.sessions == 0 and not self._waiting and not self._connecting.locked():
            await self._close()

    async def _close(self) -> None:
        socket, self._socket = self._socket, None
        client, self._http = self._http, None
        if socket is not None:
            await socket.close()
        if client is not None:
            await client.close()

    async def _connected(self) -> aiohttp.ClientWebSocketResponse:
        async with self._connecting:
            if self._socket is not None and not self._socket.closed:
                return self._socket
            if self._http is None:
                self._http = aiohttp.ClientSession(headers=self._headers, cookie_jar=aiohttp.DummyCookieJar())
            try:
                self._socket = await self._http.ws_connect(
                    f"{self.url}/sessions/ws",
                    max_msg_size=_LARGEST_ANSWER,
                    timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
                )
            except aiohttp.WSServerHandshakeError as error:
                await self._close()
                if error.status in (401, 403):
                    raise ConfigError(
                        f"{self.url} does not take the token: set {TOKEN_VARIABLE} to the server's"
                    ) from error
                raise _LostError(
                    f"it answers {error.status} where /sessions/ws should be: is it `agentrl serve`?"
                ) from error
            except (aiohttp.ClientError, OSError) as error:
                await self._close()
                raise _LostError(str(error) or type(error).__name__) from error
            return self._socket

    async def _exchange(self, socket: aiohttp.ClientWebSocketResponse, number: int, data: bytes) -> Reply:
        loop = asyncio.get_running_loop()
        answered = False
        try:
            self._waiting[number] = loop.create_future()
            try:
                await socket.send_str(data.decode())
            except (aiohttp.ClientError, ConnectionError) as error:
                if self._socket is socket:
                    self._socket = None
                await socket.close()
                raise _LostError(str(error) or type(error).__name__) from error
            reply = await self._reply(socket, number)
            answered = True
            return reply
        except asyncio.CancelledError:
            self.unanswered += 1
            raise
        finally:
            future = self._waiting.pop(number, None)
            if not answered and _was_told_to_read(future):
                self._hand_over()

    async def _reply(self, socket: aiohttp.ClientWebSocketResponse, number: int) -> Reply:
        if self._has_reader:
            reply = await self._waiting[number]
            if reply is not None:
                return reply
        # Nobody reads, or the one who did has handed over to this one.
        self._has_reader = True
        self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            return await self._read_until(socket, number)
        finally:
            del self._waiting[number]
            self._hand_over()

    async def _read_until(self, socket: aiohttp.ClientWebSocketResponse, number: int) -> Reply:
        """Hand out the answers as they come, until that of `number`."""
        while True:
            message = await socket.receive()
            if message.type is not aiohttp.WSMsgType.TEXT:
                error = _LostError(f"the connection ended ({message.type.name}, {message.data!r:.100})")
                await self._lose(socket, error)
                raise error
            reply = Reply.model_validate_json(message.data)
            self.unanswered = 0
            if reply.id == number:
                return reply
            future = self._waiting.get(reply.id or 0)
            if future is not None and not future.done():
                future.set_result(reply)

    async def _lose(self, socket: aiohttp.ClientWebSocketResponse, error: _LostError) -> None:
        if self._socket is socket:
            self._socket = None
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # it may be given up before it looks
        await socket.close()

    def _hand_over(self) -> None:
        """Let another of those who wait read on."""
        self._has_reader = False
        for future in self._waiting.values():
            if not future.done():
                self._has_reader = True
                future.set_result(None)
                return


_links: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, str | None], _Link]] = WeakKeyDictionary()
"""The links of every loop: one for each server and token."""


def _link(url: str, token: str | None) -> _Link:
    links = _links.setdefault(asyncio.get_running_loop(), {})
    return links.setdefault((url, token), _Link(url, token))


def _was_told_to_read(future: asyncio.Future[Reply | None] | None) -> bool:
    if future is None or not future.done() or future.cancelled():
        return False
    return future.exception() is None and future.result() is None


async def _open(links: Sequence[_Link]) -> _Lease:
    """A session at the best of the servers that has room; waits where all that answer are full."""
    while True:
        wait: float | None = None
        problems = []
        for link in sorted(links, key=lambda link: link.load):
            link.sessions += 1  # at once, so that those who open now spread
            leased = False
            try:
                reply = await link.ask(lambda number: OpenFrame(id=number, op="open"))
                if reply.status == 200:
                    opened = _read(Opened, reply)
                    leased = True
                    return _Lease(link, opened.session, opened.max_body_bytes)
            except EnvError as error:
                problems.append(str(error))
                continue
            finally:
                if not leased:
                    await link.release()
            if reply.status not in (429, 503):
                _read(Opened, reply)
            wait = min(reply.retry_after or 1.0, wait or 60.0)
        if wait is None:
            raise EnvError(f"no server can be used: {'; '.join(problems)}")
        await asyncio.sleep(wait)


def _read(shape: type[_Shape], reply: Reply) -> _Shape:
    if reply.status == 424:
        raise ConfigError(f"the remote environment: {reply.body.get('detail')}")
    if reply.status != 200:
        raise EnvError(f"the remote environment answered {reply.status}: {reply.body.get('detail')}")
    try:
        return shape.model_validate(reply.body)
    except ValidationError as error:
        raise EnvError(f"the remote environment answered what is no {shape.__name__}: {error}") from error


def _checked(url: str) -> str:
    url = url.strip().rstrip("/")
    scheme, _, rest = url.partition("://")
    if scheme not in ("http", "https") or not rest:
        raise ConfigError(f"{url!r} is no address of a server: write http://host:port, as `agentrl serve` says it")
    return url
