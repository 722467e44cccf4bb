"""What `agentrl serve` says to OpenEnv's clients, unmodified (`openenv_protocol.py` has the messages).

An environment's action is the model's message, whole: `{"message": text}`. One with tools can also be asked for them
(`list_tools`) and be given one call at a time (`call_tool`). Sessions, limits and the token are those of the server.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response, WebSocket, WebSocketDisconnect
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json, to_json

from agentrl.remote.openenv_protocol import (
    CAPACITY_REACHED,
    EXECUTION_ERROR,
    INVALID_JSON,
    SESSION_ERROR,
    UNKNOWN_TYPE,
    VALIDATION_ERROR,
    Action,
    Answer,
    CallToolAction,
    CallToolObservation,
    Episode,
    ListToolsAction,
    MessageAction,
    MessageObservation,
    Metadata,
    RpcRequest,
    Schemas,
    State,
    StepRequest,
)
from agentrl.remote.protocol import STATUSES, Began, Problem, Refusal, Reset, Step, Stepped
from agentrl.remote.sessions import Sessions
from agentrl.rollout.tools import ToolCall

_FULL = (429, 503)
_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": STATUSES[status]} for status in (409, 422, 424, 429, 500, 503, 504)
}
_AnswerTo = Callable[[str | bytes, "_Seats", "_Seat"], Awaitable[dict[str, Any] | None]]


def add_openenv(app: FastAPI, sessions: Sessions, name: str) -> None:
    """Add OpenEnv's routes to a server of the environment `name`."""
    seats = _Seats(sessions)

    @app.websocket("/ws")
    async def play(client: WebSocket) -> None:
        await client.accept()
        await _serve(client, seats, _answer)

    @app.websocket("/mcp")
    async def speak_rpc(client: WebSocket) -> None:
        await client.accept()
        await _serve(client, seats, _answer_rpc)

    @app.post("/mcp")
    async def mcp(request: Request) -> Response:
        return _json(await _rpc(await request.body(), seats, None))

    _add_stateless(app, seats)
    _add_descriptions(app, seats, name)


def _add_stateless(app: FastAPI, seats: "_Seats") -> None:
    """Each of these has an environment of its own, which ends with the answer."""

    @app.post("/reset", response_model=Answer, responses=_REFUSALS)
    async def reset(episode: Episode | None = None) -> Response:
        async with seats.seat() as seat:
            return _json(await seat.reset(episode or Episode()))

    @app.post("/step", response_model=Answer, responses=_REFUSALS)
    async def step(request: StepRequest) -> Response:
        async with seats.seat() as seat:
            await seat.look()
            return _json(await seat.act(request.action))

    @app.get("/state")
    async def state() -> State:
        return State()


def _add_descriptions(app: FastAPI, seats: "_Seats", name: str) -> None:
    @app.get("/schema", responses=_REFUSALS)
    async def schema() -> Schemas:
        tools = bool((await seats.about()).tools)
        return Schemas(
            action=(CallToolAction if tools else MessageAction).model_json_schema(),
            observation=(CallToolObservation if tools else MessageObservation).model_json_schema(),
            reset_observation=MessageObservation.model_json_schema(),
            state=State.model_json_schema(),
        )

    @app.get("/metadata", responses=_REFUSALS)
    async def metadata() -> Metadata:
        about = (await seats.about()).system_prompt
        return Metadata(name=name, description=about or f"The environment {name}", version=version("agentrl"))

    @app.get("/list_environments")
    async def environments() -> list[str]:
        return [name]


class _Seat:
    """A client's session, and where its episode stands. It asks the session one thing at a time.

    The session is opened when it is needed, and again by a `reset` after it lapsed or failed.
    """

    def __init__(self, sessions: Sessions) -> None:
        self.id = secrets.token_urlsafe(24)
        self.state = State()
        self.attached = False
        self._sessions = sessions
        self._session = ""
        self._seq = 0
        self._began: Began | None = None
        self._lock = asyncio.Lock()

    @property
    def is_open(self) -> bool:
        return self._session in self._sessions

    async def open(self) -> None:
        """Open the session, if it is not.

        Raises:
            Refusal: the server has no room, or the environment cannot be made.
        """
        if not self.is_open:
            self._session, self._seq = (await self._sessions.open()).session, 0

    async def reset(self, episode: Episode) -> Answer:
        """Begin an episode."""
        seed = secrets.randbelow(1 << 31) if episode.seed is None else episode.seed
        async with self._lock:
            began = await self._begin(seed, episode)
        # OpenEnv has no place for the system prompt, and its client of tools drops a text that stands beside metadata.
        extra = {"seed": seed, "system_prompt": began.system_prompt}
        metadata = {**began.info, **extra, **({"message": began.observation} if began.tools else {})}
        return _answer_of({"message": began.observation}, metadata)

    async def look(self) -> Began:
        """What the environment shows of itself. Only an episode tells, so without one the episode of seed 0 begins."""
        async with self._lock:
            return self._began or await self._begin(0, Episode())

    async def act(self, action: Action) -> Answer:
        """Do what a step asks for."""
        if isinstance(action, ListToolsAction):
            return _answer_of({"tools": [_tool(tool, "input_schema") for tool in (await self.look()).tools]}, {})
        if isinstance(action, CallToolAction):
            stepped = await self.call(action.tool_name, action.arguments)
            said = {"tool_name": action.tool_name, "result": _result(stepped.observation, "is_error"), "error": None}
        else:
            stepped = await self._step(action.message)
            said = {"message": stepped.observation}
        metadata = {**stepped.info, **({"truncated": True} if stepped.truncated else {})}
        return _answer_of(said, metadata, stepped.reward, stepped.terminated or stepped.truncated)

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Stepped:
        """Call a tool, as a model would have written it."""
        await self.look()
        return await self._step(ToolCall(tool, arguments).render())

    async def close(self) -> None:
        """Give the session back."""
        with contextlib.suppress(Refusal):
            await self._sessions.close(self._session)

    async def _begin(self, seed: int, episode: Episode) -> Began:
        await self.open()
        request = Reset(seq=self._seq + 1, seed=seed, options=episode.options)
        self._began = await self._sessions.reset(self._session, request)
        self._seq += 1
        self.state = State(episode_id=episode.episode_id or secrets.token_hex(16))
        return self._began

    async def _step(self, message: str) -> Stepped:
        async with self._lock:
            if self._began is None:
                raise Refusal(409, "no episode is being played: reset first")
            stepped = await self._sessions.step(self._session, Step(seq=self._seq + 1, action=message))
            self._seq += 1
            self.state = State(episode_id=self.state.episode_id, step_count=self.state.step_count + 1)
            return stepped


class _Seats:
    """All seats of a server. A seat ends with its connection, or, where JSON-RPC has opened it, when it is told to."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions
        self._seats: dict[str, _Seat] = {}
        self._about: Began | None = None

    @contextlib.asynccontextmanager
    async def seat(self, seat_id: str | None = None) -> AsyncIterator[_Seat]:
        """A seat of one's own, or the one that was opened before under this id."""
        if seat_id is not None:
            yield self.find(seat_id)
            return
        seat = _Seat(self.sessions)
        self._seats[seat.id] = seat
        try:
            yield seat
        finally:
            await self.close(seat.id)

    async def open(self) -> _Seat:
        """A seat that stays until it is closed, or its session lapses."""
        for lapsed in [key for key, seat in self._seats.items() if not seat.attached and not seat.is_open]:
            del self._seats[lapsed]
        seat = _Seat(self.sessions)
        await seat.open()
        self._seats[seat.id] = seat
        return seat

    def find(self, seat_id: str) -> _Seat:
        seat = self._seats.get(seat_id)
        if seat is None:
            raise Refusal(404, f"Unknown session_id: {seat_id[:64]}")
        return seat

    async def close(self, seat_id: str) -> None:
        seat = self._seats.pop(seat_id, None)
        if seat is not None:
            await seat.close()

    async def about(self) -> Began:
        """What the environment shows of itself, asked once."""
        if self._about is None:
            async with self.seat() as seat:
                self._about = await seat.look()
        return self._about


class _Frame(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    type: str
    data: dict[str, Any] = {}


async def _serve(client: WebSocket, seats: _Seats, answer: _AnswerTo) -> None:
    """Answer a connection's frames in order, until it closes, or says nothing for as long as a session may."""
    try:
        async with seats.seat(client.query_params.get("session_id") or None) as seat:
            with _attached(seat):
                await _converse(client, seats, seat, answer)
    except Refusal as refusal:
        await _send(client, _error(SESSION_ERROR, refusal.detail))
    with contextlib.suppress(RuntimeError, WebSocketDisconnect):  # it may be closed already
        await client.close()


async def _converse(client: WebSocket, seats: _Seats, seat: _Seat, answer: _AnswerTo) -> None:
    while (raw := await _receive(client, seats.sessions.limits.idle_seconds)) is not None:
        reply = await answer(raw, seats, seat)
        if reply is None:
            return
        await _send(client, reply)
        if reply.get("type") == "error" and reply["data"]["code"] == CAPACITY_REACHED:
            return  # as OpenEnv's servers do


@contextlib.contextmanager
def _attached(seat: _Seat) -> Iterator[None]:
    if seat.attached:
        raise Refusal(409, "the session already has an attached WebSocket")
    seat.attached = True
    try:
        yield
    finally:
        seat.attached = False


async def _send(client: WebSocket, reply: dict[str, Any]) -> None:
    with contextlib.suppress(RuntimeError, WebSocketDisconnect):  # the client may be gone
        await client.send_text(to_json(reply, inf_nan_mode="constants").decode())


async def _receive(client: WebSocket, seconds: float) -> str | bytes | None:
    try:
        async with asyncio.timeout(seconds):
            message = await client.receive()
    except TimeoutError:
        return None
    if message["type"] == "websocket.disconnect":
        return None
    return message.get("text") or message.get("bytes") or ""


async def _answer(raw: str | bytes, seats: _Seats, seat: _Seat) -> dict[str, Any] | None:
    """The answer to a frame of `/ws`; none to the last."""
    try:
        said = from_json(raw)
    except ValueError as error:
        return _error(INVALID_JSON, f"Invalid JSON: {error}")
    try:
        frame = _Frame.model_validate(said)
        return None if frame.type == "close" else await _do(frame, seats, seat)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False)
        return _error(VALIDATION_ERROR, "Invalid message", errors=wrong)
    except Refusal as refusal:
        return _refused(refusal, seats.sessions)


async def _do(frame: _Frame, seats: _Seats, seat: _Seat) -> dict[str, Any]:
    match frame.type:
        case "reset":
            return _observed(await seat.reset(Episode.model_validate(frame.data)))
        case "step":
            return _observed(await seat.act(_read_action(frame.data)))
        case "state":
            return {"type": "state", "data": seat.state}
        case "mcp":
            return {"type": "mcp", "data": await _rpc(to_json(frame.data), seats, seat)}
    known = "reset, step, state, mcp, close"
    return _error(UNKNOWN_TYPE, f"Unknown message type: {frame.type[:64]!r}; there are {known}")


def _read_action(data: dict[str, Any]) -> Action:
    match data.get("type"):
        case "list_tools":
            return ListToolsAction.model_validate(data)
        case "call_tool":
            return CallToolAction.model_validate(data)
    return MessageAction.model_validate(data)


async def _answer_rpc(raw: str | bytes, seats: _Seats, seat: _Seat) -> dict[str, Any]:
    return await _rpc(raw, seats, seat)


async def _rpc(raw: str | bytes, seats: _Seats, seat: _Seat | None) -> dict[str, Any]:
    """The answer to a JSON-RPC request, which is of the connection's seat, or of the one that it names."""
    try:
        request = RpcRequest.model_validate(from_json(raw))
    except ValidationError as error:
        return _rpc_error(None, -32600, f"Invalid request: {error}")
    except ValueError as error:
        return _rpc_error(None, -32700, f"Parse error: {error}")
    try:
        result = await _rpc_result(request.method, request.params, seats, seat)
    except LookupError:
        return _rpc_error(request.id, -32601, f"Method not found: {request.method[:64]}")
    except Refusal as refusal:
        seats.sessions.metrics.refused.labels(refusal.status).inc()
        counts = _counts(seats.sessions) if refusal.status in _FULL else None
        return _rpc_error(request.id, -32602 if refusal.status in (404, 422) else -32000, refusal.detail, counts)
    return {"jsonrpc": "2.0", "id": request.id, "result": result}


async def _rpc_result(method: str, params: dict[str, Any], seats: _Seats, seat: _Seat | None) -> dict[str, Any]:
    named = params.get("session_id")
    if method == "openenv/session/create":
        return {"session_id": (seat or await seats.open()).id}
    if method == "openenv/session/close":
        await seats.close(seats.find(str(named)).id)
        return {"session_id": named, "closed": True}
    if method not in ("tools/list", "tools/call"):
        raise LookupError(method)
    if seat is None:
        async with seats.seat(None if named is None else str(named)) as its:
            return await _tools_result(method, params, its)
    return await _tools_result(method, params, seat)


async def _tools_result(method: str, params: dict[str, Any], seat: _Seat) -> dict[str, Any]:
    if method == "tools/list":
        return {"tools": [_tool(tool, "inputSchema") for tool in (await seat.look()).tools]}
    name, arguments = params.get("name"), params.get("arguments") or {}
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise Refusal(422, "tools/call takes the name of a tool as 'name' and an object as 'arguments'")
    stepped = await seat.call(name, arguments)
    over = stepped.terminated or stepped.truncated
    return {**_result(stepped.observation, "isError"), "_meta": {"reward": stepped.reward, "done": over}}


def _tool(tool: Mapping[str, Any], schema_key: str) -> dict[str, Any]:
    function = tool.get("function", tool)
    schema = function.get("parameters", {})
    return {"name": function["name"], "description": function.get("description", ""), schema_key: schema}


def _result(text: str, error_key: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}], error_key: False, "data": text}


def _answer_of(
    said: dict[str, Any], metadata: dict[str, Any], reward: float | None = None, done: bool = False
) -> Answer:
    """0.3's clients read the metadata inside the observation, 0.10's beside it."""
    return Answer(observation={**said, "metadata": metadata}, reward=reward, done=done, metadata=metadata)


def _observed(answer: Answer) -> dict[str, Any]:
    return {"type": "observation", "data": answer}


def _refused(refusal: Refusal, sessions: Sessions) -> dict[str, Any]:
    sessions.metrics.refused.labels(refusal.status).inc()
    if refusal.status in _FULL:
        return _error(CAPACITY_REACHED, refusal.detail, **_counts(sessions))
    return _error(VALIDATION_ERROR if refusal.status == 424 else EXECUTION_ERROR, refusal.detail)


def _counts(sessions: Sessions) -> dict[str, int]:
    return {"active_sessions": len(sessions), "max_sessions": sessions.limits.max_sessions}


def _error(code: str, message: str, **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code, **more}}


def _rpc_error(request: str | int | None, code: int, message: str, data: Any = None) -> dict[str, Any]:
    error = {"code": code, "message": message, **({"data": data} if data is not None else {})}
    return {"jsonrpc": "2.0", "id": request, "error": error}


def _json(body: Any) -> Response:
    return Response(to_json(body, inf_nan_mode="constants"), media_type="application/json")
