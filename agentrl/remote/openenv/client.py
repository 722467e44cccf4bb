"""`env: openenv:http://host:port`: an environment on any server that speaks the protocol of OpenEnv
0.3 or 0.10.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
from pydantic_core import to_json

from agentrl.conversation.tool_calls import parse_tool_calls
from agentrl.conversation.tools import ToolError, how_to_call, is_refusal, merged
from agentrl.errors import ConfigError, EnvError
from agentrl.flow import Suspect, now
from agentrl.hosting.calls import calls_taken
from agentrl.hosting.observations import IMAGES
from agentrl.net.credentials import secret_in
from agentrl.protocols.env import Env, ResetResult, StepResult
from agentrl.remote.choice import REST_SECONDS, FullError, LostError, open_at_any
from agentrl.remote.client import suspicion
from agentrl.remote.openenv.socket import (
    TOKEN_VARIABLE,
    MisfitError,
    Server,
    ServerObservation,
    Socket,
    server_at,
    waiting_at,
)
from agentrl.remote.openenv.text import (
    action_from,
    has_tools,
    how_to_act,
    tools_from,
    what_is_wrong,
)
from agentrl.remote.protocol import server_url
from agentrl.trajectory import MadeCall, ToolCall

_ADDRESS = "openenv:http://host:port"


class OpenEnv:
    """An environment on one of the OpenEnv servers at `urls`: the one with the fewest sessions of
    this process.

    `text.py` translates the model's messages into actions, and observations into text. `done` means
    `terminated`, or `truncated` if the metadata says so. A null reward is 0. The metadata is the
    info. Options are sent with the reset; OpenEnv's servers drop options that the environment does
    not know. One is not sent: with `pictures: true` the pictures of observations are shown
    (`pictures.py`), and else written out as the text that they are.

    One connection serves all episodes of this instance, until a request gets no answer. If all
    servers are full, `reset` retries until the caller's deadline.

    `client` is the caller's own HTTP client, for the requests outside the WebSocket.

    Raises:
        ConfigError: an address is wrong.
    """

    isolation = "inline"

    def __init__(
        self, urls: Sequence[str], token: str | None = None, client: httpx.AsyncClient | None = None
    ) -> None:
        self._client = client
        self.system_prompt = ""
        self.tools: Sequence[Mapping[str, Any]] = ()
        self.calls_made: Sequence[MadeCall] | None = None
        self._urls = tuple(server_url(url, _ADDRESS) for url in urls)
        self._token = token if token is not None else secret_in(TOKEN_VARIABLE) or None
        self._socket: Socket | None = None
        self._playing = False
        self._pictures = False
        self._suspect = Suspect("no episode", bytes)
        """The task that is being played, of which a server may die."""

    async def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetResult:
        """Begin an episode.

        Raises:
            EnvError: no server can be used, or the environment failed.
            LethalTaskError: servers have died of this task.
            ConfigError: this is not an OpenEnv server, or it does not accept the token or the
            options.
        """
        if taken := {"seed", "episode_id"} & options.keys():
            raise ConfigError(
                f"the option {min(taken)!r} is a field of OpenEnv's own resets: leave it out"
            )
        self._playing = False
        pictures = options.get("pictures", False)
        if not isinstance(pictures, bool):
            raise ConfigError(f"the option pictures is {pictures!r:.80}: write true or false")
        self._pictures = pictures
        sent = {name: value for name, value in options.items() if name != "pictures"}
        data = {**sent, "seed": seed}
        content = partial(to_json, data, fallback=repr)
        self._suspect = suspicion().suspect(
            f"the task of the reset with {dict(data)!r:.200}", content
        )
        suspicion().check(self._suspect)
        if self._socket is not None and self._socket.usable:
            # It has expired; no episode has begun, so nothing is lost.
            with contextlib.suppress(LostError, FullError):
                return await self._begin(self._socket, data)
        await self.close()
        servers = [server_at(url, self._token) for url in self._urls]
        return await open_at_any(
            servers,
            partial(self._begin_at, data),
            kind="OpenEnv server",
            kind_when_full="OpenEnv servers",
            waiting=partial(waiting_at, servers),
        )

    async def step(self, action: str) -> StepResult:
        """Send the model's message or, with tools, each of its calls until one ends the episode.

        Raises:
            EnvError: the server or the environment failed, or no episode is being played.
        """
        socket = self._socket
        if socket is None or not socket.usable or not self._playing:
            raise EnvError("no episode is being played; call reset first")
        result = await (
            self._call_tools(socket, action) if self.tools else self._act(socket, action)
        )
        made, info = calls_taken(result[4])
        if not self.tools:
            self.calls_made = made
        result = (*result[:4], info)
        if result[2] or result[3]:
            self._playing = False
            suspicion().ended(self._suspect)
            if any(server_at(url, self._token).waiting for url in self._urls):
                await self.close()  # other clients are waiting for a free session
        return result

    async def close(self) -> None:
        """End the session."""
        socket, self._socket = self._socket, None
        self._playing = False
        if socket is not None:
            await socket.close()

    async def _begin_at(self, data: Mapping[str, Any], server: Server) -> ResetResult:
        try:
            self._socket = await Socket.open(server, self._client)
            return await self._begin(self._socket, data)
        except FullError as error:
            await self.close()
            server.warn_once(
                f"{error}. Episodes wait: raise its limit, or lower rollout.max_live_episodes"
            )
            raise
        except LostError:
            await self.close()
            server.rests_until = now() + REST_SECONDS
            raise

    async def _begin(self, socket: Socket, data: Mapping[str, Any]) -> ResetResult:
        schema = socket.action_schema
        try:
            # Before the reset, since environments may count it as a step.
            if has_tools(schema) and not socket.tools:
                socket.tools = _read_tools(
                    await socket.ask("step", {"type": "list_tools"}), socket.server.url
                )
            began = await self._ask(socket, "reset", data)
        except MisfitError as error:
            raise ConfigError(
                f"{socket.server.url} does not accept the options {dict(data)}: {error}"
            ) from error
        self._playing = True
        self.tools = socket.tools
        text, info = began.shown(pictures=self._pictures)
        self.system_prompt = str(
            info.get("system_prompt") or ("" if self.tools else how_to_act(schema))
        )
        return text, info

    async def _ask(self, socket: Socket, kind: str, data: Mapping[str, Any]) -> ServerObservation:
        """Send a request of the episode. If the server dies meanwhile, the task is suspect."""
        socket.server.at_work[self] = self._suspect
        try:
            return await socket.ask(kind, data)
        except LostError as error:
            if not error.lives:
                socket.server.died(suspicion(), error)
                suspicion().check(self._suspect)
            raise
        finally:
            del socket.server.at_work[self]

    async def _act(self, socket: Socket, message: str) -> StepResult:
        try:
            data = action_from(message, socket.action_schema)
        except ToolError as error:
            return f"Error: {error}", 0.0, False, False, {}
        try:
            return (await self._ask(socket, "step", data)).result(pictures=self._pictures)
        except MisfitError as error:
            return what_is_wrong(error.data, socket.action_schema), 0.0, False, False, {}

    async def _call_tools(self, socket: Socket, message: str) -> StepResult:
        read = parse_tool_calls(message)
        made: list[MadeCall] = []
        self.calls_made = made
        results: list[tuple[str, StepResult]] = []
        for call in read.calls:
            began = now()
            results.append((call.name, await self._call(socket, call)))
            made.append(MadeCall(call, is_refusal(results[-1][1][0]), now() - began))
            if results[-1][1][2] or results[-1][1][3]:
                break
        else:
            made += [MadeCall(None)] * len(read.errors)
            results += [("", (f"Error: {error}", 0.0, False, False, {})) for error in read.errors]
        step = merged(results or [("", (how_to_call(self.tools), 0.0, False, False, {}))])
        shown = [image for _, result in results for image in result[4].get(IMAGES, ())]
        return (*step[:4], {**step[4], IMAGES: shown}) if shown else step

    async def _call(self, socket: Socket, call: ToolCall) -> StepResult:
        data = {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}
        try:
            return (await self._ask(socket, "step", data)).result(pictures=self._pictures)
        except MisfitError as error:
            return f"Error: {error}", 0.0, False, False, {}


@dataclass(frozen=True, slots=True)
class OpenEnvs:
    """Makes environments on the OpenEnv servers at `urls`; it pickles as plain strings."""

    urls: tuple[str, ...]

    def __call__(self) -> Env:
        """Make an environment."""
        return OpenEnv(self.urls)


def openenv(rest: str) -> OpenEnvs:
    """openenv:http://localhost:8000: an environment on an OpenEnv server there, or on several:
    openenv:URL,URL.

    Raises:
        ConfigError: one of them is not an address.
    """
    return OpenEnvs(tuple(server_url(url, _ADDRESS) for url in rest.split(",")))


def _read_tools(listing: ServerObservation, url: str) -> tuple[dict[str, Any], ...]:
    try:
        tools = tools_from(listing.observation["tools"])
    except (LookupError, TypeError, AttributeError) as error:
        raise EnvError(f"{url} answered list_tools with {listing.observation!r:.200}") from error
    if not tools:
        raise EnvError(
            f"{url} lists no tools ({listing.info_fields}), and accepts no other actions"
        )
    return tools
