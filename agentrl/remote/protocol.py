"""What client and server of a remote environment say to each other, and what each status means.

Over plain HTTP, for anybody:

    POST   /sessions                                             -> Opened
    POST   /sessions/{session}/reset  {"seq": 1, "seed": 7}      -> Began
    POST   /sessions/{session}/step   {"seq": 2, "action": ".."} -> Stepped
    DELETE /sessions/{session}                                   -> {}

Over the WebSocket /sessions/ws the same for many sessions at once. A frame is a list of messages, in both directions:
[{"id": 5, "op": "step", "session": .., "seq": .., "action": ..}, ..] is answered by [{"id": 5, "status": 200, "body":
{..}}], in any order and in any frames. A server reads no more while it owes many answers. (/ws is OpenEnv's.)

`seq` counts the resets and steps of a session from 1. The last number again, with the same content, gives the same
answer and does nothing; so what got lost on the way can be sent again.

What each status means, `STATUSES` says.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter

from agentrl.errors import ConfigError

SOCKET_PATH = "/sessions/ws"
"""Where the WebSocket is."""

MOST_MESSAGES = 1024
"""Messages in one frame."""

TOKEN_VARIABLE = "AGENTRL_REMOTE_TOKEN"
"""Environment variable of the bearer token, on both sides."""


STATUSES = {
    401: "The token is missing or wrong (403 where a WebSocket is opened)",
    404: "No such session: it expired, was deleted, failed, or never was",
    408: "The request was not written in time",
    409: "A `seq` neither the last nor the next, a step without an episode or after its end; the session goes on",
    413: "The body is larger than the server takes (a WebSocket is closed with 1009); the session goes on",
    422: "No JSON, or not this shape; the session goes on",
    424: "`options` that the environment does not take; the session is ended",
    429: "As many sessions as the server takes: come again after `Retry-After` seconds",
    500: "The environment raised, or broke its contract; the session is ended",
    503: "The server drains: no new session, no new episode; what is being played may end",
    504: "The environment did not answer in time; the session is ended",
}
"""What a status other than 200 means, and what it does to the session. The answer is a `ProblemDetail`."""


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole), Field(strict=True)]
"""An integer as JSON Schema means it: 7 and 7.0, and neither true nor "7"."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Reset(_Message):
    """Begin an episode."""

    seq: Whole = Field(ge=1)
    """One more than that of the session's last reset or step."""
    seed: Whole
    options: dict[str, Any] = {}


class Step(_Message):
    """The model's message."""

    seq: Whole = Field(ge=1)
    """One more than that of the session's last reset or step."""
    action: str


@dataclass(frozen=True, slots=True)
class Opened:
    """A session: an environment for its holder alone. Any client that knows `session` may use it."""

    session: str
    idle_seconds: float
    """How long it lives without being asked anything."""
    max_body_bytes: int
    """The longest message that the server takes, and the longest frame."""


@dataclass(frozen=True, slots=True)
class Began:
    """The beginning of an episode."""

    observation: str
    info: dict[str, Any]
    system_prompt: str
    tools: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Stepped:
    """The answer to the model's message."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ProblemDetail:
    """What is wrong."""

    detail: str


class OpenFrame(_Message):
    """POST /sessions."""

    id: int
    op: Literal["open"]


class ResetFrame(Reset):
    """POST /sessions/{session}/reset."""

    id: int
    op: Literal["reset"]
    session: str


class StepFrame(Step):
    """POST /sessions/{session}/step."""

    id: int
    op: Literal["step"]
    session: str


class CloseFrame(_Message):
    """DELETE /sessions/{session}."""

    id: int
    op: Literal["close"]
    session: str


Frame = OpenFrame | ResetFrame | StepFrame | CloseFrame
FRAMES: TypeAdapter[list[Frame]] = TypeAdapter(
    Annotated[list[Annotated[Frame, Field(discriminator="op")]], Field(max_length=MOST_MESSAGES)]
)
"""Reads a frame of requests from a WebSocket."""


@dataclass(frozen=True, slots=True)
class ReplyFrame:
    """An answer from the server, over the WebSocket."""

    id: int | None
    """The request's; none where the frame could not be read."""
    status: int
    body: dict[str, Any]
    """The answer, or {"detail": what is wrong}."""
    retry_after: float | None = None
    """Seconds after which a 429 or 503 may be different."""


def packed(messages: Iterable[bytes], max_bytes: int) -> Iterator[bytes]:
    """Frames of at most `max_bytes` that hold the messages in their order; one that is longer is alone in its own."""
    batch: list[bytes] = []
    size = 1
    for message in messages:
        if batch and (size + len(message) + 1 > max_bytes or len(batch) == MOST_MESSAGES):
            yield b"[%b]" % b",".join(batch)
            batch, size = [], 1
        batch.append(message)
        size += len(message) + 1
    if batch:
        yield b"[%b]" % b",".join(batch)


class Refusal(Exception):  # noqa: N818  an answer, not a defect
    """A request that is answered by a status other than 200."""

    def __init__(self, status: int, detail: str, retry_after: float | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.retry_after = retry_after


def server_url(url: str, like: str) -> str:
    """The address of a server, without what ends it.

    Raises:
        ConfigError: it is none; says to write one `like` this.
    """
    url = url.strip().rstrip("/")
    scheme, _, rest = url.partition("://")
    if scheme not in ("http", "https") or not rest:
        raise ConfigError(f"{url!r} is no address of a server: write {like}")
    return url
