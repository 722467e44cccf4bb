"""The protocol between the client and the server of a remote environment.

Over plain HTTP, for any client:

    POST   /sessions                                             -> Opened
    POST   /sessions/{session}/reset  {"seq": 1, "seed": 7}      -> Began
    POST   /sessions/{session}/step   {"seq": 2, "action": ".."} -> Stepped
    POST   /sessions/{session}/snapshot {"seq": 3}               -> Saved
    POST   /sessions/{session}/restore {"seq": 4, "state": ".."} -> Restored
    DELETE /sessions/{session}                                   -> {}

The WebSocket /sessions/ws offers the same for many sessions at once. In both directions, a frame is
a list of messages: [{"id": 5, "op": "step", "session": .., "seq": .., "action": ..}, ..] is
answered by [{"id": 5, "status": 200, "body": {..}}], in any order and in any frames. A server that
owes many answers stops reading. (/ws is OpenEnv's.)

The sessions used over a WebSocket end when the client has had none for `reconnect_seconds`. A
client that reconnects says so by the same text of its choice: /sessions/ws?client=TEXT.

`seq` counts the requests of a session, but for the last kind, from 1. Repeating the last number
with the same content repeats the answer and has no other effect, so a client can resend a request
that was lost.

`STATUSES` explains each status.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    Strict,
    TypeAdapter,
)

from agentrl.errors import ConfigError
from agentrl.net.credentials import refuse_credentials
from agentrl.settings.base import check_plain

SOCKET_PATH = "/sessions/ws"
"""The path of the WebSocket."""

MOST_MESSAGES = 1024
"""Most messages in one frame."""

TOKEN_VARIABLE = "AGENTRL_REMOTE_TOKEN"
"""Environment variable of the bearer token, on both sides."""


STATUSES = {
    401: "The token is missing or wrong (403 when opening a WebSocket)",
    404: "No such session: it expired, was deleted, failed or never existed",
    408: "The request was not written in time",
    409: (
        "`seq` is neither the last nor the next, a step or a snapshot without a running episode,"
        " or a snapshot of an environment that can make none; the session stays open"
    ),
    410: "Processes of the environment died of this task, so it is set aside; the session ended",
    413: (
        "The body is larger than the server accepts (a WebSocket is closed with 1009); the session"
        " stays open"
    ),
    422: (
        "Not JSON, JSON of another shape, or a state that this server has not given; the session"
        " stays open"
    ),
    424: "The environment does not accept these `options`; the session ended",
    429: "The server has as many sessions as it allows: retry after `Retry-After` seconds",
    500: "The environment raised, or broke its contract; the session ended",
    502: "The process that played the episode died, or none can be used; the session ended",
    503: (
        "The server is draining, or its processes are starting again: no new session, no new"
        " episode; running episodes may finish"
    ),
    504: "The environment did not answer in time; the session ended",
}
"""The meaning of each status other than 200, and its effect on the session. The body is a
`ProblemDetail`.
"""


def _as_integer(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_as_integer), Field(strict=True)]
"""An integer as defined by JSON Schema: 7 and 7.0, but not true or "7"."""


def _check_text(text: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("half of a surrogate pair is no character") from None
    return text


Text = Annotated[str, AfterValidator(_check_text)]
"""A text that can be sent on, which one of JSON's escapes may not be: "\\ud83d" alone."""


def _check_options(options: dict[str, Any]) -> dict[str, Any]:
    check_plain(options)
    return options


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Reset(_Message):
    """Begin an episode."""

    seq: Whole = Field(ge=1)
    """One more than the `seq` of the session's last reset or step."""
    seed: Whole = Field(ge=0)
    options: Annotated[dict[str, Any], AfterValidator(_check_options)] = {}
    """A value that a config can hold too: no NaN, no infinity."""


class Step(_Message):
    """The model's message."""

    seq: Whole = Field(ge=1)
    """One more than the `seq` of the session's last reset or step."""
    action: Text


class SaveState(_Message):
    """Ask for the state of the episode."""

    seq: Whole = Field(ge=1)
    """One more than the `seq` of the session's last request."""


class RestoreState(_Message):
    """Go back to a state."""

    seq: Whole = Field(ge=1)
    """One more than the `seq` of the session's last request."""
    state: str
    """As this server has given it (`Saved`), whichever session asked. No other is taken."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A session: an environment for one client. Any client that knows `session` may use it."""

    session: str
    idle_seconds: float
    """The session expires after this time without a request."""
    max_body_bytes: int
    """The longest message, and the longest frame, that the server accepts."""
    reconnect_seconds: float = 0.0
    """The sessions of a client without a WebSocket expire after this time, if it had one."""


@dataclass(frozen=True, slots=True)
class Began:
    """The beginning of an episode."""

    observation: str
    info: dict[str, Any]
    system_prompt: str
    tools: list[dict[str, Any]]
    restorable: bool = False
    """Its states can be saved, and restored."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The state of an episode, for `RestoreState` at the same server while that runs."""

    state: str


@dataclass(frozen=True, slots=True)
class Restored:
    """The episode goes on from the state."""

    system_prompt: str
    tools: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Stepped:
    """The answer to the model's message."""

    observation: str
    reward: Annotated[float, Strict()]
    """A number: neither true nor "1" is one, as in an environment's own reply."""
    terminated: Annotated[bool, Strict()]
    truncated: Annotated[bool, Strict()]
    info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ProblemDetail:
    """The reason for a refusal."""

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


class SnapshotFrame(SaveState):
    """POST /sessions/{session}/snapshot."""

    id: int
    op: Literal["snapshot"]
    session: str


class RestoreFrame(RestoreState):
    """POST /sessions/{session}/restore."""

    id: int
    op: Literal["restore"]
    session: str


class CloseFrame(_Message):
    """DELETE /sessions/{session}."""

    id: int
    op: Literal["close"]
    session: str


Frame = OpenFrame | ResetFrame | StepFrame | SnapshotFrame | RestoreFrame | CloseFrame
FRAMES: TypeAdapter[list[Frame]] = TypeAdapter(
    Annotated[
        list[Annotated[Frame, Field(discriminator="op")]],
        Field(max_length=MOST_MESSAGES),
        FailFast(),
    ]
)
"""Reads a frame of requests from a WebSocket, up to the first that is wrong."""


@dataclass(frozen=True, slots=True)
class ReplyFrame:
    """An answer from the server, over the WebSocket."""

    id: int | None
    """The id of the request; null if the frame could not be read."""
    status: int
    body: dict[str, Any]
    """The answer, or {"detail": what is wrong}."""
    retry_after: float | None = None
    """After a 429 or 503: seconds until a retry may succeed."""


def packed(messages: Iterable[bytes], max_bytes: int) -> Iterator[bytes]:
    """Pack the messages, in order, into frames of at most `max_bytes`; a longer message gets a
    frame to itself.
    """
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
    """A request is answered with a status other than 200."""

    def __init__(self, status: int, detail: str, retry_after: float | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.retry_after = retry_after


def server_url(url: str, like: str) -> str:
    """The address of a server, without trailing slashes.

    Raises:
        ConfigError: `url` is not an address (the message asks for one `like` this), or contains
        credentials.
    """
    url = url.strip().rstrip("/")
    refuse_credentials(url, "the address of a server")
    scheme, _, rest = url.partition("://")
    if scheme not in ("http", "https") or not rest:
        raise ConfigError(f"{url!r} is not the address of a server: write {like}")
    return url
