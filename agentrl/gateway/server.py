"""The gateway's server: the endpoints of the protocols, for the programs of all open episodes.

    POST /v1/chat/completions   OpenAI's chat completions
    POST /v1/responses          OpenAI's responses
    POST /v1/messages           Anthropic's messages; at /count_tokens, how long a prompt they are
    POST /v1beta/models/MODEL:generateContent, :streamGenerateContent, :countTokens
                                Google's generateContent
    GET  /v1/models, /v1beta/models
                                one model: the policy, by whatever name
    POST /v1/rewards            a reward of the episode, or of one of its calls
    POST /v1/tasks              a task for an agent elsewhere
    POST /v1/failures           that an agent elsewhere has failed

It runs on the event loop of the run, because that is where the policy is. Each request carries the
key of its episode, as `Authorization: Bearer`, `x-api-key` or `x-goog-api-key`, or as `?key=`.
"""

import asyncio
import hmac
import re
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from agentrl.errors import ConfigError
from agentrl.flow import Flow
from agentrl.gateway.anthropic_messages import COUNTED, MESSAGES
from agentrl.gateway.call import AgentCall
from agentrl.gateway.config import GatewayConfig
from agentrl.gateway.google_content import GENERATE
from agentrl.gateway.openai_chat import CHAT
from agentrl.gateway.openai_responses import RESPONSES
from agentrl.gateway.outcome import AgentOutcome
from agentrl.gateway.refusal import CallRefusedError
from agentrl.gateway.remote_agents import RemoteAgents
from agentrl.gateway.session import AgentSession
from agentrl.gateway.session_registry import SessionRegistry
from agentrl.gateway.wire import WireProtocol, WireRequest, invalid
from agentrl.net.credentials import secret_in
from agentrl.package.distribution import install_command
from agentrl.remote.gate import RequestGate, idle_timeout
from agentrl.remote.http_server import check_reach, url_of

_NOTHING: Mapping[str, Any] = MappingProxyType({})
STATUSES = {
    400: (
        "The request is wrong, wants what is not supported, or exceeds the context or the calls of"
        " its episode"
    ),
    401: "The key belongs to no open episode",
    403: "The request comes from a web page of another site",
    404: "There is no such path or call",
    405: "The path has other methods",
    408: "The body did not come in time",
    409: "The request id came with other content before",
    413: "The body is too long",
    429: "Too many calls of the episode are under way; try again",
    503: "The engine did not answer; try again",
    504: "The engine did not answer in time",
}
"""The meaning of each status."""


class PostedReward(BaseModel):
    """The body of `POST /v1/rewards`. With `call`, the id of an answer, it is the reward of that
    call's turn.

    An agent elsewhere whose run has rewards of its own may send `done` alone.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    reward: float | None = Field(None, allow_inf_nan=False)
    call: str | None = None
    success: bool | None = None
    done: bool = False
    """True if the episode is over. Only agents elsewhere say so; of others, the end of the program
    does.
    """


class PostedFailure(BaseModel):
    """The body of `POST /v1/failures`: an agent elsewhere has failed, for this reason."""

    model_config = ConfigDict(extra="forbid", strict=True)

    error: str = Field("", max_length=10_000)


class ModelEntry(BaseModel):
    """The policy, as OpenAI's clients list models."""

    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = "agentrl"
    max_model_len: int


class ModelList(BaseModel):
    """The answer of `GET /v1/models`."""

    object: str = "list"
    data: list[ModelEntry]


class GoogleModelEntry(BaseModel):
    """The policy, as Google's clients list models."""

    name: str
    version: str = "1"
    displayName: str
    inputTokenLimit: int
    outputTokenLimit: int
    supportedGenerationMethods: list[str] = ["generateContent", "countTokens"]

    @classmethod
    def of(cls, session: AgentSession, name: str) -> "GoogleModelEntry":
        """The policy by a name."""
        most = session.max_context
        return cls(
            name=f"models/{name}", displayName=name, inputTokenLimit=most, outputTokenLimit=most
        )


class GoogleModelList(BaseModel):
    """The answer of `GET /v1beta/models`."""

    models: list[GoogleModelEntry]

    @classmethod
    def of(cls, session: AgentSession) -> "GoogleModelList":
        """The policy alone."""
        return cls(models=[GoogleModelEntry.of(session, session.model)])


@dataclass(frozen=True, slots=True)
class CallEndpoint:
    """The ASGI application of a protocol's calls.

    If the connection breaks before an answer is there, the call goes on without it. The answers
    count as delivered when all but the end of the last message has been sent, and the client is
    still there.
    """

    registry: SessionRegistry
    protocol: WireProtocol

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or raise the refusal."""
        headers = {  # of several with one name the first counts, as at the other paths
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in reversed(scope["headers"])
        }
        session = self.registry.session(_key(headers) or _key_in_query(scope))
        asked = await _read(self.protocol, receive, session, _fields_in_path(scope))
        asked = asked.with_headers(headers)
        transport = scope.get("state", {}).get("transport")  # of `idle_timeout`

        def is_there() -> bool:
            """True while the client is connected; without a transport, nobody can tell."""
            return transport is None or not transport.is_closing()

        async with session.asking(asked.request, is_there) as call:
            await self._send(session, asked, call, send, is_there)

    async def _send(
        self,
        session: AgentSession,
        asked: WireRequest,
        call: AgentCall,
        send: Send,
        is_there: Callable[[], bool],
    ) -> None:
        if asked.streams:
            parts = [*asked.parts(session, call)]
            headers = [
                (b"content-type", asked.stream_type.encode()),
                (b"cache-control", b"no-store"),
            ]
        else:
            parts = [asked.whole(session, call)]
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(parts[0])).encode()),
            ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in parts[:-1]:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)  # a broken connection is noticed here
        # The last part is sent only after this check: a client that has gone before it has no whole
        # answer, asks again, and must not find the call delivered.
        await asyncio.sleep(0)
        call.delivered |= is_there()
        await send({"type": "http.response.body", "body": parts[-1], "more_body": False})


class GatewayServer(uvicorn.Server):
    """Uvicorn, which leaves the signals to the run."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Capture none."""
        return nullcontext()

    @asynccontextmanager
    async def accepting(self, listener: socket.socket) -> AsyncIterator[None]:
        """Inside the block, requests on a further socket are answered too."""

        def connected() -> asyncio.Protocol:
            return self.config.http_protocol_class(  # type: ignore[call-arg]
                config=self.config, server_state=self.server_state, app_state={}
            )

        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        create = (
            loop.create_unix_server if listener.family == socket.AF_UNIX else loop.create_server
        )
        server = await create(connected, sock=listener)
        try:
            yield
        finally:
            server.close()


def check_packages() -> None:
    """Refuse to serve without the packages whose types the gateway answers with.

    Raises:
        ConfigError: one is not installed.
    """
    if missing := [name for name in ("openai", "anthropic") if find_spec(name) is None]:
        raise ConfigError(
            f"the gateway needs {' and '.join(missing)}, not installed here: "
            f"{install_command('gateway')}"
        )


@asynccontextmanager
async def serving(
    registry: SessionRegistry, agents: RemoteAgents | None = None
) -> AsyncIterator[None]:
    """Inside the block, the programs of a registry's episodes can call, and it knows its address.

    `agents`: those elsewhere, if tasks are for them.

    Raises:
        ConfigError: it cannot listen there, or the packages of the protocols are missing.
    """
    check_packages()
    config = registry.config
    app = create_app(registry, agents, _token(config, agents))
    listener = _listener(config)
    registry.url = config.url or url_of(listener)
    server = GatewayServer(
        uvicorn.Config(
            app,
            http=idle_timeout(config.request_seconds),
            ws="none",
            lifespan="off",
            proxy_headers=False,
            access_log=False,
            log_level="error",
            timeout_graceful_shutdown=1,
        )
    )
    server.config.load()
    registry.accepting = server.accepting
    async with Flow("gateway") as flow:
        task = flow.start(server.serve(sockets=[listener]), name="server")
        try:
            yield
        finally:
            server.should_exit = True
            await asyncio.wait({task})  # it closes its connections; at most a second
            listener.close()


def _listener(config: GatewayConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # Only where the protocol is named does asyncio send at once what it is given. Else the second
    # packet of an answer waits until the client has confirmed the first, often for 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"the gateway cannot listen on {config.host}:{config.port}: {error}. Set gateway.host"
            " and gateway.port (0: any free one)"
        ) from error
    return listener


def _token(config: GatewayConfig, agents: RemoteAgents | None) -> str:
    """The token of agents elsewhere; empty if every program on this machine may take tasks.

    Raises:
        ConfigError: it is needed, and there is none.
    """
    token = secret_in(config.token_env) if config.token_env else ""
    if config.token_env and not token:
        raise ConfigError(
            f"gateway.token_env: the environment variable {config.token_env} is not set"
        )
    if agents is not None:
        check_reach(
            "gateway.host",
            config.host,
            token,
            "name an environment variable with a token in gateway.token_env, so that they cannot"
            " take tasks",
        )
    return token


def create_app(
    registry: SessionRegistry, agents: RemoteAgents | None = None, token: str = ""
) -> FastAPI:
    """The ASGI application. Agents elsewhere show `token` to get tasks."""
    statuses: dict[int | str, dict[str, Any]] = {
        status: {"description": meaning} for status, meaning in STATUSES.items()
    }
    app = FastAPI(title="agentrl gateway", responses=statuses, docs_url=None, redoc_url=None)
    _add_calls(app, registry)

    # Before the models: `/v1/models/{model}` would match `NAME:generateContent` too.
    _add_google(app, registry)
    _add_models(app, registry)

    @app.post("/v1/rewards", openapi_extra={"requestBody": _request_body(PostedReward)})
    async def rewards(request: Request) -> dict[str, str]:
        session = registry.open_session(_key(request.headers))
        posted = await _read_post(PostedReward, request)
        if posted.reward is None and (posted.call is not None or not posted.done):
            raise invalid("reward: Field required")
        if posted.call is not None:
            session.call_earned(posted.call, posted.reward or 0.0)
        elif posted.reward is not None or posted.success is not None:
            session.earned(AgentOutcome(posted.reward, posted.success))
        if posted.done:
            session.done.set()
        return {}

    @app.post("/v1/failures", openapi_extra={"requestBody": _request_body(PostedFailure)})
    async def failures(request: Request) -> dict[str, str]:
        session = registry.open_session(_key(request.headers))
        posted = await _read_post(PostedFailure, request)
        session.failure = posted.error or "it did not say why"
        session.done.set()
        return {}

    if agents is not None:
        _add_tasks(app, agents, token)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "healthy", "episodes": len(registry)}

    _add_refusals(app)
    limits = registry.config
    app.add_middleware(
        RequestGate,
        token=None,
        max_body_bytes=limits.max_body_bytes,
        request_seconds=limits.request_seconds,
        any_host=True,
        said=lambda path, status, detail: _refusal(
            path, status, _CODES.get(status, "invalid_request"), detail
        ),
    )
    return app


_Posted = TypeVar("_Posted", bound=BaseModel)


async def _read_post(kind: type[_Posted], request: Request) -> _Posted:
    """The body of a request, read as JSON whatever its content type says: curl names a form by
    default.
    """
    body = await request.body()
    if (
        len(body) > _LONG_BYTES
    ):  # each field that there is not is a finding, which costs microseconds
        raise CallRefusedError(
            413,
            "request_too_large",
            f"the body is longer than {_LONG_BYTES} bytes: it has few fields",
        )
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        wrong = (
            f"{'.'.join(map(str, one['loc'])) or 'the body'}: {one['msg']}"
            for one in error.errors()[:_MAX_FAULTS]
        )
        raise invalid("; ".join(wrong)) from None


_MAX_FAULTS = 3
"""The number of faults of a body that a refusal lists."""


def _request_body(kind: type[BaseModel]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": kind.model_json_schema()}}, "required": True}


def _add_tasks(app: FastAPI, agents: RemoteAgents, token: str) -> None:
    @app.post(
        "/v1/tasks",
        responses={204: {"description": "No task waits for an agent now; ask again later"}},
    )
    async def tasks(request: Request) -> Response:
        if token and not hmac.compare_digest(_key(request.headers).encode(), token.encode()):
            raise CallRefusedError(
                401, "invalid_token", "the token of agents is missing or wrong (gateway.token_env)"
            )
        taken = agents.take()
        if taken is None:
            return Response(status_code=204)
        task = {
            "env": taken.task.env,
            "seed": taken.task.seed,
            "options": dict(taken.task.options),
            "id": taken.task.id,
        }
        return JSONResponse(
            {
                "task": task,
                "base_url": taken.base_url,
                "anthropic_base_url": taken.url,
                "api_key": taken.api_key,
                "lease_seconds": agents.registry.config.lease_seconds,
            }
        )


def _add_calls(app: FastAPI, registry: SessionRegistry) -> None:
    async def answer() -> None:
        """For the OpenAPI description only. `CallEndpoint` replaces it below, because FastAPI's own
        handling of a request costs as much as a call.
        """

    for protocol in (CHAT, RESPONSES, MESSAGES):
        app.add_api_route(
            protocol.path,
            answer,
            methods=["POST"],
            operation_id=protocol.path.removeprefix("/v1/").replace("/", "_"),
            responses={
                200: {"description": "The answer; with `stream`, its parts", "content": _ANSWERS}
            },
            openapi_extra={"requestBody": _describe_body(protocol)},
        )
        described = app.router.routes[-1]
        assert isinstance(described, Route)
        described.app = CallEndpoint(registry, protocol)

    @app.post(COUNTED.path, openapi_extra={"requestBody": _describe_body(COUNTED)})
    async def count_tokens(request: Request) -> dict[str, int]:
        session = registry.session(_key(request.headers))
        asked = await _read(COUNTED, request.receive, session)
        return {"input_tokens": session.prompt_length(asked.request)}


def _add_models(app: FastAPI, registry: SessionRegistry) -> None:
    @app.get("/v1/models")
    async def models(request: Request) -> ModelList | GoogleModelList:
        session = registry.session(_key(request.headers))
        if _GOOGLE_KEY in request.headers:
            return GoogleModelList.of(session)
        return ModelList(data=[ModelEntry(id=session.model, max_model_len=session.max_context)])

    @app.get("/v1/models/{model}")
    async def one_model(model: str, request: Request) -> ModelEntry | GoogleModelEntry:
        session = registry.session(_key(request.headers))
        if _GOOGLE_KEY in request.headers:
            return GoogleModelEntry.of(session, model)
        return ModelEntry(id=model, max_model_len=session.max_context)


def _add_google(app: FastAPI, registry: SessionRegistry) -> None:
    """Google's protocol, whose paths say which model is asked, and whether for a stream."""

    async def answer(model: str) -> None:
        """Described here and answered by `CallEndpoint`."""

    def session_of(request: Request) -> AgentSession:
        return registry.session(_key(request.headers) or _key_in_query(request.scope))

    described = {"requestBody": _describe_body(GENERATE)}
    for version in ("v1beta", "v1alpha", "v1"):
        models = f"/{version}/models"
        for method, content in (("generateContent", _ANSWERS), ("streamGenerateContent", _PARTS)):
            app.add_api_route(
                f"{models}/{{model}}:{method}",
                answer,
                methods=["POST"],
                operation_id=f"{method}_{version}",
                responses={200: {"description": "The answer, or its parts", "content": content}},
                openapi_extra=described,
            )
            route = app.router.routes[-1]
            assert isinstance(route, Route)
            route.app = CallEndpoint(registry, GENERATE)

        @app.post(
            f"{models}/{{model}}:countTokens",
            operation_id=f"countTokens_{version}",
            openapi_extra=described,
        )
        async def count(model: str, request: Request) -> dict[str, int]:
            session = session_of(request)
            asked = await _read(GENERATE, request.receive, session, {"model": model})
            return {"totalTokens": session.prompt_length(asked.request)}

        if version == "v1":
            continue  # OpenAI's clients list models there (`_add_models`)

        @app.get(models, operation_id=f"models_{version}")
        async def listed(request: Request) -> GoogleModelList:
            return GoogleModelList.of(session_of(request))

        @app.get(f"{models}/{{model}}", operation_id=f"model_{version}")
        async def one(model: str, request: Request) -> GoogleModelEntry:
            return GoogleModelEntry.of(session_of(request), model)


def _fields_in_path(scope: Scope) -> Mapping[str, Any]:
    """The fields of a Google request that its path and query carry."""
    model = scope.get("path_params", {}).get("model")
    if model is None:
        return {}
    said = {"model": model, "stream": scope["path"].endswith(":streamGenerateContent")}
    return said | ({"alt": "sse"} if _query(scope).get("alt") == "sse" else {})


def _key_in_query(scope: Scope) -> str:
    """The key in the query, where some of Google's clients write it."""
    return _query(scope).get("key", "") if _GOOGLE_PATHS.match(scope["path"]) else ""


def _query(scope: Scope) -> Mapping[str, str]:
    return dict(parse_qsl(scope["query_string"].decode("latin-1")))


async def _read(
    protocol: WireProtocol,
    receive: Receive,
    session: AgentSession,
    by_path: Mapping[str, Any] = _NOTHING,
) -> WireRequest:
    raw = (await receive()).get("body", b"")  # whole, by `RequestGate`
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(f"the body is not JSON, or has half of a surrogate pair: {error}") from None
    if not protocol.loaded:
        await asyncio.to_thread(protocol.load)
    body = {**body, **by_path} if isinstance(body, dict) else body
    if len(raw) > _LONG_BYTES:  # pictures are decoded
        return await asyncio.to_thread(protocol.read, body, session)
    return protocol.read(body, session)


_LONG_BYTES = 64 << 10
"""Bytes. Longer calls are read in a thread, so that the event loop stays free; longer rewards and
failures are refused."""


_ANSWERS: dict[str, Any] = {
    "application/json": {"schema": {"type": "object"}},
    "text/event-stream": {"schema": {"type": "string"}},
}
_PARTS: dict[str, Any] = {
    **_ANSWERS,
    "application/json": {"schema": {"type": "array", "items": {"type": "object"}}},
}
"""Google's streams: one JSON list, unless the client asks for events (`?alt=sse`)."""


def _describe_body(protocol: WireProtocol) -> dict[str, Any]:
    """A request's body for OpenAPI: which fields there are. What is in them, the vendor's own type
    says.
    """
    fields = protocol.fields
    schema = {
        "type": "object",
        "required": list(protocol.required),
        "properties": (
            {name: {} for name in fields.supported}
            | {name: {"description": "Ignored"} for name in fields.ignored}
        ),
        "description": (
            f"As {protocol.type_name.replace(':', '.')}. Other fields are refused unless they are"
            " null."
        ),
    }
    return {"content": {"application/json": {"schema": schema}}, "required": True}


def _key(headers: Mapping[str, str]) -> str:
    """The API key of a request. Some clients send two of these headers, one of them empty."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    bearer = key.strip() if scheme.lower() == "bearer" else ""
    return headers.get(_GOOGLE_KEY) or bearer or headers.get("x-api-key", "")


def _add_refusals(app: FastAPI) -> None:
    """Answer all errors in the form of the request's protocol."""

    def say(
        request: Request,
        status: int,
        code: str,
        detail: str,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        spoken = _GOOGLE_PATH if _GOOGLE_KEY in request.headers else request.url.path
        return JSONResponse(_refusal(spoken, status, code, detail), status, headers)

    @app.exception_handler(CallRefusedError)
    async def refuse(request: Request, refusal: CallRefusedError) -> Response:
        wait = refusal.retry_after
        headers = {"x-should-retry": "false"} if wait is None else {"Retry-After": f"{wait:.0f}"}
        return say(request, refusal.status, refusal.code, refusal.detail, headers)

    @app.exception_handler(RequestValidationError)
    async def refuse_shape(request: Request, error: RequestValidationError) -> Response:
        wrong = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        return say(request, 400, "invalid_request", "; ".join(wrong))

    @app.exception_handler(HTTPException)
    async def refuse_otherwise(request: Request, error: HTTPException) -> Response:
        path, status, detail = request.url.path, error.status_code, error.detail
        if status == 404 or (request.method == "POST" and _MODEL_METHOD.match(path)):
            status = 404  # Google puts the method into the path, so an unknown one is no 405
            detail = f"there is no {request.method} {path:.200}. {_KNOWN_PATHS}"
        return say(request, status, "invalid_request", detail, error.headers)

    @app.exception_handler(Exception)
    async def admit(request: Request, error: Exception) -> Response:
        return say(request, 500, "internal_error", "the gateway failed; its log says why")


def _refusal(path: str, status: int, code: str, detail: str) -> Mapping[str, Any]:
    """The body of a refusal, in the form of the protocol that is spoken at a path."""
    if _GOOGLE_PATHS.match(path):
        return {
            "error": {
                "code": status,
                "message": detail,
                "status": _GOOGLE_STATUSES.get(status, "INVALID_ARGUMENT"),
            }
        }
    kind = _ERROR_TYPES.get(status, "invalid_request_error")
    if path.startswith("/v1/messages"):
        return {"type": "error", "error": {"type": kind, "message": detail}}
    return {"error": {"message": detail, "type": kind, "param": None, "code": code}}


_CODES = {403: "forbidden", 408: "request_timeout", 413: "request_too_large"}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Error types by status: Anthropic's names, which OpenAI's form carries too."""
_GOOGLE_STATUSES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
"""Google's names of error statuses."""
_GOOGLE_PATHS = re.compile(r"/v1(?:alpha|beta)\d*/|/v1/(?:models|publishers)/.+:[a-zA-Z]+$")
"""Paths of Google's protocol. Refusals have its form there."""
_MODEL_METHOD = re.compile(r"/v1(?:alpha|beta)?/models/[^/]+:[a-zA-Z]+$")
"""Model paths with a method of Google's. Known ones are routed, so here the method is unknown."""
_GOOGLE_PATH, _GOOGLE_KEY = "/v1beta/", "x-goog-api-key"
_KNOWN_PATHS = f"Calls go to {CHAT.path}, {RESPONSES.path}, {MESSAGES.path} and {GENERATE.path}"
