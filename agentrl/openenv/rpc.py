"""JSON-RPC as OpenEnv's clients of tools speak it: MCP's `tools/list` and `tools/call`, and sessions of its own."""

from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from agentrl.openenv.protocol import FULL, RpcRequest
from agentrl.openenv.sessions import OpenEnvSession, OpenEnvSessions, tool_entry, tool_result
from agentrl.remote.protocol import Refusal

_METHODS = ("openenv/session/create", "openenv/session/close", "tools/list", "tools/call")


async def answer_rpc(raw: str | bytes, seats: OpenEnvSessions, seat: OpenEnvSession | None) -> dict[str, Any]:
    """The answer to a JSON-RPC request, which is of the connection's seat, or of the one that it names."""
    try:
        request = RpcRequest.model_validate(from_json(raw))
    except ValidationError as error:
        return _rpc_error(None, -32600, f"Invalid request: {error}")
    except ValueError as error:
        return _rpc_error(None, -32700, f"Parse error: {error}")
    if request.method not in _METHODS:
        return _rpc_error(request.id, -32601, f"Method not found: {request.method[:64]}")
    try:
        result = await _rpc_result(request.method, request.params, seats, seat)
    except Refusal as refusal:
        seats.sessions.metrics.refused.labels(refusal.status).inc()
        counts = seats.counts if refusal.status in FULL else None
        return _rpc_error(request.id, -32602 if refusal.status in (404, 422) else -32000, refusal.detail, counts)
    return {"jsonrpc": "2.0", "id": request.id, "result": result}


async def _rpc_result(
    method: str, params: dict[str, Any], seats: OpenEnvSessions, seat: OpenEnvSession | None
) -> dict[str, Any]:
    named = params.get("session_id")
    if method == "openenv/session/create":
        return {"session_id": (seat or await seats.open()).id}
    if method == "openenv/session/close":
        await seats.close(seats.find(str(named)).id)
        return {"session_id": named, "closed": True}
    if seat is None:
        async with seats.seat(None if named is None else str(named)) as its:
            return await _tools_result(method, params, its)
    return await _tools_result(method, params, seat)


async def _tools_result(method: str, params: dict[str, Any], seat: OpenEnvSession) -> dict[str, Any]:
    if method == "tools/list":
        return {"tools": [tool_entry(tool, "inputSchema") for tool in (await seat.look()).tools]}
    name, arguments = params.get("name"), params.get("arguments") or {}
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise Refusal(422, "tools/call takes the name of a tool as 'name' and an object as 'arguments'")
    stepped = await seat.call(name, arguments)
    over = stepped.terminated or stepped.truncated
    return {**tool_result(stepped.observation, "isError"), "_meta": {"reward": stepped.reward, "done": over}}


def _rpc_error(request: str | int | None, code: int, message: str, data: Any = None) -> dict[str, Any]:
    error = {"code": code, "message": message, **({"data": data} if data is not None else {})}
    return {"jsonrpc": "2.0", "id": request, "error": error}
