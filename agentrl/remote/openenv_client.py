"""`env: openenv:http://host:port`: an environment on a server of OpenEnv's (0.3, 0.10, or any that speaks as they do).

Answers carry no id there: each is taken for that of the last question. So a connection on which a question was left
without its answer, for whatever reason, is never used again: the next answer on it would be the last one's.
"""

import asyncio
import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp
from pydantic import BaseModel, ValidationError
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from agentrl.errors import ConfigError, EnvError
from agentrl.flow import now
from agentrl.protocols import Env, ResetResult, StepResult
from agentrl.remote.openenv_protocol import CAPACITY_REACHED, LARGEST_MESSAGE, VALIDATION_ERROR
from agentrl.remote.openenv_text import (
    action_from,
    has_tools,
    how_to_act,
    text_from,
    tools_from,
    what_is_wrong,
)
from agentrl.rollout.tools import ToolCall, ToolError, parse_tool_calls

TOKEN_VARIABLE = "AGENTRL_OPENENV_TOKEN"
"""Environment variable of the bearer token that is shown to OpenEnv servers."""
CONNECT_SECONDS = 10.0
SHUN_SECONDS = 5.0
"""How long a server that could not be used is asked last."""


class OpenEnv:
    """An environment on one of the OpenEnv servers at `urls`: the one with the fewest sessions of this process.

    What the model's message means, and what it reads, stands in `openenv_text.py`. `done` is `terminated`, or, where
    the metadata say so, `truncated`; a reward that is null is 0. The metadata are the info. Options are sent with the
    reset; OpenEnv's servers drop those that an environment does not know.

    A connection is used for all episodes of this instance, until a question stays without its answer. A server that is
    full is asked again until the caller's deadline.

    Raises:
        ConfigError: an address is wrong.
    """

    isolation = "inline"

    def __init__(self, urls: Sequence[str], token: str | None = None) -> None:
        self.system_prompt = ""
        self.tools: Sequence[Mapping[str, Any]] = ()
        self._urls = tuple(_checked(url) for url in urls)
        self._token = token if token is not None else os.environ.get(TOKEN_VARIABLE)
        self._socket: _Socket | None = None
        self._playing = False

    async def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetResult:
        """Begin an episode.

        Raises:
            EnvError: no server can be used, or the environment failed.
            ConfigError: that is no OpenEnv server, or it does not take the token or the options.
        """
        self._playing = False
        data = {**options, "seed": seed}
        if self._socket is not None and self._socket.usable:
            with contextlib.suppress(_LostError, _FullError):  # it has lapsed: nothing of an episode is lost yet
                return await self._begin(self._socket, data)
        await self.close()
        return await self._begin_somewhere(data)

    async def step(self, action: str) -> StepResult:
        """Send the model's message, or each of its calls until one ends the episode.

        Raises:
            EnvError: the server or the environment failed, or no episode is being played.
        """
        socket = self._socket
        if socket is None or not socket.usable or not self._playing:
            raise EnvError("no episode is being played; call reset first")
        result = await (self._call_tools(socket, action) if self.tools else self._act(socket, action))
        if result[2] or result[3]:
            self._playing = False
            if any(_server(url, self._token).waiting for url in self._urls):
                await self.close()  # others wait for room
        return result

    async def close(self) -> None:
        """End the session."""
        socket, self._socket = self._socket, None
        self._playing = False
        if socket is not None:
            await socket.close()

    async def _begin_somewhere(self, data: Mapping[str, Any]) -> ResetResult:
        servers = [_server(url, self._token) for url in self._urls]
        wait = 0.05
        while True:
            problems = []
            for server in sorted(servers, key=lambda server: server.load):
                try:
                    self._socket = await _Socket.open(server)
                    return await self._begin(self._socket, data)
                except _FullError:
                    await self.close()
                except _LostError as error:
                    await self.close()
                    server.shunned_until = now() + SHUN_SECONDS
                    problems.append(str(error))
            if len(problems) == len(servers):
                raise EnvError(f"no OpenEnv server can be used: {'; '.join(problems)}")
            with _waiting(servers):
                await asyncio.sleep(wait)
            wait = min(2 * wait, 1.0)

    async def _begin(self, socket: "_Socket", data: Mapping[str, Any]) -> ResetResult:
        schema = socket.action_schema
        try:
            if has_tools(schema) and not socket.tools:  # before the reset, as environments may count it as a step
                socket.tools = _tools(await socket.ask("step", {"type": "list_tools"}), socket.server.url)
            began = await socket.ask("reset", data)
        except _MisfitError as error:
            raise ConfigError(f"{socket.server.url} does not take the options {dict(data)}: {error}") from error
        self._playing = True
        self.tools = socket.tools
        info = began.told
        self.system_prompt = str(info.get("system_prompt") or ("" if self.tools else how_to_act(schema)))
        return text_from(began.observation), info

    async def _act(self, socket: "_Socket", message: str) -> StepResult:
        try:
            data = action_from(message, socket.action_schema)
        except ToolError as error:
            return f"Error: {error}", 0.0, False, False, {}
        try:
            return (await socket.ask("step", data)).result
        except _MisfitError as error:
            return what_is_wrong(error.data, socket.action_schema), 0.0, False, False, {}

    async def _call_tools(self, socket: "_Socket", message: str) -> StepResult:
        read = parse_tool_calls(message)
        results: list[tuple[str, StepResult]] = []
        for call in read.calls:
            results.append((call.name, await self._call(socket, call)))
            if results[-1][1][2] or results[-1][1][3]:
                break
        else:
            results += [("", (f"Error: {error}", 0.0, False, False, {})) for error in read.errors]
        return _merged(results) if results else (self._no_call(), 0.0, False, False, {})

    async def _call(self, socket: "_Socket", call: ToolCall) -> StepResult:
        data = {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}
        try:
            return (await socket.ask("step", data)).result
        except _MisfitError as error:
            return f"Error: {error}", 0.0, False, False, {}

    def _no_call(self) -> str:
        names = ", ".join(tool["function"]["name"] for tool in self.tools)
        example = ToolCall("...", {}).render().replace("{}", "{...}")
        return f"Call a tool ({names}) like this:\n{example}"


@dataclass(frozen=True, slots=True)
class OpenEnvs:
    """Makes environments on the OpenEnv servers at `urls`; it pickles as texts."""

    urls: tuple[str, ...]

    def __call__(self) -> Env:
        """The environment."""
        return OpenEnv(self.urls)


def openenv(rest: str) -> OpenEnvs:
    """openenv:http://localhost:8000: an environment on an OpenEnv server there, or on several: openenv:URL,URL.

    Raises:
        ConfigError: that is no address.
    """
    return OpenEnvs(tuple(_checked(url) for url in rest.split(",")))


class _LostError(EnvError):
    """The server cannot be reached, or has closed the connection."""


class _FullError(EnvError):
    """The server has no room for another session."""


class _MisfitError(Exception):
    """The server does not take what it was sent; nothing has happened. `data` is what it says of it."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        super().__init__(str(data.get("errors") or data.get("message")))
        self.data = data


class _Reply(BaseModel):
    type: str
    data: dict[str, Any] = {}


class _Said(BaseModel):
    """The data of an observation."""

    observation: dict[str, Any]
    reward: float | None = None
    done: bool = False
    metadata: dict[str, Any] | None = None

    @property
    def told(self) -> dict[str, Any]:
        """The metadata, which stand beside the observation, or in it."""
        inside = self.observation.get("metadata")
        return dict(self.metadata or (inside if isinstance(inside, dict) else {}))

    @property
    def result(self) -> StepResult:
        """As `Env.step` returns it."""
        info = self.told
        truncated = self.done and info.pop("truncated", False) is True
        return text_from(self.observation), self.reward or 0.0, self.done and not truncated, truncated, info


class _Server:
    """What this process knows of a server. `waiting` is how many wait for room there."""

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.sockets = 0
        self.waiting = 0
        self.shunned_until = 0.0
        self._action_schema: dict[str, Any] | None = None
        self._asking = asyncio.Lock()

    @property
    def load(self) -> tuple[bool, int]:
        """The least is the best to open a session at."""
        return self.shunned_until > now(), self.sockets

    async def action_schema(self) -> dict[str, Any]:
        """The schema of its actions, asked once."""
        async with self._asking:
            if self._action_schema is None:
                self._action_schema = await self._described()
            return self._action_schema

    async def _described(self) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=CONNECT_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(headers=self.headers, timeout=timeout) as http,
                http.get(f"{self.url}/schema") as answer,
            ):
                if answer.status >= 500 or answer.status == 429:
                    raise _LostError(f"{self.url}/schema answered {answer.status}")
                self.check_status(answer.status, "/schema", await answer.text())
                schema = (await answer.json())["action"]
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
            raise _LostError(f"{self.url} cannot be reached: {error or type(error).__name__}") from error
        except (aiohttp.ClientError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"{self.url}/schema describes no action ({error}): is it an OpenEnv server?") from error
        if not isinstance(schema, dict):
            raise ConfigError(f"{self.url}/schema describes no action: is it an OpenEnv server?")
        return schema

    def check_status(self, status: int, path: str, said: str) -> None:
        """Nothing, where the server takes requests there."""
        if status in (401, 403):
            raise ConfigError(f"{self.url} answered {status}: set {TOKEN_VARIABLE} to a token that it takes")
        if status >= 400:
            raise ConfigError(f"{self.url}{path} answered {status} ({said:.200}): is it an OpenEnv server?")


_servers: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, str | None], _Server]] = WeakKeyDictionary()
"""The servers that each loop knows."""


def _server(url: str, token: str | None) -> _Server:
    servers = _servers.setdefault(asyncio.get_running_loop(), {})
    return servers.setdefault((url, token), _Server(url, token))


@contextlib.contextmanager
def _waiting(servers: Sequence[_Server]) -> Iterator[None]:
    for server in servers:
        server.waiting += 1
    try:
        yield
    finally:
        for server in servers:
            server.waiting -= 1


class _Socket:
    """A connection, which is a session, and asked one thing at a time. `usable` says whether it may be asked again."""

    def __init__(self, server: _Server, connection: ClientConnection, action_schema: dict[str, Any]) -> None:
        self.server = server
        self.action_schema = action_schema
        self.tools: tuple[dict[str, Any], ...] = ()
        self.usable = True
        self._connection = connection

    @classmethod
    async def open(cls, server: _Server) -> "_Socket":
        """Connect.

        Raises:
            _LostError: the server cannot be reached.
            ConfigError: it is no OpenEnv server, or does not take the token.
        """
        server.sockets += 1  # at once, so that those who open now spread
        try:
            schema = await server.action_schema()
            return cls(server, await cls._connected(server), schema)
        except BaseException:
            server.sockets -= 1
            raise

    @staticmethod
    async def _connected(server: _Server) -> ClientConnection:
        try:
            return await connect(
                server.url.replace("http", "ws", 1) + "/ws",
                additional_headers=server.headers,
                compression=None,
                max_size=LARGEST_MESSAGE,
                proxy=None,
                ping_interval=None,  # the caller has deadlines; the server's own pings are answered all the time
                open_timeout=CONNECT_SECONDS,
                close_timeout=1.0,
            )
        except InvalidStatus as error:
            if error.response.status_code < 500:
                server.check_status(error.response.status_code, "/ws", str(error))
            raise _LostError(f"{server.url}/ws: {error}") from error
        except (OSError, TimeoutError, InvalidHandshake) as error:
            raise _LostError(f"{server.url} cannot be reached: {error or type(error).__name__}") from error

    async def ask(self, kind: str, data: Mapping[str, Any]) -> _Said:
        """Send a reset or a step, and wait for what is observed. Without an answer, the connection ends.

        Raises:
            EnvError: the connection broke, or the environment failed.
            _MisfitError: the server does not take the data; the connection is as good as before.
        """
        frame = json.dumps({"type": kind, "data": dict(data)}, ensure_ascii=False)
        frame = frame.encode(errors="replace").decode()  # half of a surrogate pair cannot be read over there
        self.usable = False
        try:
            said = self._read(await self._exchange(frame))
            self.usable = True
        except _MisfitError:
            self.usable = True
            raise
        finally:
            if not self.usable:
                self._end()
        return said

    async def close(self) -> None:
        """End the session."""
        if self.usable:
            self.usable = False
            self.server.sockets -= 1
            with contextlib.suppress(ConnectionClosed):
                await self._connection.send('{"type": "close"}')
            await self._connection.close()

    async def _exchange(self, frame: str) -> str | bytes:
        try:
            with contextlib.suppress(ConnectionClosed):  # what it said before it closed may tell why
                await self._connection.send(frame)
            return await self._connection.recv()
        except ConnectionClosed as error:
            raise _LostError(f"{self.server.url} has closed the connection: {error}") from error

    def _read(self, raw: str | bytes) -> _Said:
        url = self.server.url
        try:
            reply = _Reply.model_validate_json(raw)
            if reply.type == "observation":
                said = _Said.model_validate(reply.data)
                if said.reward is None or math.isfinite(said.reward):
                    return said
        except ValidationError as error:
            raise EnvError(f"{url} answered what is no message of OpenEnv's: {error}") from error
        code, message = reply.data.get("code"), reply.data.get("message")
        if code == VALIDATION_ERROR:
            raise _MisfitError(reply.data)
        if code == CAPACITY_REACHED:
            raise _FullError(f"{url} is full: {message}")
        if reply.type == "error":
            raise EnvError(f"the environment at {url} failed: {message} ({code})")
        raise EnvError(f"{url} answered {raw!r:.200}, and an observation with a finite reward or null was due")

    def _end(self) -> None:
        self.server.sockets -= 1
        self._connection.transport.abort()


def _tools(listing: _Said, url: str) -> tuple[dict[str, Any], ...]:
    try:
        tools = tools_from(listing.observation["tools"])
    except (LookupError, TypeError, AttributeError) as error:
        raise EnvError(f"{url} answered list_tools by {listing.observation!r:.200}") from error
    if not tools:
        raise EnvError(f"{url} lists no tools ({listing.told}), and takes no other actions")
    return tools


def _merged(results: Sequence[tuple[str, StepResult]]) -> StepResult:
    """One result of all calls of a message; with more than one, each line says which tool it is of."""
    named = len(results) > 1
    lines = [f"{name[:64]}: {result[0]}" if named and name else result[0] for name, result in results]
    info = {key: value for _, result in results for key, value in result[4].items()}
    over, cut = any(result[2] for _, result in results), any(result[3] for _, result in results)
    return "\n".join(lines), sum(result[1] for _, result in results), over, cut, info


def _checked(url: str) -> str:
    url = url.strip().rstrip("/")
    scheme, _, rest = url.partition("://")
    if scheme not in ("http", "https") or not rest:
        raise ConfigError(f"{url!r} is no address of an OpenEnv server: write openenv:http://host:port")
    return url
