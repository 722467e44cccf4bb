"""OpenEnv's dialect: a connection is a session. Also what this process knows about a server.

OpenEnv's answers carry no id: each belongs to the last request. A connection is therefore never
reused after a request got no answer, for whatever reason: the next request could receive the late
answer.
"""

import asyncio
import contextlib
import json
import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import httpx
from pydantic import BaseModel, StrictBool, StrictFloat, ValidationError
from websockets.exceptions import InvalidHandshake, InvalidStatus
from websockets.http11 import USER_AGENT

from agentrl.errors import ConfigError, EnvError
from agentrl.flow import Suspect, Suspicion, now
from agentrl.hosting.observations import IMAGES
from agentrl.net.http_client import http_client, proxy_note
from agentrl.protocols.env import StepResult
from agentrl.remote.choice import REST_SECONDS, FullError, Loaded, LostError
from agentrl.remote.connection import (
    CONNECT_SECONDS,
    Connection,
    LostConnectionError,
    connect,
)
from agentrl.remote.openenv.pictures import taken_pictures
from agentrl.remote.openenv.protocol import CAPACITY_REACHED, LARGEST_MESSAGE, VALIDATION_ERROR
from agentrl.remote.openenv.text import text_from

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "AGENTRL_OPENENV_TOKEN"
"""Environment variable of the bearer token for OpenEnv servers."""
_MAX_UNREAD = 16
"""Messages that may wait to be read; then no more are received."""


class MisfitError(Exception):
    """The server rejected the data, without any effect. `data` is the content of its error."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        super().__init__(str(data.get("errors") or data.get("message")))
        self.data = data


class _Reply(BaseModel):
    type: str
    data: dict[str, Any] = {}


class ServerObservation(BaseModel):
    """The data of an observation."""

    observation: dict[str, Any]
    reward: StrictFloat | StrictBool | None = None
    """OpenEnv's own type has true and false as rewards too, which are 1 and 0; texts are none."""
    done: StrictBool = False
    metadata: dict[str, Any] | None = None

    @property
    def info_fields(self) -> dict[str, Any]:
        """The metadata, which is beside the observation or inside it."""
        inside = self.observation.get("metadata")
        return dict(self.metadata or (inside if isinstance(inside, dict) else {}))

    def shown(self, *, pictures: bool) -> tuple[str, dict[str, Any]]:
        """The text of the observation, and the info, which has the pictures if they are wanted.

        Raises:
            EnvError: a picture is too large.
        """
        info = self.info_fields
        if not pictures:
            return text_from(self.observation), info
        rest, found = taken_pictures(self.observation)
        nothing_else = bool(found) and rest.keys() <= {"metadata"}
        own = info.get(IMAGES)  # of an environment that agentrl serves
        images = [*found, *(own if isinstance(own, list) else ())]
        text = "" if nothing_else else text_from(rest)
        return text, {**info, IMAGES: images} if images else info

    def result(self, *, pictures: bool) -> StepResult:
        """As `Env.step` returns it."""
        text, info = self.shown(pictures=pictures)
        truncated = self.done and info.pop("truncated", False) is True
        return text, float(self.reward or 0.0), self.done and not truncated, truncated, info


class Server(Loaded):
    """The state of a server, as known to this process. `waiting` counts the clients that wait for a
    free session on it.
    """

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.sockets = 0
        self.waiting = 0
        self.rests_until = 0.0
        self.at_work: dict[object, Suspect] = {}
        """The tasks of the requests that it has not answered yet, by who asks: it may die of each.
        """
        self._died = -math.inf
        self._has_warned = False
        self._action_schema: dict[str, Any] | None = None

    @property
    def load(self) -> tuple[bool, int]:
        """Sort key: open a session at the server with the lowest load."""
        return self.rests_until > now(), self.sockets

    def died(self, suspicion: Suspicion, why: object) -> None:
        """It died while it was at work. All connections end, and that counts as one death."""
        if now() - self._died > REST_SECONDS:
            self._died = now()
            suspicion.died(self.at_work.values(), why)

    async def action_schema(self, client: httpx.AsyncClient | None = None) -> dict[str, Any]:
        """The schema of the server's actions, requested once, with `client` if one is given.

        Raises:
            LostError: the server cannot be reached.
            FullError: it has no room.
            ConfigError: it is not an OpenEnv server, or does not accept the token.
        """
        if self._action_schema is None:
            if client is not None:
                self._action_schema = await self._fetch_description(client)
            else:
                # Without a proxy, as the WebSocket uses none either.
                async with http_client(trust_env=False) as own:
                    self._action_schema = await self._fetch_description(own)
        return self._action_schema

    async def _fetch_description(self, client: httpx.AsyncClient) -> dict[str, Any]:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                answer = await self._get(client, "/schema")
                if (
                    answer.status_code == 404
                    and (await self._get(client, "/health")).status_code == 200
                ):
                    raise ConfigError(
                        f"{self.url} has no /schema, as servers of OpenEnv 0.1: they have one"
                        " environment for all clients, and no sessions. Serve it with OpenEnv 0.3"
                        " (openenv-core) or later"
                    )
        except (httpx.HTTPError, TimeoutError) as error:
            why = f"{error or type(error).__name__}{proxy_note(self.url, used=False)}"
            raise LostError(f"{self.url} cannot be reached: {why}") from error
        if answer.status_code == 429:
            raise FullError(f"{self.url} is full")
        if answer.status_code >= 500:
            raise LostError(f"{self.url}/schema answered {answer.status_code}")
        self.check_status(answer.status_code, "/schema", answer.text)
        try:
            schema = answer.json()["action"]
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"{self.url}/schema has no action schema ({error}): is it an OpenEnv server?"
            ) from error
        if not isinstance(schema, dict):
            raise ConfigError(f"{self.url}/schema has no action schema: is it an OpenEnv server?")
        return schema

    async def _get(self, client: httpx.AsyncClient, path: str) -> httpx.Response:
        return await client.get(f"{self.url}{path}", headers=self.headers, follow_redirects=True)

    def warn_once(self, text: str) -> None:
        """Log this warning, unless one was logged for this server."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s", text)

    def check_status(self, status: int, path: str, answer: str) -> None:
        """Raise `ConfigError` for any status of 400 or more."""
        if status in (401, 403):
            raise ConfigError(
                f"{self.url} answered {status}: set {TOKEN_VARIABLE} to a token that it accepts"
            )
        if status >= 400:
            raise ConfigError(
                f"{self.url}{path} answered {status} ({answer:.200}): is it an OpenEnv server?"
            )


_servers: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, str | None], Server]] = (
    WeakKeyDictionary()
)
"""The servers that each event loop knows."""


def server_at(url: str, token: str | None) -> Server:
    """The running event loop's `Server` for an address."""
    servers = _servers.setdefault(asyncio.get_running_loop(), {})
    return servers.setdefault((url, token), Server(url, token))


@contextlib.contextmanager
def waiting_at(servers: Sequence[Server]) -> Iterator[None]:
    """Within the block, count one more client that waits for a free session on these servers."""
    for server in servers:
        server.waiting += 1
    try:
        yield
    finally:
        for server in servers:
            server.waiting -= 1


class Socket:
    """A connection, which is one session with one request at a time."""

    connection: Connection

    def __init__(self, server: Server, action_schema: dict[str, Any]) -> None:
        self.server = server
        self.action_schema = action_schema
        self.tools: tuple[dict[str, Any], ...] = ()
        self.usable = True
        """True if another request may be sent."""
        self._unread: deque[bytes] = deque()
        self._arrival: asyncio.Future[None] | None = None
        self._lost: LostConnectionError | None = None

    @classmethod
    async def open(cls, server: Server, client: httpx.AsyncClient | None = None) -> "Socket":
        """Connect. The caller's HTTP client, where it has one, asks for the schema.

        Raises:
            LostError: the server cannot be reached.
            ConfigError: it is not an OpenEnv server, or does not accept the token.
        """
        # Counted now, so that sessions opened at the same time spread over the servers.
        server.sockets += 1
        try:
            socket = cls(server, await server.action_schema(client))
            await socket._connect()
        except BaseException:
            server.sockets -= 1
            raise
        return socket

    async def _connect(self) -> None:
        url = self.server.url
        try:
            await connect(
                f"{url}/ws",
                self,
                headers={**self.server.headers, "User-Agent": USER_AGENT},
                max_bytes=LARGEST_MESSAGE,
            )
        except InvalidStatus as error:
            if error.response.status_code < 500:
                self.server.check_status(error.response.status_code, "/ws", str(error))
            raise LostError(f"{url}/ws: {error}") from error
        except (OSError, InvalidHandshake) as error:
            raise LostError(f"{url} cannot be reached: {error or type(error).__name__}") from error

    async def ask(self, kind: str, data: Mapping[str, Any]) -> ServerObservation:
        """Send a reset or a step, and wait for the observation. Without an answer, the connection
        ends.

        Raises:
            EnvError: the connection broke, or the environment failed.
            MisfitError: the server rejected the data; the connection stays usable.
        """
        frame = json.dumps({"type": kind, "data": dict(data)}, ensure_ascii=False)
        self.usable = False
        try:
            # The server cannot decode half of a surrogate pair, hence "replace".
            answer = self._parse(await self._exchange(frame.encode(errors="replace")))
            self.usable = True
        except MisfitError:
            self.usable = True
            raise
        finally:
            if not self.usable:
                self.server.sockets -= 1
                self.connection.abort()
        return answer

    async def close(self) -> None:
        """End the session."""
        if self.usable:
            self.usable = False
            self.server.sockets -= 1
            self.connection.send([b'{"type": "close"}'])
            await self.connection.close()

    def take(self, message: bytes) -> None:
        """Keep a message until it is read."""
        self._unread.append(message)
        if len(self._unread) >= _MAX_UNREAD:
            self.connection.pause_reading()
        self._wake()

    def lose(self, error: LostConnectionError) -> None:
        """Note that no more messages will come."""
        self._lost = self._lost or error
        self._wake()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def _exchange(self, frame: bytes) -> bytes:
        self.connection.send([frame])
        # What the server said before it closed the connection may give the reason, so it is read
        # first.
        while not self._unread:
            if self._lost is not None:
                lost = LostError(
                    f"{self.server.url} has closed the connection: {self._lost.closing}"
                )
                lost.lives = self._lost.is_closed_by_server
                raise lost from self._lost
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        self.connection.resume_reading()
        return self._unread.popleft()

    def _parse(self, raw: bytes) -> ServerObservation:
        url = self.server.url
        try:
            reply = _Reply.model_validate_json(raw)
            if reply.type == "observation":
                answer = ServerObservation.model_validate(reply.data)
                if answer.reward is None or math.isfinite(answer.reward):
                    return answer
        except ValidationError as error:
            raise EnvError(
                f"{url} sent something that is not an OpenEnv message: {error}"
            ) from error
        code, message = reply.data.get("code"), reply.data.get("message")
        if code == VALIDATION_ERROR:
            raise MisfitError(reply.data)
        if code == CAPACITY_REACHED:
            raise FullError(f"{url} is full: {message!s:.2000}")
        if reply.type == "error":
            raise EnvError(f"the environment at {url} failed: {message!s:.2000} ({code!s:.80})")
        said = raw.decode(errors="replace")
        raise EnvError(
            f"{url} answered {said!r:.200} instead of an observation with a finite reward or null"
        )
