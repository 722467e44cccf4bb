"""`agentrl serve`: environments behind HTTP and a WebSocket. What is said there stands in `protocol.py`."""

import contextlib
import hmac
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response, WebSocket
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentrl.errors import ConfigError
from agentrl.flow import Flow, now
from agentrl.protocols import Env
from agentrl.remote.multiplex import Multiplexed
from agentrl.remote.openenv_server import add_openenv
from agentrl.remote.protocol import SOCKET_PATH, Began, Opened, Refusal, Reset, Step, Stepped
from agentrl.remote.sessions import Limits, Sessions
from agentrl.rollout.env_host import Deadlines, EnvHost, Isolation

logger = logging.getLogger(__name__)

OPEN_TO_ALL = ("/health", "/metrics", "/openapi.json", "/docs")
"""Paths that need no token."""


class EnvServer(uvicorn.Server):
    """Serves the environment that `factory` makes.

    SIGTERM and SIGINT drain it: no session and no episode begins any more, and it ends when the running episodes have,
    or after `limits.drain_seconds`. A second signal ends it at once. `on_start` is told the address.

    Raises:
        ConfigError: others than this machine could reach it, and there is no token.
    """

    def __init__(
        self,
        factory: Callable[[], Env],
        *,
        name: str = "env",
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        limits: Limits | None = None,
        isolation: Isolation | None = None,
        on_start: Callable[[str], None] = lambda url: None,
    ) -> None:
        if not token and host not in ("127.0.0.1", "::1", "localhost"):
            raise ConfigError(
                f"host {host} can be reached by others: give a token (set the variable that --token-env names), or "
                "listen on 127.0.0.1"
            )
        self.limits = limits or Limits()
        seconds = self.limits.call_seconds
        deadlines = Deadlines(reset=seconds, step=seconds, tool=seconds, stall=seconds + 1200)
        self.sessions = Sessions(EnvHost({name: factory}, deadlines, isolation), name, self.limits)
        self._drain_until: float | None = None
        self._on_start = on_start
        super().__init__(
            uvicorn.Config(
                create_app(self.sessions, name, token),
                host=host,
                port=port,
                ws="websockets-sansio",
                ws_max_size=self.limits.max_body_bytes,
                ws_ping_interval=60,  # finds the sockets of machines that vanished
                ws_ping_timeout=600,  # a trainer may hold its loop for long
                ws_per_message_deflate=False,
                access_log=False,  # it would write down sessions' ids
                log_level="warning",
                timeout_graceful_shutdown=5,
            )
        )

    @property
    def url(self) -> str:
        """Where it listens, once it has started."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say where."""
        await super().startup(sockets)
        if self.servers:
            self._on_start(self.url)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, end at the second."""
        if self.sessions.draining or self.limits.drain_seconds == 0:
            self.should_exit = True
        self.sessions.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to end."""
        if self.sessions.draining:
            if self._drain_until is None:
                self._drain_until = now() + self.limits.drain_seconds
            if not self.sessions.busy or now() >= self._drain_until:
                self.should_exit = True
        return await super().on_tick(counter)


def create_app(sessions: Sessions, name: str, token: str | None) -> FastAPI:
    """The ASGI application."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with Flow("serve") as flow:
            app.state.flow = flow
            flow.start(sessions.sweep(), name="sweep")
            yield
            flow.cancel()
        await sessions.end_all()

    app = FastAPI(title=f"agentrl environment {name}", lifespan=lifespan)
    _add_routes(app, sessions, name)
    add_openenv(app, sessions, name)

    @app.exception_handler(Refusal)
    async def refuse(request: Request, refusal: Refusal) -> JSONResponse:
        sessions.metrics.refused.labels(refusal.status).inc()
        wait = refusal.retry_after
        headers = None if wait is None else {"Retry-After": f"{wait:.0f}" if wait >= 1 else "1"}
        return JSONResponse({"detail": refusal.detail}, refusal.status, headers)

    @app.websocket(SOCKET_PATH)
    async def multiplexed(client: WebSocket) -> None:
        await Multiplexed(client, sessions, app.state.flow).serve()

    app.add_middleware(_Gate, token=token, max_body_bytes=sessions.limits.max_body_bytes)
    return app


def _add_routes(app: FastAPI, sessions: Sessions, name: str) -> None:
    @app.post("/sessions")
    async def open_session() -> Opened:
        return await sessions.open()

    @app.post("/sessions/{session}/reset")
    async def reset(session: str, request: Reset) -> Began:
        return await sessions.reset(session, request)

    @app.post("/sessions/{session}/step")
    async def step(session: str, request: Step) -> Stepped:
        return await sessions.step(session, request)

    @app.delete("/sessions/{session}")
    async def close(session: str) -> dict[str, str]:
        await sessions.close(session)
        return {}

    @app.get("/health")
    async def health(response: Response) -> dict[str, Any]:
        response.status_code = 503 if sessions.draining else 200
        state = "draining" if sessions.draining else "healthy"
        return {"status": state, "env": name, "sessions": len(sessions), "max_sessions": sessions.limits.max_sessions}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(sessions.metrics.registry), media_type=CONTENT_TYPE_LATEST)


class _Gate:
    """Lets in who has the token, and what is short enough."""

    def __init__(self, app: ASGIApp, token: str | None, max_body_bytes: int) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode() if token else None
        self._max = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self._expected is not None and scope["path"] not in OPEN_TO_ALL:
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                await self._refuse(scope, receive, send, 401, "the bearer token is missing or wrong")
                return
        if scope["type"] == "http":
            body = await self._read(headers, receive)
            if body is None:
                await self._refuse(scope, receive, send, 413, f"the body is longer than {self._max} bytes")
                return
            receive = _again(body, receive)
        await self._app(scope, receive, send)

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """The whole body, or none where it is too long.

        The rest of a long one is read and forgotten, up to a bound: a client that still writes when the connection
        closes may never see why.
        """
        stated = headers.get(b"content-length", b"0")
        far_too_long = 16 * self._max
        if not stated.isdigit() or int(stated) > far_too_long:
            return None
        body, length = bytearray(), 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            length += len(message.get("body", b""))
            if length <= self._max:
                body += message.get("body", b"")
            if length > far_too_long or not message.get("more_body"):
                return bytes(body) if length <= self._max else None

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, status: int, detail: str) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})  # before it was accepted: the answer is 403
            return
        await JSONResponse({"detail": detail}, status, {"Connection": "close"})(scope, receive, send)


def _again(body: bytes, receive: Receive) -> Callable[[], Awaitable[Message]]:
    """A `receive` that gives the body that was read, and then what comes."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay
