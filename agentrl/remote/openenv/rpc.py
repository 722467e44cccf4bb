"""The JSON-RPC of OpenEnv's tool clients: MCP's `tools/list` and `tools/call`, plus OpenEnv's
session methods.
"""

import base64
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from agentrl.hosting.observations import images_taken
from agentrl.remote.openenv.adapter import OpenEnvSession, OpenEnvSessions, tool_entry, tool_result
from agentrl.remote.openenv.protocol import FULL, RpcRequest
from agentrl.remote.protocol import Refusal

_METHODS = ("openenv/session/create", "openenv/session/close", "tools/list", "tools/call")


async def answer_rpc(
    raw: str | bytes, openenv_sessions: OpenEnvSessions, session: OpenEnvSession | None
) -> dict[str, Any]:
    """The answer to a JSON-RPC request, for the connection's session or the session that the
    request names.
    """
    try:
        request = RpcRequest.model_validate(from_json(raw))
    except ValidationError as error:
        return _rpc_error(None, -32600, f"Invalid request: {error}")
    except ValueError as error:
        return _rpc_error(None, -32700, f"Parse error: {error}")
    if request.method not in _METHODS:
        return _rpc_error(request.id, -32601, f"Method not found: {request.method[:64]}")
    try:
        result = await _rpc_result(request.method, request.params, openenv_sessions, session)
    except Refusal as refusal:
        openenv_sessions.sessions.metrics.refused.labels(refusal.status).inc()
        counts = openenv_sessions.counts if refusal.status in FULL else None
        return _rpc_error(
            request.id, -32602 if refusal.status in (404, 422) else -32000, refusal.detail, counts
        )
    return {"jsonrpc": "2.0", "id": request.id, "result": result}


async def _rpc_result(
    method: str,
    params: dict[str, Any],
    openenv_sessions: OpenEnvSessions,
    session: OpenEnvSession | None,
) -> dict[str, Any]:
    named = params.get("session_id")
    if method == "openenv/session/create":
        return {"session_id": (session or await openenv_sessions.open()).id}
    if method == "openenv/session/close":
        await openenv_sessions.close(openenv_sessions.find(str(named)).id)
        return {"session_id": named, "closed": True}
    if session is None:
        async with openenv_sessions.session(None if named is None else str(named)) as its:
            return await _tools_result(method, params, its)
    return await _tools_result(method, params, session)


async def _tools_result(
    method: str, params: dict[str, Any], session: OpenEnvSession
) -> dict[str, Any]:
    if method == "tools/list":
        return {"tools": [tool_entry(tool, "inputSchema") for tool in (await session.look()).tools]}
    name, arguments = params.get("name"), params.get("arguments") or {}
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise Refusal(
            422, "tools/call needs the name of a tool as 'name' and an object as 'arguments'"
        )
    stepped = await session.call(name, arguments)
    over = stepped.terminated or stepped.truncated
    result = tool_result(stepped.observation, "isError")
    images, _ = images_taken("step", stepped.info)
    shown = [
        {
            "type": "image",
            "data": base64.b64encode(image.data).decode(),
            "mimeType": f"image/{image.format}",
        }
        for image in images
    ]
    return {
        **result,
        "content": [*shown, *result["content"]],
        "_meta": {"reward": stepped.reward, "done": over},
    }


def _rpc_error(
    request: str | int | None, code: int, message: str, data: Any = None
) -> dict[str, Any]:
    error = {"code": code, "message": message, **({"data": data} if data is not None else {})}
    return {"jsonrpc": "2.0", "id": request, "error": error}
