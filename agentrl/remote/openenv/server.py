"""The routes of `agentrl serve` for unmodified OpenEnv clients (`protocol.py` defines the
messages).

An action is the model's whole message: `{"message": text}`. An environment with tools can also list
them (`list_tools`) and take one call at a time (`call_tool`). Sessions, limits and the token are
those of the server.
"""

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from fastapi import FastAPI, Request, Response, WebSocket
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json, to_json

from agentrl.package.distribution import installed_version
from agentrl.remote.openenv.adapter import OpenEnvSession, OpenEnvSessions
from agentrl.remote.openenv.protocol import (
    CAPACITY_REACHED,
    EXECUTION_ERROR,
    FULL,
    INVALID_JSON,
    SESSION_ERROR,
    TOOL_OBSERVATION,
    UNKNOWN_TYPE,
    VALIDATION_ERROR,
    Action,
    Answer,
    CallToolAction,
    ListToolsAction,
    MessageAction,
    MessageObservation,
    Metadata,
    ResetRequest,
    Schemas,
    State,
    StepRequest,
)
from agentrl.remote.openenv.rpc import answer_rpc
from agentrl.remote.protocol import STATUSES, ProblemDetail, Refusal
from agentrl.remote.served_socket import ServedSocket
from agentrl.remote.sessions import Sessions

_AnswerTo = Callable[
    [str | bytes, OpenEnvSessions, OpenEnvSession], Awaitable[dict[str, Any] | None]
]
_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ProblemDetail, "description": STATUSES[status]}
    for status in (409, 422, 424, 429, 500, 503, 504)
}


def add_openenv(app: FastAPI, sessions: Sessions, name: str) -> None:
    """Add OpenEnv's routes to a server of the environment `name`."""
    openenv_sessions = OpenEnvSessions(sessions)

    @app.websocket("/ws")
    async def play(client: WebSocket) -> None:
        await client.accept()
        await _serve(client, openenv_sessions, _answer)

    @app.websocket("/mcp")
    async def speak_rpc(client: WebSocket) -> None:
        await client.accept()
        await _serve(client, openenv_sessions, answer_rpc)

    @app.post("/mcp")
    async def mcp(request: Request) -> Response:
        return _json(await answer_rpc(await request.body(), openenv_sessions, None))

    _add_stateless(app, openenv_sessions)
    _add_descriptions(app, openenv_sessions, name)


def _add_stateless(app: FastAPI, openenv_sessions: OpenEnvSessions) -> None:
    """Add the routes without a session: each request uses a new environment, which ends with the
    answer.
    """

    @app.post("/reset", response_model=Answer, responses=_REFUSALS)
    async def reset(episode: ResetRequest | None = None) -> Response:
        async with openenv_sessions.session() as session:
            return _json(await session.reset(episode or ResetRequest()))

    @app.post("/step", response_model=Answer, responses=_REFUSALS)
    async def step(request: StepRequest) -> Response:
        async with openenv_sessions.session() as session:
            await session.look()
            return _json(await session.act(request.action))

    @app.get("/state")
    async def state() -> State:
        return State()


def _add_descriptions(app: FastAPI, openenv_sessions: OpenEnvSessions, name: str) -> None:
    @app.get("/schema", responses=_REFUSALS)
    async def schema() -> Schemas:
        tools = bool((await openenv_sessions.about()).tools)
        return Schemas(
            action=(CallToolAction if tools else MessageAction).model_json_schema(),
            observation=TOOL_OBSERVATION.json_schema()
            if tools
            else MessageObservation.model_json_schema(),
            reset_observation=MessageObservation.model_json_schema(),
            state=State.model_json_schema(),
        )

    @app.get("/metadata", responses=_REFUSALS)
    async def metadata() -> Metadata:
        about = (await openenv_sessions.about()).system_prompt
        return Metadata(
            name=name, description=about or f"The environment {name}", version=installed_version()
        )

    @app.get("/list_environments")
    async def environments() -> list[str]:
        return [name]


class _Frame(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    type: str
    data: dict[str, Any] = {}


async def _serve(
    websocket: WebSocket, openenv_sessions: OpenEnvSessions, answer: _AnswerTo
) -> None:
    """Answer a connection's frames in order, until it closes or is silent for `idle_seconds`."""
    client = ServedSocket(websocket)
    session_id = websocket.query_params.get("session_id") or None
    try:
        async with openenv_sessions.session(session_id) as session:
            with _attach_session(session):
                await _converse(client, openenv_sessions, session, answer)
    except Refusal as refusal:
        await client.send(_encode(_error(SESSION_ERROR, refusal.detail)))
    await client.close()


async def _converse(
    client: ServedSocket,
    openenv_sessions: OpenEnvSessions,
    session: OpenEnvSession,
    answer: _AnswerTo,
) -> None:
    idle_seconds = openenv_sessions.sessions.limits.idle_seconds
    while (raw := await client.receive(idle_seconds)) is not None:
        openenv_sessions.sessions.owe(1)
        try:
            reply = await answer(raw, openenv_sessions, session)
            if reply is None:
                return
            await client.send(_encode(reply))
        finally:
            openenv_sessions.sessions.owe(-1)
        # A full server closes the connection, as OpenEnv's do.
        if reply.get("type") == "error" and reply["data"]["code"] == CAPACITY_REACHED:
            return


@contextlib.contextmanager
def _attach_session(session: OpenEnvSession) -> Iterator[None]:
    if session.attached:
        raise Refusal(409, "the session already has an attached WebSocket")
    session.attached = True
    try:
        yield
    finally:
        session.attached = False


async def _answer(
    raw: str | bytes, openenv_sessions: OpenEnvSessions, session: OpenEnvSession
) -> dict[str, Any] | None:
    """The answer to a frame of `/ws`; None for a `close` frame."""
    try:
        message = from_json(raw)
    except ValueError as error:
        return _error(INVALID_JSON, f"Invalid JSON: {error}")
    try:
        frame = _Frame.model_validate(message)
        return None if frame.type == "close" else await _dispatch(frame, openenv_sessions, session)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False)
        return _error(VALIDATION_ERROR, "Invalid message", errors=wrong)
    except Refusal as refusal:
        return _refusal_body(refusal, openenv_sessions)


async def _dispatch(
    frame: _Frame, openenv_sessions: OpenEnvSessions, session: OpenEnvSession
) -> dict[str, Any]:
    match frame.type:
        case "reset":
            return _observation_body(await session.reset(ResetRequest.model_validate(frame.data)))
        case "step":
            return _observation_body(await session.act(_read_action(frame.data)))
        case "state":
            return {"type": "state", "data": session.state}
        case "mcp":
            return {
                "type": "mcp",
                "data": await answer_rpc(to_json(frame.data), openenv_sessions, session),
            }
    known = "reset, step, state, mcp, close"
    return _error(UNKNOWN_TYPE, f"Unknown message type: {frame.type[:64]!r}; there are {known}")


def _read_action(data: dict[str, Any]) -> Action:
    match data.get("type"):
        case "list_tools":
            return ListToolsAction.model_validate(data)
        case "call_tool":
            return CallToolAction.model_validate(data)
    return MessageAction.model_validate(data)


def _observation_body(answer: Answer) -> dict[str, Any]:
    return {"type": "observation", "data": answer}


def _refusal_body(refusal: Refusal, openenv_sessions: OpenEnvSessions) -> dict[str, Any]:
    openenv_sessions.sessions.metrics.refused.labels(refusal.status).inc()
    if refusal.status in FULL:
        return _error(CAPACITY_REACHED, refusal.detail, **openenv_sessions.counts)
    return _error(
        VALIDATION_ERROR if refusal.status in (422, 424) else EXECUTION_ERROR, refusal.detail
    )


def _error(code: str, message: str, **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code, **more}}


def _json(body: Any) -> Response:
    return Response(_encode(body), media_type="application/json")


def _encode(body: Any) -> bytes:
    return to_json(body, inf_nan_mode="constants")
