"""`agentrl serve`: environments behind HTTP and a WebSocket. `protocol.py` defines the messages."""

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response, WebSocket
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from agentrl.cluster.worker_registry import WorkerCount
from agentrl.flow import Flow, now
from agentrl.hosting.client_options import SAFE_OPTIONS, ClientOptions, for_clients
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.pool import EnvPool
from agentrl.hosting.process_env import ProcessEnv
from agentrl.protocols.env import Env, Isolation
from agentrl.remote.gate import RequestGate, idle_timeout
from agentrl.remote.http_server import HttpServer, check_reach
from agentrl.remote.multiplex import Multiplexed
from agentrl.remote.protocol import (
    SOCKET_PATH,
    STATUSES,
    Began,
    Opened,
    ProblemDetail,
    Refusal,
    Reset,
    Restored,
    RestoreState,
    Saved,
    SaveState,
    Step,
    Stepped,
)
from agentrl.remote.sessions import ServerLimits, Sessions

logger = logging.getLogger(__name__)

AddRoutes = Callable[[FastAPI, Sessions, str], None]
"""Adds the routes of another protocol to an application, for these sessions and the environment of
this name.
"""


class EnvServer(HttpServer):
    """Serves the environment that `factory` makes.

    A stop signal (SIGTERM, SIGINT, SIGHUP, SIGUSR1) drains the server: no session or episode begins
    any more, and the server ends when the running episodes have ended, or after
    `limits.drain_seconds`. A second signal ends it immediately. `on_start` is called with the
    address. `protocols` are served beside the server's own, for example
    `agentrl.remote.openenv.server.add_openenv`. `options` says which options clients may choose;
    None: all, because the clients may run code here anyway. `pictures`: environments that draw
    their states (`render_html`) send the pictures in their infos. `processes` counts the processes
    that the environments of `factory` are spread over, if they are. `in_processes`: whether each
    session has a process of its own; by default, if `factory` makes a `ProcessEnv`.

    Raises:
        ConfigError: other machines could reach the server, and there is no token.
    """

    def __init__(
        self,
        factory: Callable[[], Env],
        *,
        name: str = "env",
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        limits: ServerLimits | None = None,
        isolation: Isolation | None = None,
        on_start: Callable[[str], None] = lambda url: None,
        protocols: Sequence[AddRoutes] = (),
        options: ClientOptions.Config | None = SAFE_OPTIONS,
        pictures: bool = False,
        processes: Callable[[], WorkerCount] | None = None,
        in_processes: bool | None = None,
    ) -> None:
        check_reach("host", host, token, "give a token (set the variable that --token-env names)")
        self.limits = limits or ServerLimits()
        seconds = self.limits.call_seconds
        deadlines = EnvDeadlines(reset=seconds, step=seconds, tool=seconds)
        if in_processes is None:
            in_processes = makes_processes(factory)
        if options is not None:
            factory = for_clients(factory, options)
        host_of_envs = EnvPool({name: factory}, deadlines, isolation, pictures=pictures)
        self.sessions = Sessions(
            host_of_envs, name, self.limits, in_processes=in_processes, processes=processes
        )
        self._drain_until: float | None = None
        super().__init__(
            uvicorn.Config(
                create_app(self.sessions, name, token, protocols),
                host=host,
                port=port,
                http=idle_timeout(self.limits.request_seconds),
                ws="websockets-sansio",
                ws_max_size=self.limits.max_body_bytes,
                ws_ping_interval=60,  # detects sockets of machines that vanished
                ws_ping_timeout=600,  # a trainer may block its event loop for a long time
                ws_per_message_deflate=False,
                access_log=False,  # it would contain session ids
                log_level="warning",
                timeout_graceful_shutdown=5,
            ),
            on_start,
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, end at the second."""
        if self.sessions.draining or self.limits.drain_seconds == 0:
            self.should_exit = True
        self.sessions.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; returns whether to end."""
        if self.sessions.draining:
            if self._drain_until is None:
                self._drain_until = now() + self.limits.drain_seconds
            if not self.sessions.busy or now() >= self._drain_until:
                self.should_exit = True
        return await super().on_tick(counter)


def makes_processes(factory: Callable[[], Env]) -> bool:
    """True if each environment that it makes has a process of its own."""
    return (factory.func if isinstance(factory, partial) else factory) is ProcessEnv


def create_app(
    sessions: Sessions, name: str, token: str | None, protocols: Sequence[AddRoutes] = ()
) -> FastAPI:
    """The ASGI application."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with Flow("serve") as flow:
            app.state.flow = flow
            flow.start(sessions.sweep(), name="sweep")
            yield
            flow.cancel()
        await sessions.end_all()

    app = FastAPI(
        title=f"agentrl environment {name}", lifespan=lifespan, responses=_refusal_responses(422)
    )
    _add_routes(app, sessions, name)
    for add_routes in protocols:
        add_routes(app, sessions, name)
    _add_refusals(app, sessions)

    @app.websocket(SOCKET_PATH)
    async def multiplexed(client: WebSocket) -> None:
        await Multiplexed(client, sessions, app.state.flow).serve()

    limits = sessions.limits
    app.add_middleware(
        RequestGate,
        token=token,
        max_body_bytes=limits.max_body_bytes,
        request_seconds=limits.request_seconds,
    )
    return app


_MAX_FAULTS = 10
"""The number of faults that a refusal lists: a body may be wrong in all its parts."""

_CALL_STATUSES = (404, 409, 410, 422, 500, 502, 504)
"""Statuses that any call of a session may have."""


def _add_routes(app: FastAPI, sessions: Sessions, name: str) -> None:
    links = {
        operation: {"operationId": operation, "parameters": {"session": "$response.body#/session"}}
        for operation in ("reset_session", "step_session", "close_session")
    }

    @app.post(
        "/sessions", responses={200: {"links": links}, **_refusal_responses(429, 500, 503, 504)}
    )
    async def open_session() -> Opened:
        return await sessions.open()

    @app.post(
        "/sessions/{session}/reset",
        operation_id="reset_session",
        responses=_refusal_responses(*_CALL_STATUSES, 424, 503),
    )
    async def reset(session: str, request: Reset) -> Began:
        return await sessions.reset(session, request)

    @app.post(
        "/sessions/{session}/step",
        operation_id="step_session",
        responses=_refusal_responses(*_CALL_STATUSES),
    )
    async def step(session: str, request: Step) -> Stepped:
        return await sessions.step(session, request)

    @app.post(
        "/sessions/{session}/snapshot",
        operation_id="snapshot_session",
        responses=_refusal_responses(*_CALL_STATUSES),
    )
    async def snapshot(session: str, request: SaveState) -> Saved:
        return await sessions.snapshot(session, request)

    @app.post(
        "/sessions/{session}/restore",
        operation_id="restore_session",
        responses=_refusal_responses(*_CALL_STATUSES, 503),
    )
    async def restore(session: str, request: RestoreState) -> Restored:
        return await sessions.restore(session, request)

    @app.delete(
        "/sessions/{session}", operation_id="close_session", responses=_refusal_responses(404, 422)
    )
    async def close(session: str) -> dict[str, str]:
        await sessions.close(session)
        return {}

    @app.get("/health", responses={503: {"description": "The same, while no session can begin"}})
    async def health(response: Response) -> dict[str, Any]:
        response.status_code = 200 if sessions.serving else 503
        begins = "healthy" if sessions.serving else "starting"
        answer = {
            "status": "draining" if sessions.draining else begins,
            "env": name,
            "sessions": len(sessions),
            "max_sessions": sessions.limits.max_sessions,
        }
        if sessions.processes is not None:
            counted = sessions.processes()
            answer["processes"] = {
                "serving": counted.alive,
                "count": counted.count,
                "restarts": counted.restarts,
            }
        return answer

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(generate_latest(sessions.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _add_refusals(app: FastAPI, sessions: Sessions) -> None:
    """Answer all errors as {"detail": text}, and count them."""

    def say(status: int, detail: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
        sessions.metrics.refused.labels(status).inc()
        return JSONResponse({"detail": detail}, status, headers)

    @app.exception_handler(Refusal)
    async def refuse(request: Request, refusal: Refusal) -> JSONResponse:
        wait = refusal.retry_after
        headers = None if wait is None else {"Retry-After": f"{wait:.0f}" if wait >= 1 else "1"}
        return say(refusal.status, refusal.detail, headers)

    @app.exception_handler(RequestValidationError)
    async def refuse_shape(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[:_MAX_FAULTS]
        return say(
            422, "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in first)
        )

    @app.exception_handler(HTTPException)
    async def refuse_otherwise(request: Request, error: HTTPException) -> JSONResponse:
        # FastAPI answers 400 to a body that is not text, and 422 to all other bodies that are not
        # JSON.
        return say(
            422 if error.status_code == 400 else error.status_code, error.detail, error.headers
        )


def _refusal_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI descriptions of these statuses, and of those that any request may get."""
    return {
        status: {"model": ProblemDetail, "description": STATUSES[status]}
        for status in (*statuses, 401, 408, 413)
    }
