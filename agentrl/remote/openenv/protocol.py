"""OpenEnv's messages, as its versions 0.3 (`openenv-core`) and 0.10 (`openenv`) put them on the
wire.

The protocol is the WebSocket `/ws`: each connection is a session with its own environment. Requests
have no id and are answered in order.

    {"type": "reset", "data": {"seed": 7, ...}}               -> an observation
    {"type": "step", "data": {fields of the Action schema}}   -> an observation
    {"type": "step", "data": {"type": "list_tools"}}          -> an observation with "tools"
    {"type": "step", "data": {"type": "call_tool", "tool_name": .., "arguments": {..}}}
                                                              -> one with "result" or "error"
    {"type": "state"}                                         -> a state
    {"type": "mcp", "data": {JSON-RPC}}                       -> the like
    {"type": "close"}                                         -> the end

    {"type": "observation", "data": {"observation": {..}, "reward": 1.0 or null, "done": false,
    "metadata": {..}}} {"type": "error", "data": {"message": .., "code": ..}}

`GET /schema` describes actions and observations. Over HTTP, each `/reset` or `/step` uses a new
environment that ends with the answer; only `POST /mcp` (JSON-RPC) has sessions. The versions differ
in `metadata`, which 0.3 leaves out.
"""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from agentrl.remote.protocol import Text, Whole
from agentrl.settings.base import check_plain

TOOL_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")
"""Titles of the Action schema that mark an environment whose actions are tool calls."""
LARGEST_MESSAGE = 100 << 20
"""Bytes; OpenEnv's own clients accept as much."""

INVALID_JSON, UNKNOWN_TYPE, VALIDATION_ERROR = "INVALID_JSON", "UNKNOWN_TYPE", "VALIDATION_ERROR"
EXECUTION_ERROR, CAPACITY_REACHED, SESSION_ERROR = (
    "EXECUTION_ERROR",
    "CAPACITY_REACHED",
    "SESSION_ERROR",
)

FULL = (429, 503)
"""Statuses of a server that accepts nothing new for now."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MessageAction(_Strict):
    """The model's whole message."""

    message: Text = Field(description="The message, as the model wrote it")
    metadata: dict[str, Any] = {}


class ListToolsAction(_Strict):
    """List the tools; works without a reset."""

    type: Literal["list_tools"]
    metadata: dict[str, Any] = {}


class CallToolAction(_Strict):
    """Call a tool."""

    type: Literal["call_tool"] = "call_tool"
    tool_name: str
    arguments: dict[str, Any] = {}
    metadata: dict[str, Any] = {}


Action = MessageAction | CallToolAction | ListToolsAction


class MessageObservation(_Strict):
    """The environment's message. `metadata` holds `truncated` and the environment's info."""

    message: str
    done: bool = False
    reward: float | None = None
    metadata: dict[str, Any] = {}


class CallToolObservation(_Strict):
    """The answer of a tool: `result` is as MCP writes it, with the text also as `data`."""

    tool_name: str
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    reward: float | None = None
    metadata: dict[str, Any] = {}


class ListToolsObservation(_Strict):
    """The list of the tools."""

    tools: list[dict[str, Any]]
    done: bool = False
    reward: float | None = None
    metadata: dict[str, Any] = {}


TOOL_OBSERVATION: TypeAdapter[CallToolObservation | ListToolsObservation | MessageObservation] = (
    TypeAdapter(CallToolObservation | ListToolsObservation | MessageObservation)
)
"""Whatever an environment with tools may answer: it takes calls, requests for the list, and whole
messages.
"""


class State(BaseModel):
    """The state of the episode."""

    model_config = ConfigDict(extra="allow", frozen=True)

    episode_id: str | None = None
    step_count: int = Field(0, ge=0)


class ResetRequest(BaseModel):
    """The data of a reset; all other fields are options of the environment."""

    model_config = ConfigDict(extra="allow", frozen=True)

    seed: Whole | None = Field(None, ge=0)
    episode_id: str | None = Field(None, max_length=255)

    @model_validator(mode="after")
    def _options_are_kept(self) -> Self:
        check_plain(self.options)
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The environment's options."""
        return dict(self.model_extra or {})


class StepRequest(BaseModel):
    """The body of `POST /step`."""

    model_config = ConfigDict(extra="allow", frozen=True)

    action: Action


class Answer(BaseModel):
    """The body of an observation."""

    observation: dict[str, Any]
    reward: float | None = None
    done: bool = False
    metadata: dict[str, Any] = {}


class Schemas(_Strict):
    """The body of `/schema`: JSON Schemas."""

    action: dict[str, Any]
    observation: dict[str, Any]
    reset_observation: dict[str, Any]
    state: dict[str, Any]


class Metadata(_Strict):
    """The body of `/metadata`."""

    name: str
    description: str
    readme_content: str | None = None
    version: str | None = None
    author: str | None = None
    documentation_url: str | None = None


class RpcRequest(_Strict):
    """A JSON-RPC 2.0 request."""

    jsonrpc: Literal["2.0"]
    method: str
    params: dict[str, Any] = {}
    id: str | int | None = None
