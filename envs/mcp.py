"""MCP servers as environments: `env: mcp:stdio:COMMAND ARGS`, `env: mcp:http://HOST:PORT/mcp`.

A plain server has tools, but no task and no reward. With an address, the options supply both. A
subclass of `McpToolEnv` sets `server = "..."`, begins with a task and gives rewards; it may add
tools to the server's:

    class Librarian(McpToolEnv):
        server = "mcp:stdio:python -m my_library"
        system_prompt = "Find the book."

        def start(self, seed: int, options: Mapping[str, Any]) -> str:
            self.wanted = self.rng.choice(TITLES)
            return f"Which shelf holds {self.wanted!r}?"

        def reply(self, text: str) -> ToolResult:  # the model has called no tool: it answers
            right = SHELVES[self.wanted] in text
            return ToolResult("", reward=float(right), terminated=True, success=right)

The environment reads these keys of a tool result's structured content: `reward` (a number),
`terminated`, `truncated`, `success`. The model reads the text of the result, and with the option
`pictures` sees its pictures. Each episode has its own session, and with `stdio` its own process.
"""

import asyncio
import inspect
import logging
import math
import os
import shlex
import shutil
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TextIO
from urllib.parse import urlsplit

from pydantic import Field, ValidationError

from agentrl.conversation.tools import no_such_tool
from agentrl.envs import background
from agentrl.envs.base import ToolEnv, ToolError, ToolResult, read_options
from agentrl.envs.foreign import load_package
from agentrl.errors import ConfigError, EnvError, ImageError, PluginError
from agentrl.net.http_client import proxy_note
from agentrl.protocols import Env, ResetReply, StepReply
from agentrl.settings.base import Settings
from agentrl.tokens.encoded_image import EncodedImage
from agentrl.trajectory import ToolCall

if TYPE_CHECKING:
    from mcp.types import ContentBlock

logger = logging.getLogger(__name__)

Schema = Mapping[str, Any]


def scheme(rest: str) -> Callable[[], Env]:
    """mcp:stdio:python my_server.py: the tools of an MCP server (or mcp:http://host:8000/mcp).

    Raises:
        PluginError: the address cannot be read, there is no such command, or the package `mcp` is
        missing.
    """
    _check_server(f"mcp:{rest}")
    load_package("mcp")
    return partial(McpEnv, f"mcp:{rest}")


class McpToolEnv(ToolEnv, no_tools=True):
    """An environment whose tools are those of the MCP server `server` and its own typed public
    methods.

    With `pictures`, those in results are shown to the model; else a placeholder stands for each.

    `reply` answers a message without tool calls; by default it asks for one. `hidden` names tools
    of the server that the model is not shown; `call` can call every tool of the server, also from
    `start`. If the server dies or breaks the protocol, its episode fails with `EnvError`. A call
    that misses its deadline drops the connection and ends a `stdio` server.
    """

    server: str = ""
    hidden: Sequence[str] = ()
    pictures: bool = False
    _is_async: ClassVar[bool] = True
    _session: "_Session | None" = None

    def __init_subclass__(cls, no_tools: bool = False) -> None:
        """Every subclass is async, even with sync tools of its own: steps wait for the server."""
        super().__init_subclass__(no_tools=no_tools)
        cls._is_async = True

    async def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetReply:
        """Open a session, list its tools, and begin an episode with `start`.

        Raises:
            EnvError: the server cannot be started or reached, or does not speak MCP.
            ConfigError: the server and this class both have a tool of some name, or a hidden tool
            does not exist.
        """
        await self.close()
        self._session = session = _Session(self.server)
        await session.open()
        own = [spec.schema for spec in self._specs]
        self._check_names([_name(tool) for tool in own])
        self.tools = (*own, *(tool for tool in session.tools if _name(tool) not in self.hidden))
        begun = super().reset(seed=seed, options=options)
        return await begun if inspect.isawaitable(begun) else begun

    async def step(self, action: str) -> StepReply:
        """Run the tool calls in the model's message and return their merged results."""
        return await self._play(action)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool of the server.

        Raises:
            ToolError: the tool reports an error.
            EnvError: the server is gone, its answer is not MCP, or its reward is not a number.
        """
        text, content, images = await self._ask(name, arguments)
        success = content.get("success")
        return ToolResult(
            text,
            reward=_to_reward(self.server, content.get("reward", 0.0)),
            terminated=bool(content.get("terminated")),
            truncated=bool(content.get("truncated")),
            success=None if success is None else bool(success),
            images=images,
        )

    async def close(self) -> None:
        """End the session, and the server if it is our own process."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _ask(self, name: str, arguments: Mapping[str, Any]) -> "_Answer":
        if self._session is None:
            raise EnvError(f"{self.server}: no episode is being played; call reset first")
        return await self._session.call(name, arguments, pictures=self.pictures)

    async def _run(self, call: ToolCall) -> ToolResult:
        if any(spec.name == call.name for spec in self._specs):
            return await super()._run(call)
        try:
            if call.name not in (names := [_name(tool) for tool in self.tools]):
                raise no_such_tool(call.name, names)
            return await self.call(call.name, call.arguments)
        except ToolError as error:
            return ToolResult(f"Error: {error}")

    def _check_names(self, own: Sequence[str]) -> None:
        there = [_name(tool) for tool in self._session.tools] if self._session else []
        if twice := sorted(set(own) & set(there)):
            raise ConfigError(
                f"{type(self).__name__} and {self.server} both have a tool {', '.join(twice)}:"
                " rename the method"
            )
        if missing := sorted(set(self.hidden) - set(there)):
            raise ConfigError(
                f"{self.server} has no tool {', '.join(missing)} to hide; its tools:"
                f" {', '.join(there)}"
            )


class McpEnv(McpToolEnv):
    """An MCP server by its address. An answer without a tool call ends the episode."""

    class Options(Settings):
        """The options of `reset`."""

        task: str = ""
        """The task for the model; by default the answer of the tool `setup`."""
        system_prompt: str = ""
        """The system message."""
        setup: str = ""
        """A tool that begins an episode. It is called with `seed`; the model does not see it."""
        judge: str = ""
        """A tool that scores the model's last message. It is called with `answer` and returns a
        number, or `reward` in its structured content; the model does not see it. Without a judge,
        rewards come from tool results with a `reward`, or from your own reward of the trajectory
        (`reward: ...`)."""
        hidden: tuple[str, ...] = Field(default=())
        """Tools that the model is not shown."""
        pictures: bool = False
        """Show the pictures in results to the model, which must be able to see; else a placeholder
        in the text stands for each."""

        @property
        def shows_images(self) -> bool:
            """True if the model must be able to see."""
            return self.pictures

    def __init__(self, server: str) -> None:
        self.server = server

    async def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetReply:
        """Open a session and begin an episode.

        Raises:
            ConfigError: there is neither a `task` nor a `setup`.
        """
        chosen = read_options(self.Options, options)
        if not (chosen.task or chosen.setup):
            raise ConfigError(
                f"{self.server}: an MCP server has tools but no task. Write options: {{task: ...}},"
                " or {setup: TOOL} with a tool that is called with the seed and answers with the"
                " task"
            )
        self._options = chosen
        self.system_prompt, self.pictures = chosen.system_prompt, chosen.pictures
        self.hidden = (*chosen.hidden, *filter(None, (chosen.setup, chosen.judge)))
        return await super().reset(seed=seed, options=options)

    async def start(self, seed: int, options: Mapping[str, Any]) -> str:
        """Call `setup`, if there is one, and return the task."""
        chosen, begun = self._options, ""
        if chosen.setup:
            try:
                begun, *_ = await self._ask(chosen.setup, {"seed": seed})
            except ToolError as error:
                raise EnvError(
                    f"{self.server}: the setup {chosen.setup!r} says: {error}"
                ) from error
        return chosen.task or begun

    async def reply(self, text: str) -> ToolResult:
        """End the episode with the model's last message, and let the judge score it."""
        if not self._options.judge:
            return ToolResult("", terminated=True)
        try:
            # A model may write half of a surrogate pair, which JSON cannot carry.
            readable = text.encode(errors="replace").decode()
            text, content, _ = await self._ask(self._options.judge, {"answer": readable})
        except ToolError as error:
            raise EnvError(
                f"{self.server}: the judge {self._options.judge!r} says: {error}"
            ) from error
        reward = content.get("reward", content.get("result", text))
        success = content.get("success")
        return ToolResult(
            "",
            _to_reward(self.server, reward),
            True,
            success=None if success is None else bool(success),
        )


class _Answer(NamedTuple):
    """What a tool has returned."""

    text: str
    content: Mapping[str, Any]
    """Its structured content."""
    images: Sequence[EncodedImage] = ()


class _Session:
    """One session with a server. One background task opens and closes it, as the library
    requires.
    """

    def __init__(self, server: str) -> None:
        self._kind, self._parts = _check_server(server)
        self.tools: tuple[Schema, ...] = ()
        self._server = server
        self._ready: Future[tuple[Schema, ...]] = Future()
        self._gone: Future[None] = Future()
        self._task: Future[None] | None = None
        self._client: Any = None
        self._end = asyncio.Event()
        self._stray: deque[str] = deque(maxlen=8)
        self._stderr: TextIO = tempfile.TemporaryFile(  # noqa: SIM115
            "w+", encoding="utf-8", errors="replace"
        )

    async def open(self) -> None:
        """Connect and list the tools."""
        self._task = background.start(self._serve())
        self.tools = await self._await_answer(self._ready)

    async def call(
        self, name: str, arguments: Mapping[str, Any], *, pictures: bool = False
    ) -> "_Answer":
        """Call a tool. Without `pictures`, they are placeholders in the text.

        Raises:
            ToolError: the tool reports an error.
            EnvError: a picture is none that is taken.
        """
        result = await self._await_answer(
            background.start(self._client.call_tool(name, dict(arguments)))
        )
        seen = [block for block in result.content if pictures and block.type == "image"]
        text = "\n".join(_text_of_block(block) for block in result.content if block not in seen)
        if result.is_error:
            raise ToolError(text)
        content = result.structured_content
        images = [_picture(f"{self._server}: a picture of {name}", block) for block in seen]
        return _Answer(text, content if isinstance(content, Mapping) else {}, images)

    async def close(self) -> None:
        """End the session. If the server hangs, cancelling the caller cancels the session."""
        if self._task is None:
            return
        if self._client is None:  # it has not connected: wait no longer
            self._task.cancel()
        else:
            background.call_soon(self._end.set)
        try:
            await asyncio.wrap_future(self._gone)
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        finally:
            self._stderr.close()

    async def _serve(self) -> None:
        try:
            async with _client(
                self._kind, self._parts, self._stderr, self._record_stray_line
            ) as client:
                self._client = client
                self._ready.set_result(await _list_tools(client))
                await self._end.wait()
        except Exception as error:
            if not self._ready.done():
                self._ready.set_exception(error)
        finally:
            if not self._gone.cancelled():
                self._gone.set_result(None)

    async def _await_answer(self, answer: Future[Any]) -> Any:
        """The server's answer. Invalid arguments are the model's error (`ToolError`), all else is
        the server's (`EnvError`).
        """
        from mcp import MCPError

        try:
            return await asyncio.wrap_future(answer)
        except Exception as raised:
            error: BaseException = raised  # the library's task groups wrap the cause
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            if isinstance(error, MCPError) and error.error.code == _INVALID_PARAMS:
                raise ToolError(str(error)) from raised
            proxy = proxy_note(self._parts[0], used=True) if self._kind == "http" else ""
            raise EnvError(
                f"{self._server}: {type(error).__name__}: {error}{proxy}{self._stderr_tail()}"
            ) from raised

    def _stderr_tail(self, lines: int = 8) -> str:
        size = os.fstat(self._stderr.fileno()).st_size
        text = (
            os.pread(self._stderr.fileno(), 2000, max(0, size - 2000))
            .decode(errors="replace")
            .strip()
        )
        words = "; it last wrote:\n  " + "\n  ".join(text.splitlines()[-lines:]) if text else ""
        stray = "\n  ".join(self._stray)
        return f"{words}\n{_MISPLACED_FIELDS_ERROR}:\n  {stray}" if stray else words

    async def _record_stray_line(self, message: Any) -> None:
        """Keep a line of stdout that is no message, and warn of the server's first one."""
        if not isinstance(message, ValidationError):
            return
        line = f"{message.errors()[0]['input']!s:.200}"
        self._stray.append(line)
        if self._server not in _warned:
            _warned.add(self._server)
            logger.warning(
                "%s: %s, such as %r. They are skipped", self._server, _MISPLACED_FIELDS_ERROR, line
            )


_MISPLACED_FIELDS_ERROR = (
    "on stdout, where only messages of MCP belong (logs belong on stderr), it wrote lines that are"
    " none"
)
_warned: set[str] = set()
"""The servers that a warning of such lines was logged for. Each environment has a connection of its
own, and a run has thousands of these, which would all repeat the warning."""


def _is_no_parse_error(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not isinstance(record.exc_info[1], ValidationError)


_INVALID_PARAMS = -32602
"""JSON-RPC's code for invalid arguments."""


def _check_server(address: str) -> tuple[str, list[str]]:
    """("stdio", command and arguments) or ("http", [URL]).

    Raises:
        PluginError: the address cannot be read, or there is no such command.
    """
    kind, _, rest = address.removeprefix("mcp:").partition(":")
    if kind == "stdio":
        try:
            command = shlex.split(rest)
        except ValueError as error:
            raise PluginError(f"{address!r}: the command cannot be read: {error}") from error
        if command and shutil.which(command[0]) is None:
            raise PluginError(f"{address!r}: there is no command {command[0]!r} on the PATH")
        if command:
            return kind, command
    elif kind in ("http", "https") and urlsplit(f"{kind}:{rest}").netloc:
        return "http", [f"{kind}:{rest}"]
    raise PluginError(f"{address!r}: write mcp:stdio:COMMAND ARGUMENTS or mcp:http://HOST:PORT/mcp")


@asynccontextmanager
async def _client(
    kind: str, parts: Sequence[str], stderr: TextIO, on_message: Any
) -> AsyncIterator[Any]:
    from mcp import Client, StdioServerParameters, stdio_client

    target: Any = parts[0]
    if kind == "stdio":
        target = stdio_client(
            StdioServerParameters(command=parts[0], args=list(parts[1:])), errlog=stderr
        )
        # The package logs a traceback for each line of stdout that is no message; `on_message` gets
        # the same error. A logger adds the same function only once, however many sessions do this.
        logging.getLogger("mcp.client.stdio").addFilter(_is_no_parse_error)
    async with Client(target, message_handler=on_message) as client:
        yield client


async def _list_tools(client: Any) -> tuple[Schema, ...]:
    """All tools of a server, page by page, as the chat templates expect them."""
    page = await client.list_tools()
    tools = list(page.tools)
    while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tuple(
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
            },
        }
        for tool in tools
    )


def _name(tool: Schema) -> str:
    return str(tool["function"]["name"])


def _text_of_block(block: "ContentBlock") -> str:
    """A block of a result as the model reads it; a picture or a sound becomes a placeholder."""
    from mcp import types

    shown = block.resource if isinstance(block, types.EmbeddedResource) else block
    if isinstance(shown, types.TextContent | types.TextResourceContents):
        return shown.text
    if isinstance(shown, types.ImageContent | types.AudioContent):
        return f"[{block.type} {shown.mime_type}]"
    return f"[{block.type} {shown.mime_type or shown.uri}]"


def _picture(where: str, block: Any) -> EncodedImage:
    """The picture of a block.

    Raises:
        EnvError: its bytes are no accepted picture, or not of the type that the server says.
    """
    try:
        return EncodedImage.from_base64(block.data, block.mime_type)
    except ImageError as error:
        raise EnvError(f"{where} is not taken: {error}") from error


def _to_reward(server: str, value: Any) -> float:
    """A reward as a float.

    Raises:
        EnvError: it is not a finite number.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise EnvError(f"{server}: a reward must be a finite number, got {value!r:.100}")
    return number
