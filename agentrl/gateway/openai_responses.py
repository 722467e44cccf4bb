"""OpenAI's responses: `POST /v1/responses`, the part of it that agents use. No response is kept on
the server.
"""

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from agentrl.gateway.call import AgentCall, RequestOptions
from agentrl.gateway.pictures import read_address
from agentrl.gateway.refusal import unsupported
from agentrl.gateway.session import AgentSession
from agentrl.gateway.wire import (
    Fields,
    Json,
    WireProtocol,
    WireRequest,
    as_json,
    assistant,
    call_of,
    chat_request,
    content_of,
    event,
    format_of,
    function,
    invalid,
    pieces,
    text_of,
)
from agentrl.tokens.encoded_image import EncodedImage
from agentrl.trajectory import Message, ToolCall

if TYPE_CHECKING:
    from openai.types.responses import Response

_FIELDS = Fields(
    supported=(
        "input",
        "instructions",
        "model",
        "max_output_tokens",
        "temperature",
        "top_p",
        "tools",
        "tool_choice",
        "stream",
        "text",
    ),
    ignored=(
        "access_programs",
        "client_metadata",
        "include",
        "metadata",
        "moderation",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
    ),
    refused={
        "previous_response_id": "send the whole conversation as input",
        "conversation": "send the whole conversation as input",
        "truncation": "the run's context decides; shorten the input",
        "top_logprobs": (
            "only the logprobs of the sampled tokens are known, and chat completions have them"
        ),
        "background": "wait for the answer",
    },
    neutral={
        "background": (False,),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    },
)
_TEXTS = ("input_text", "output_text", "text", "refusal")


def _read_picture(part: Mapping[str, Any], where: str) -> EncodedImage:
    if part.get("file_id"):
        raise unsupported(f"{where}: file_id", "no file is kept here; write image_url")
    return read_address(part.get("image_url"), where)


_PICTURES = {"input_image": _read_picture}


def _read(checked: Json, body: Json) -> WireRequest:
    given = checked.get("input")
    instructions = checked.get("instructions")
    messages = [Message("system", str(instructions))] if instructions else []
    items = [{"role": "user", "content": given}] if isinstance(given, str) else list(given or ())
    messages += _messages(items)
    options = RequestOptions(
        max_tokens=checked.get("max_output_tokens"),
        temperature=checked.get("temperature"),
        top_p=checked.get("top_p"),
        may_call=checked.get("tool_choice") != "none",
        format=format_of((checked.get("text") or {}).get("format")),
    )
    tools = [_read_tool(tool) for tool in checked.get("tools") or ()]
    return WireRequest(
        chat_request(messages, tools, options, model=str(checked.get("model") or "")),
        bool(checked.get("stream")),
        lambda session, call: as_json(_response(call, body)),
        lambda session, call: _events(call, body),
    )


def _as_typed(body: Json, session: AgentSession) -> Json:
    """The body as the vendor's type requires it, which is stricter than OpenAI's server.

    Some libraries leave out `strict` and `parameters` of tools. Others send references to earlier
    items instead of the items, or items of the model with their text alone. `text.verbosity`
    constrains no answer, and is dropped.
    """
    text, tools, items = body.get("text"), body.get("tools"), body.get("input")
    if isinstance(items, list) and any(map(_is_reference, items)):
        known = {
            item.id: item
            for call in session.tree.calls
            if len(call.answers) == 1
            for item in _output_items(call)
        }
        body = body | {
            "input": [_resolve_reference(item, known, place) for place, item in enumerate(items)]
        }
    if isinstance(body.get("input"), list):
        body = body | {"input": [*map(_complete_item, body["input"])]}
    if isinstance(text, dict):
        left = {
            key: value for key, value in text.items() if key != "verbosity" and value is not None
        }
        body = body | {"text": left}
    if isinstance(tools, list):
        body = body | {
            "tools": [_complete_tool(tool) if isinstance(tool, dict) else tool for tool in tools]
        }
    return body


def _complete_tool(tool: Json) -> Json:
    """The tool with all required fields, and without nulls, which some libraries send and others
    reject when the response repeats them.
    """
    return {"strict": False, "parameters": {}} | {
        name: value for name, value in tool.items() if value is not None
    }


def _complete_item(item: Any) -> Any:
    """The item with the fields that the type requires and OpenAI's server does not."""
    if not isinstance(item, dict):
        return item
    if item.get("type") == "reasoning":
        return {"id": "", "summary": []} | item
    content = item.get("content")
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return item
    parts = [_PART_DEFAULTS.get(str(part.get("type")), {}) | part for part in content]
    is_answer = item.get("role") == "assistant" and bool(parts)
    if is_answer and all(part.get("type") in ("output_text", "refusal") for part in parts):
        item = {"type": "message", "id": "", "status": "completed"} | item
    return item | {"content": parts}


_PART_DEFAULTS: Mapping[str, Json] = {
    "output_text": {"annotations": []},
    "input_image": {"detail": "auto"},
}
"""Fields that the type of a part requires, with values that change nothing."""


def _is_reference(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == "item_reference"


def _resolve_reference(item: Any, known: Mapping[str, Any], place: int) -> Any:
    """The item that a reference names; any other item as it is.

    Raises:
        CallRefusedError: the episode has no such item.
    """
    if not _is_reference(item):
        return item
    found = known.get(str(item.get("id")))
    if found is None:
        raise invalid(f"input[{place}]: this episode has no item {item.get('id')!r:.80}")
    return found.model_dump(mode="json", exclude_unset=True)


def _messages(items: list[Json]) -> Iterator[Message]:
    """The messages of items. The text and the calls of one answer are separate items, which are
    gathered until another item follows.
    """
    texts: list[str] = []
    calls: list[ToolCall] = []
    for place, item in enumerate(items):
        where, kind, role = f"input[{place}]", item.get("type", "message"), item.get("role")
        if kind == "reasoning":
            continue  # the model's own reasoning is in the tokens already
        if kind == "function_call":
            calls.append(call_of(item["call_id"], item["name"], item["arguments"]))
            continue
        if kind == "message" and role == "assistant" and not calls:
            texts.append(text_of(item["content"], where, _TEXTS))
            continue
        if texts or calls:
            yield assistant("".join(texts), calls)
            texts, calls = [], []
        if kind == "function_call_output":
            said = content_of(item["output"], where, _TEXTS, _PICTURES)
            yield Message("tool", said.text, tool_call_id=item["call_id"], images=said.images)
        elif kind == "message" and role == "assistant":
            texts.append(text_of(item["content"], where, _TEXTS))
        elif kind == "message" and role == "user":
            said = content_of(item["content"], where, _TEXTS, _PICTURES)
            yield Message("user", said.text, images=said.images)
        elif kind == "message" and role in ("system", "developer"):
            yield Message("system", text_of(item["content"], where, _TEXTS))
        else:
            raise unsupported(
                f"{where}: an item of type {kind!r}", "write messages and calls of functions"
            )
    if texts or calls:
        yield assistant("".join(texts), calls)


def _read_tool(tool: Json) -> Mapping[str, Any]:
    if tool.get("type") != "function":
        raise unsupported(f"a tool of type {tool.get('type')!r}", "tools are functions")
    return function(tool["name"], tool.get("description"), tool.get("parameters"))


def _output_items(call: AgentCall) -> list[Any]:
    from openai.types.responses import (
        ResponseFunctionToolCall,
        ResponseOutputMessage,
        ResponseOutputText,
        ResponseReasoningItem,
    )
    from openai.types.responses.response_reasoning_item import Summary

    (answer,) = call.answers
    items: list[Any] = []
    if answer.message.reasoning:
        summary = Summary(type="summary_text", text=answer.message.reasoning)
        items.append(
            ResponseReasoningItem(id=f"rs_{call.name}", type="reasoning", summary=[summary])
        )
    if answer.message.said or not answer.message.tool_calls:
        text = ResponseOutputText(type="output_text", text=answer.message.said, annotations=[])
        items.append(
            ResponseOutputMessage(
                id=f"msg_{call.name}",
                type="message",
                role="assistant",
                status="completed",
                content=[text],
            )
        )
    for one in answer.calls:
        items.append(
            ResponseFunctionToolCall(
                id=f"fc_{one.id}",
                type="function_call",
                call_id=one.id,
                name=one.name,
                arguments=json.dumps(one.arguments),
                status="completed",
            )
        )
    return items


def _response(call: AgentCall, body: Json, *, begun: bool = False) -> "Response":
    from openai.types.responses import Response

    (answer,) = call.answers
    prompt, sampled = call.prompt_length, len(answer.completion.token_ids)
    cut = answer.completion.finish_reason == "length"
    usage = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": answer.message.reasoning_tokens},
        "total_tokens": prompt + sampled,
    }
    ended = (
        {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        if cut
        else {}
    )
    made: Response = Response.model_validate(
        {
            "id": f"resp_{call.name}",
            "object": "response",
            "created_at": call.created,
            "model": str(body.get("model", "policy")),
            "output": [] if begun else _output_items(call),
            "status": "in_progress" if begun else "completed",
            "error": None,
            "incomplete_details": None,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata"),
            "parallel_tool_calls": True,
            "temperature": body.get("temperature"),
            "top_p": body.get("top_p"),
            "tool_choice": "auto",
            "tools": body.get("tools") or [],
            **({} if begun else {"usage": usage, **ended}),
        }
    )
    return made


def _events(call: AgentCall, body: Json) -> Iterator[bytes]:
    """The events of a stream: each item begins, grows and is done."""
    number = 0

    def made(kind: str, **fields: Any) -> bytes:
        nonlocal number
        number += 1
        return event(json.dumps({"type": kind, "sequence_number": number - 1, **fields}), kind)

    begun = _response(call, body, begun=True).model_dump(mode="json", exclude_unset=True)
    yield made("response.created", response=begun)
    yield made("response.in_progress", response=begun)
    for place, one in enumerate(_output_items(call)):
        item = one.model_dump(mode="json", exclude_unset=True)
        at = {"output_index": place, "item_id": item["id"]}
        if item["type"] == "message":
            empty, (part,) = {**item, "status": "in_progress", "content": []}, item["content"]
            yield made("response.output_item.added", output_index=place, item=empty)
            at["content_index"] = 0
            yield made("response.content_part.added", **at, part={**part, "text": ""})
            for piece in pieces(part["text"]):
                yield made("response.output_text.delta", **at, delta=piece, logprobs=[])
            yield made("response.output_text.done", **at, text=part["text"], logprobs=[])
            yield made("response.content_part.done", **at, part=part)
        elif item["type"] == "function_call":
            empty = {**item, "status": "in_progress", "arguments": ""}
            yield made("response.output_item.added", output_index=place, item=empty)
            for piece in pieces(item["arguments"]):
                yield made("response.function_call_arguments.delta", **at, delta=piece)
            yield made(
                "response.function_call_arguments.done",
                **at,
                arguments=item["arguments"],
                name=item["name"],
            )
        else:
            yield made(
                "response.output_item.added", output_index=place, item={**item, "summary": []}
            )
            (part,), at["summary_index"] = item["summary"], 0
            yield made("response.reasoning_summary_part.added", **at, part={**part, "text": ""})
            for piece in pieces(part["text"]):
                yield made("response.reasoning_summary_text.delta", **at, delta=piece)
            yield made("response.reasoning_summary_text.done", **at, text=part["text"])
            yield made("response.reasoning_summary_part.done", **at, part=part)
        yield made("response.output_item.done", output_index=place, item=item)
    whole = _response(call, body).model_dump(mode="json", exclude_unset=True)
    yield made(
        "response.incomplete" if whole["status"] == "incomplete" else "response.completed",
        response=whole,
    )


RESPONSES = WireProtocol(
    path="/v1/responses",
    type_name="openai.types.responses.response_create_params:ResponseCreateParams",
    required=(),
    fields=_FIELDS,
    reader=_read,
    typed=_as_typed,
)
