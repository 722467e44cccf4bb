"""Google's `POST /v1beta/models/MODEL:generateContent`, and `:streamGenerateContent`.

The path names the model and asks for a stream or not; both are put into the body before it is read.
Fields may be written like `systemInstruction` or like `system_instruction`, as at Google's server.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from agentrl.gateway.call import AgentAnswer, AgentCall, RequestOptions
from agentrl.gateway.google_types import GenerationConfig
from agentrl.gateway.pictures import Said, read_base64, said_of
from agentrl.gateway.refusal import unsupported
from agentrl.gateway.session import AgentSession
from agentrl.gateway.vendor_types import checker
from agentrl.gateway.wire import (
    Fields,
    Json,
    WireProtocol,
    WireRequest,
    assistant,
    call_of,
    chat_request,
    event,
    function,
    invalid,
    pieces,
)
from agentrl.protocols import AnswerFormat
from agentrl.tokens.encoded_image import EncodedImage
from agentrl.trajectory import Message

_FIELDS = Fields(
    supported=(
        "contents",
        "systemInstruction",
        "tools",
        "toolConfig",
        "generationConfig",
        "model",
        "stream",
        "alt",
    ),
    ignored=("safetySettings", "labels", "serviceTier", "store"),
    refused={"cachedContent": "send the whole conversation"},
    neutral={},
)
_OPTIONS = Fields(
    supported=tuple(GenerationConfig.__annotations__),
    ignored=(
        "thinkingConfig",
        "topK",
        "mediaResolution",
        "audioTimestamp",
        "enableAffectiveDialog",
        "enableEnhancedCivicAnswers",
        "enableEnhancedSearchAnswers",
    ),
    refused={
        "presencePenalty": "the run decides how the policy is sampled (rollout.sampling)",
        "frequencyPenalty": "the run decides how the policy is sampled (rollout.sampling)",
        "responseLogprobs": "logprobs come with chat completions",
        "responseModalities": "the model writes text",
    },
    neutral={
        "presencePenalty": (0,),
        "frequencyPenalty": (0,),
        "responseLogprobs": (False,),
        "responseModalities": ([], ["TEXT"], ["text"]),
    },
)
_IGNORED_IN_PARTS = ("thoughtSignature", "partMetadata", "videoMetadata", "mediaResolution")
"""Fields of a part that do not change what the model reads."""
_PARTS = ("text", "functionCall", "functionResponse", "inlineData")


def _as_typed(body: Json, _: AgentSession) -> Json:
    """The body with all names in camel case. The request that a `countTokens` body wraps is
    unwrapped.
    """
    body = _rename_fields(body)
    inner = body.pop("generateContentRequest", None)
    return body | _rename_fields(inner) if isinstance(inner, dict) else body


def _rename_fields(value: Any, *, is_data: bool = False) -> Any:
    """The value with names like `systemInstruction`. Names of the program's own, in arguments,
    results and schemas (`is_data`), stay as they are.
    """
    if isinstance(value, list):
        return [_rename_fields(one) for one in value]
    if not isinstance(value, dict) or is_data:
        return value
    renamed = {}
    for key, one in value.items():
        name = _camel_case(key)
        renamed[name] = _rename_fields(one, is_data=name in _USER_DATA)
    return renamed


_USER_DATA = (
    "args",
    "response",
    "parameters",
    "parametersJsonSchema",
    "responseSchema",
    "responseJsonSchema",
    "labels",
)


def _camel_case(name: str) -> str:
    name = "responseJsonSchema" if name == "_responseJsonSchema" else name
    first, *others = name.split("_")
    return first + "".join(other.capitalize() for other in others)


def _read(checked: Json, body: Json) -> WireRequest:
    config = _config(body.get("generationConfig") or {})
    calling = (checked.get("toolConfig") or {}).get("functionCallingConfig") or {}
    options = RequestOptions(
        max_tokens=config.get("maxOutputTokens"),
        temperature=config.get("temperature"),
        top_p=config.get("topP"),
        stop=tuple(config.get("stopSequences") or ()),
        seed=config.get("seed"),
        may_call=(calling.get("mode") or "").upper() != "NONE",
        format=_format(config),
    )
    messages = _messages_of(checked, body)
    tools = [function for tool in checked.get("tools") or () for function in _read_tools(tool)]
    model, events = checked["model"], checked.get("alt") == "sse"
    request = chat_request(messages, tools, options, config.get("candidateCount") or 1, model)
    return WireRequest(
        request,
        bool(checked.get("stream")),
        lambda session, call: json.dumps(_response(call, model)).encode(),
        lambda session, call: (
            map(event, _stream(call, model)) if events else _json_list(call, model)
        ),
        "text/event-stream" if events else "application/json",
    )


def _config(given: Json) -> Json:
    """The options of sampling, checked.

    Raises:
        CallRefusedError: one is wrong, or not supported.
    """
    given = {key: one for key, one in given.items() if one is not None}
    _OPTIONS.check(given)
    try:
        checked: Json = checker(_OPTIONS_TYPE, False).validate_python(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise invalid(f"generationConfig.{first['loc'][0]}: {first['msg']}") from None
    return checked


_OPTIONS_TYPE = "agentrl.gateway.google_types:GenerationConfig"


def _format(config: Json) -> AnswerFormat | None:
    """The format of an answer: any JSON object, or what fits a schema. None: any text."""
    kind = config.get("responseMimeType") or "text/plain"
    if kind == "text/plain":
        return None
    if kind != "application/json":
        raise unsupported(
            f"generationConfig.responseMimeType {kind!r:.80}", "write application/json, or none"
        )
    schema = config.get("responseJsonSchema") or config.get("responseSchema")
    return AnswerFormat(json.dumps(_json_schema(schema)) if schema else "")


def _json_schema(schema: Any) -> Any:
    """A schema of Google's kind, whose types are in capitals, as a JSON schema. A JSON schema stays
    as it is.
    """
    if isinstance(schema, list):
        return [_json_schema(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _json_schema(one) for key, one in schema.items()}
    kind = made.get("type")
    if isinstance(kind, str) and kind.upper() in _GOOGLE_TYPES:
        made["type"] = kind.lower()
    return made


_GOOGLE_TYPES = ("STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL")


def _read_tools(tool: Json) -> Iterator[Mapping[str, Any]]:
    others = [key for key in tool if key != "functionDeclarations" and tool[key] is not None]
    if others:
        raise unsupported(
            f"the tool {others[0]}", "the model has no tools of its own; describe yours"
        )
    for place, one in enumerate(tool.get("functionDeclarations") or ()):
        if "name" not in one:
            raise invalid(f"tools: the function {place} has no name")
        given = one.get("parametersJsonSchema") or _json_schema(one.get("parameters"))
        yield function(one["name"], one.get("description"), given)


def _messages_of(checked: Json, body: Json) -> list[Message]:
    """The conversation. Consecutive contents of the model are one answer, of whose stream the
    client has kept each chunk.
    """
    given, raw = _contents(checked), _contents(body)
    messages = []
    if system := checked.get("systemInstruction"):
        text = "".join(_text(part, "systemInstruction") for part in system.get("parts") or ())
        messages += [Message("system", text)] if text else []
    answered: list[Json] = []
    for place, (content, written) in enumerate(zip(given, raw, strict=True)):
        where, parts = f"contents[{place}]", content.get("parts") or []
        for part in written.get("parts") or ():
            _check_part(part, where)
        if content.get("role") == "model":
            answered += parts
            continue
        if answered:
            messages.append(_answer(answered, where))
            answered = []
        messages += _user_messages(parts, where)
    return [*messages, _answer(answered, "contents")] if answered else messages


def _contents(body: Json) -> Sequence[Json]:
    """The contents of a body: a list, or a single one."""
    given = body.get("contents")
    return [] if given is None else [given] if isinstance(given, dict) else given


def _check_part(part: Json, where: str) -> None:
    """Refuse what the model cannot be shown."""
    for name, value in part.items():
        if value is not None and name not in (*_PARTS, "thought", *_IGNORED_IN_PARTS):
            raise unsupported(f"{where}: {name}", "write text, or pictures as inlineData")
    for inner in (part.get("functionResponse") or {}).get("parts") or ():
        if [name for name in inner if name not in ("inlineData", *_IGNORED_IN_PARTS)]:
            raise unsupported(f"{where}: functionResponse.parts", "write pictures as inlineData")


def _text(part: Json, where: str) -> str:
    if any(name in part for name in ("functionCall", "functionResponse", "inlineData")):
        raise invalid(f"{where}: a text is expected, and not a call, a result or a picture")
    return str(part.get("text", ""))


def _answer(parts: Sequence[Json], where: str) -> Message:
    texts = [part for part in parts if "functionCall" not in part and not part.get("thought")]
    calls = [part["functionCall"] for part in parts if "functionCall" in part]
    if unnamed := [call for call in calls if "name" not in call]:
        raise invalid(f"{where}: the call {unnamed[0]!r:.80} has no name")
    return assistant(
        "".join(_text(part, where) for part in texts),
        [call_of(call.get("id", ""), call["name"], call.get("args") or {}) for call in calls],
    )


def _user_messages(parts: Sequence[Json], where: str) -> Iterator[Message]:
    """The messages of one user content, in which tool results may stand between texts."""
    shown: list[Json] = []
    for part in parts:
        if "functionResponse" not in part:
            shown.append(part)
            continue
        if shown:
            yield _user_message(shown, where)
            shown = []
        result = part["functionResponse"]
        yield Message(
            "tool",
            _result_text(result.get("response") or {}),
            result.get("name", ""),
            tool_call_id=result.get("id", ""),
            images=_user_content(result.get("parts") or (), where).images,
        )
    if shown or not parts:
        yield _user_message(shown, where)


def _user_message(parts: Sequence[Json], where: str) -> Message:
    said = _user_content(parts, where)
    return Message("user", said.text, images=said.images)


def _user_content(parts: Sequence[Json], where: str) -> Said:
    """Texts and pictures, given the `type` that parts have in the other protocols."""
    typed = [
        {"type": "picture", **part["inlineData"]}
        if "inlineData" in part
        else {"type": "text", "text": _text(part, where)}
        for part in parts
    ]
    return said_of(typed, where, ("text",), _PICTURES)


def _read_picture(part: Mapping[str, Any], where: str) -> EncodedImage:
    data = part.get("data")
    if isinstance(data, str):
        data = data.replace("-", "+").replace("_", "/")  # Google's clients write URL-safe base64
    return read_base64(data, part.get("mimeType"), where)


_PICTURES = {"picture": _read_picture}


def _result_text(response: Json) -> str:
    """The text of a result. Google's clients wrap a function's value in `result` or `output`."""
    if len(response) == 1 and (name := next(iter(response))) in ("result", "output"):
        value = response[name]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return json.dumps(response, ensure_ascii=False)


def _parts(answer: AgentAnswer) -> list[Json]:
    """An answer as parts; at least one, because clients treat an empty list as an error."""
    thoughts = [{"text": answer.message.reasoning, "thought": True}]
    texts = [{"text": answer.message.said}]
    calls = [
        {"functionCall": {"id": call.id, "name": call.name, "args": dict(call.arguments)}}
        for call in answer.calls
    ]
    found = [
        *(thoughts if answer.message.reasoning else ()),
        *(texts if answer.message.said else ()),
        *calls,
    ]
    return found or texts


def _candidate(answer: AgentAnswer, place: int, parts: Sequence[Json], *, ends: bool) -> Json:
    made: Json = {"content": {"role": "model", "parts": list(parts)}, "index": place}
    if ends:
        made["finishReason"] = (
            "MAX_TOKENS" if answer.completion.finish_reason == "length" else "STOP"
        )
    return made


def _response_body(call: AgentCall, model: str, candidates: Sequence[Json], *, ends: bool) -> Json:
    thought = sum(answer.message.reasoning_tokens for answer in call.answers)
    sampled = sum(len(answer.completion.token_ids) for answer in call.answers)
    usage = {"promptTokenCount": call.prompt_length, "totalTokenCount": call.prompt_length}
    if ends:
        usage |= {
            "candidatesTokenCount": sampled - thought,
            "totalTokenCount": call.prompt_length + sampled,
        }
        usage |= {"thoughtsTokenCount": thought} if thought else {}
    return {
        "candidates": list(candidates),
        "usageMetadata": usage,
        "modelVersion": model,
        "responseId": call.name,
    }


def _response(call: AgentCall, model: str) -> Json:
    candidates = [
        _candidate(answer, place, _parts(answer), ends=True)
        for place, answer in enumerate(call.answers)
    ]
    return _response_body(call, model, candidates, ends=True)


def _stream(call: AgentCall, model: str) -> Iterator[str]:
    """The chunks of a stream, each with a part of one answer. The last of an answer has its finish
    reason, and the very last the usage.
    """
    for place, answer in enumerate(call.answers):
        parts = [one for part in _parts(answer) for one in _split_text(part)]
        for number, part in enumerate(parts, 1):
            ends = number == len(parts)
            last = ends and place + 1 == len(call.answers)
            candidate = _candidate(answer, place, [part], ends=ends)
            yield json.dumps(_response_body(call, model, [candidate], ends=last))


def _split_text(part: Json) -> Iterator[Json]:
    if not part.get("text"):
        yield part
    for piece in pieces(part.get("text", "")):
        yield part | {"text": piece}


def _json_list(call: AgentCall, model: str) -> Iterator[bytes]:
    """The chunks as one JSON list, for clients that do not ask for events."""
    for number, one in enumerate(_stream(call, model)):
        yield (",\r\n" if number else "[").encode() + one.encode()
    yield b"]"


GENERATE = WireProtocol(
    path="/v1beta/models/{model}:generateContent",
    type_name="agentrl.gateway.google_types:GenerateContentRequest",
    required=("contents",),
    fields=_FIELDS,
    reader=_read,
    typed=_as_typed,
)
