"""The common parts of the four protocols: reading requests strictly, writing answers, and
server-sent events.

A field of a request is supported, ignored (it cannot change an answer that is recorded, or the run
decides it), or refused by its name. `docs/gateway.md` lists them. The types are those of OpenAI's
and Anthropic's packages, and for Google's protocol our own.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from agentrl.gateway.call import AgentCall, ChatRequest, RequestOptions
from agentrl.gateway.pictures import PartReader, Said, said_of
from agentrl.gateway.refusal import CallRefusedError, unsupported
from agentrl.gateway.session import AgentSession
from agentrl.gateway.vendor_types import checker
from agentrl.protocols import AnswerFormat
from agentrl.trajectory import Message, ToolCall

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of a protocol's requests. `refused`: what to do instead, for common fields.

    `neutral`: values with which a refused field is let through, because they ask for nothing.
    """

    supported: Sequence[str]
    ignored: Sequence[str]
    refused: Mapping[str, str]
    neutral: Mapping[str, Sequence[Any]]

    def check(self, body: Json) -> None:
        """Refuse what cannot be honoured.

        Raises:
            CallRefusedError: names the first such field.
        """
        for name, value in body.items():
            if (
                name in self.supported
                or name in self.ignored
                or value in self.neutral.get(name, ())
            ):
                continue
            raise unsupported(name, self.refused.get(name, "leave it out"))


@dataclass(frozen=True, slots=True)
class WireRequest:
    """A parsed request, and the writers of its response: whole, or as the parts of a stream."""

    request: ChatRequest
    streams: bool
    whole: Callable[[AgentSession, AgentCall], bytes]
    parts: Callable[[AgentSession, AgentCall], Iterable[bytes]]
    stream_type: str = "text/event-stream; charset=utf-8"
    """The content type of a stream."""

    def with_headers(self, headers: Mapping[str, str]) -> "WireRequest":
        """The same with the idempotency key, and with the mark of a retry, which OpenAI's and
        Anthropic's clients send as headers.
        """
        repeated = headers.get("x-stainless-retry-count", "0") != "0"
        request_id = headers.get("idempotency-key", "")
        if not (request_id or repeated):
            return self
        return replace(
            self, request=replace(self.request, request_id=request_id, repeated=repeated)
        )


@dataclass(eq=False, slots=True, kw_only=True)
class WireProtocol:
    """One protocol: the path of its requests, the vendor's type of them, and their reader.

    `reader` gets the request as that type has it, and the whole body. `typed` completes a body to
    what the type requires, which is stricter than the vendor's server; references to earlier
    answers are looked up in the session. Null means absent: libraries write it for unset fields,
    also in the messages that they send back.
    """

    path: str
    type_name: str
    """`package.module:name` of the type, which is imported when a first request comes, because that
    takes seconds.
    """
    required: Sequence[str]
    fields: Fields
    reader: Callable[[Json, Json], WireRequest]
    typed: Callable[[Json, AgentSession], Json] = lambda body, session: body
    loaded: bool = False
    """True if the type has been imported, so that reading a request does not."""

    def load(self) -> None:
        """Import the type."""
        for streams in (False, True):
            checker(self.type_name, streams)
        self.loaded = True

    def read(self, body: Any, session: AgentSession) -> WireRequest:
        """A request to the path, of a session's program.

        Raises:
            CallRefusedError: it is wrong, or wants something that there is not.
        """
        if not isinstance(body, dict):
            raise invalid("the body must be a JSON object")
        body = self.typed(_without_nulls(body), session)
        try:
            checked = checker(self.type_name, bool(body.get("stream"))).validate_python(body)
        except ValidationError as error:
            raise invalid(_describe_faults(error, body)) from None
        self.fields.check(body)
        return self.reader(checked, body)


def _without_nulls(value: Any) -> Any:
    """The object without null fields; likewise its messages and their parts."""
    if not isinstance(value, dict):
        return value
    if None in value.values():
        value = {key: one for key, one in value.items() if one is not None}
    said = {
        key: [*map(_without_nulls, value[key])]
        for key in _NESTED
        if isinstance(value.get(key), list)
    }
    return value | said if said else value


_NESTED = ("messages", "input", "content", "contents", "parts")
"""The fields with a conversation, or with the parts of a message."""


def _describe_faults(error: ValidationError, body: Json) -> str:
    """Up to three faults. Of a message, only those of the type for its own role."""
    found = error.errors(include_url=False, include_context=False)
    # pydantic reports the faults of every type of a union. A type whose `role` or `type` does not
    # match was not meant, so nothing below the place of such a fault counts.
    others = {one["loc"][:-1] for one in found if one["loc"] and one["loc"][-1] in ("role", "type")}
    own = [
        one
        for one in found
        if not any(one["loc"][:depth] in others for depth in range(len(one["loc"]) + 1))
    ]
    own = (
        [one for one in own if one["type"] != "string_type" or not isinstance(one["input"], list)]
        or own
        or found
    )
    said = (f"{_fault_path(one, body) or 'the body'}: {one['msg']}" for one in own)
    return "; ".join(islice(dict.fromkeys(said), 3))


def _fault_path(error: ErrorDetails, body: Any) -> str:
    """The path of a fault in a body, without the names of types, which pydantic puts between the
    fields below a union.
    """
    place: list[int | str] = []
    for part in error["loc"]:
        if (
            part in body
            if isinstance(body, dict)
            else isinstance(body, list) and isinstance(part, int)
        ):
            body = body[part]
            place.append(part)
    if error["type"] == "missing":
        place.append(error["loc"][-1])
    return ".".join(map(str, place[-4:]))


def invalid(detail: str) -> CallRefusedError:
    """A request that is wrong."""
    return CallRefusedError(400, "invalid_request", detail)


def text_of(content: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """The text of what holds no pictures, such as an answer: a text, or parts of text.

    Raises:
        CallRefusedError: it has other parts.
    """
    return content_of(content, where, kinds, {}).text


def content_of(
    content: Any, where: str, kinds: Sequence[str], pictures: Mapping[str, PartReader]
) -> Said:
    """A message's content: a text, or parts. `kinds` and `pictures`: the types of parts that are
    texts, and that are pictures.

    Raises:
        CallRefusedError: it has other parts, or a picture that is not taken.
    """
    if content is None or isinstance(content, str):
        return Said(content or "")
    return said_of(content, where, kinds, pictures)


def assistant(text: str, calls: Sequence[ToolCall]) -> Message:
    """An answer that a program sends back."""
    if not calls:
        return Message("assistant", text)
    return Message(
        "assistant",
        "\n".join(filter(None, (text, *(call.render() for call in calls)))),
        tool_calls=tuple(calls),
    )


def call_of(call_id: str, name: str, arguments: Any) -> ToolCall:
    """A call that a program sends back.

    Raises:
        CallRefusedError: its arguments are no JSON object.
    """
    try:
        given = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except (RecursionError, ValueError) as error:
        raise invalid(f"the arguments of the call {call_id!r:.80} are not JSON: {error}") from None
    if not isinstance(given, dict):
        raise invalid(f"the arguments of the call {call_id!r:.80} are no JSON object")
    call = ToolCall(name, given, call_id)
    if not call.is_plain:
        raise invalid(
            f"the call {call_id!r:.80} has an infinite number, half of a surrogate pair, or too"
            " deep nesting"
        )
    return call


def function(name: str, description: str | None, parameters: Any) -> Json:
    """A tool as chat templates expect it."""
    described = {
        "name": name,
        "description": description or "",
        "parameters": parameters or {"type": "object"},
    }
    return {"type": "function", "function": described}


def chat_request(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    options: RequestOptions,
    count: int = 1,
    model: str = "",
) -> ChatRequest:
    """A request that the model can answer.

    Raises:
        CallRefusedError: there is no message, the last one is an answer, or a number makes no
        sense.
    """
    if not messages:
        raise invalid("there is no message to answer")
    if messages[-1].role == "assistant":
        raise unsupported("a last message of the assistant", "the model begins each answer itself")
    right = {
        "n": count >= 1,
        "max_tokens": options.max_tokens is None or options.max_tokens >= 1,
        "temperature": options.temperature is None or 0 <= options.temperature <= 2,
        "top_p": options.top_p is None or 0 < options.top_p <= 1,
        "stop": all(options.stop) and len(options.stop) <= _MOST_STOPS,
    }
    for name, holds in right.items():
        if not holds:
            raise invalid(f"{name} is out of its range")
    return ChatRequest(tuple(messages), tuple(tools), count, options, model=model)


_MOST_STOPS = 64
"""Of one request. The engine looks for each of them after each token."""


def format_of(asked: Any) -> AnswerFormat | None:
    """The format of an answer: any JSON object, or what fits a schema. None: any text."""
    if not asked or asked["type"] == "text":
        return None
    described = asked.get("json_schema", asked)  # where responses have it
    return AnswerFormat(json.dumps(described["schema"]) if described.get("schema") else "")


def pieces(text: str) -> Iterator[str]:
    """A text in the pieces of a stream."""
    for begin in range(0, len(text), _CHARACTERS_PER_PIECE):
        yield text[begin : begin + _CHARACTERS_PER_PIECE]


_CHARACTERS_PER_PIECE = 32
"""Characters in one part of a stream."""


def event(data: str, name: str = "") -> bytes:
    """A server-sent event."""
    return f"event: {name}\ndata: {data}\n\n".encode() if name else f"data: {data}\n\n".encode()


def as_json(made: BaseModel) -> bytes:
    """A vendor's object as it is sent: with the fields that were set."""
    return made.model_dump_json(exclude_unset=True).encode()
