"""`JudgeServer`: an OpenAI-compatible chat endpoint whose answers, and whose failures, are a
script.

    def script(call: JudgeCall) -> JudgeReply:
        return JudgeReply.json({"levels": {"polite": 10}}, seconds=0.1)

    async with JudgeServer(script) as server:
        config = RubricJudge.Config(url=server.url, criteria={"polite": "It is polite."})
        async with RubricJudge(config) as judge:
            await judge.score(trajectory)
        assert len(server.calls) == 1
"""

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from aiohttp import web
from pydantic_core import to_json

from agentrl.errors import AgentRLError

MODEL = "scripted-judge"
"""The name of the one model."""
_JUDGED = re.compile(
    r"\AThe key is (?P<key>\w+)\.\n<data-(?P=key)>\n(?P<data>.*)\n</data-(?P=key)>$", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class JudgeCall:
    """One request to the judge."""

    number: int
    """Its place among the requests of this server, from 0."""
    system: str
    """The content of the system message."""
    user: str
    """The content of the user message. It holds a random key, so it differs from call to call."""
    body: Mapping[str, Any]
    """The whole request."""

    @property
    def data(self) -> Any:
        """The judged values, parsed from the JSON between the marks; equal whenever the same text
        is judged.

        Raises:
            ValueError: the user message is not that of a `JudgePrompt`.
        """
        if (judged := _JUDGED.search(self.user)) is None:
            raise ValueError(
                "the user message has no data between the marks <data-KEY> and </data-KEY>"
            )
        return json.loads(judged["data"])


@dataclass(frozen=True, slots=True)
class JudgeReply:
    """The fate of a request: an answer, a refusal, or worse."""

    content: str = ""
    """The text of the answer."""
    status: int = 200
    """The HTTP status; anything but 200 is a refusal."""
    seconds: float = 0.0
    """The time before the answer."""
    retry_after: str | None = None
    """The header of this name, if any."""
    fault: Literal["", "hang", "drop"] = ""
    """`hang` answers never, `drop` closes the connection without a word."""
    finish_reason: str = "stop"
    """The reason in the answer."""
    prompt_tokens: int = 100
    """The usage in the answer."""
    completion_tokens: int = 10
    """The usage in the answer."""

    @staticmethod
    def json(verdict: Mapping[str, Any], seconds: float = 0.0) -> "JudgeReply":
        """A verdict."""
        return JudgeReply(json.dumps(verdict), seconds=seconds)


Script = Callable[[JudgeCall], JudgeReply]
"""The answer to a request."""


@dataclass(slots=True, eq=False)
class JudgeServer:
    """A real HTTP server on this machine. An async context manager; `stop` and `start` again keep
    the port.

    `calls` are all requests for a verdict so far, refused and dropped ones included, `most_live`
    how many were under way at once; none is answered until `together` of them have been. With an
    `api_key`, requests without it are refused with 401, and are no calls. Without `lists_models` it
    does not say what it serves.
    """

    script: Script
    api_key: str | None = None
    port: int = 0
    lists_models: bool = True
    together: int = 1
    calls: list[JudgeCall] = field(default_factory=list)
    live: int = 0
    most_live: int = 0
    _enough: asyncio.Event = field(default_factory=asyncio.Event)
    _runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """The address to give a judge."""
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen: at first on a free port, unless one was given, and on the same one later.

        Raises:
            AgentRLError: it listens already.
        """
        if self._runner is not None:
            raise AgentRLError(f"the server listens at {self.url} already")
        app = web.Application(client_max_size=2**26)
        app.add_routes(
            [
                web.get("/v1/models", self._list_models),
                web.post("/v1/chat/completions", self._complete),
            ]
        )
        # At the end, requests under way are not waited for (to aiohttp 0 seconds are for ever).
        runner = web.AppRunner(
            app, handler_cancellation=True, shutdown_timeout=0.01, access_log=None
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port, backlog=1024).start()
        self.port, self._runner = runner.addresses[0][1], runner

    async def stop(self) -> None:
        """Stop listening, and cut all connections: what a killed server looks like from outside."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _list_models(self, request: web.Request) -> web.Response:
        if not self.lists_models:
            raise web.HTTPNotFound
        return self._refuse_key(request) or _json(
            {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
        )

    async def _complete(self, request: web.Request) -> web.Response:
        if (refusal := self._refuse_key(request)) is not None:
            return refusal
        body = json.loads(await request.read())
        contents = {message["role"]: message["content"] for message in body["messages"]}
        call = JudgeCall(
            len(self.calls), contents.get("system", ""), contents.get("user", ""), body
        )
        self.calls.append(call)
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        if self.live >= self.together:
            self._enough.set()
        try:
            await self._enough.wait()
            return await _respond(self.script(call), request)
        finally:
            self.live -= 1

    def _refuse_key(self, request: web.Request) -> web.Response | None:
        given = request.headers.get("Authorization", "")
        if self.api_key is None or given == f"Bearer {self.api_key}":
            return None
        # Some servers repeat the key, which must not get into logs.
        return _json({"error": {"message": f"Incorrect API key provided: {given}"}}, 401)


async def _respond(reply: JudgeReply, request: web.Request) -> web.Response:
    """Do to a request what the script says."""
    await asyncio.sleep(reply.seconds)
    if reply.fault == "hang":
        await asyncio.Event().wait()
    if reply.fault == "drop":
        if request.transport is not None:
            request.transport.abort()
        raise web.HTTPServiceUnavailable  # to nobody: the connection is gone
    if reply.status != 200:
        headers = {} if reply.retry_after is None else {"Retry-After": reply.retry_after}
        return _json(
            {"error": {"message": reply.content or f"scripted {reply.status}"}},
            reply.status,
            headers,
        )
    message = {"role": "assistant", "content": reply.content}
    choice = {"index": 0, "message": message, "finish_reason": reply.finish_reason}
    usage = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens}
    return _json(
        {
            "id": "chatcmpl-scripted",
            "object": "chat.completion",
            "model": MODEL,
            "choices": [choice],
            "usage": usage,
        }
    )


def _json(
    value: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    return web.Response(
        body=to_json(value), status=status, content_type="application/json", headers=headers
    )
