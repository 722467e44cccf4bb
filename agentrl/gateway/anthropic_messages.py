"""Anthropic's messages: `POST /v1/messages`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentrl.gateway.call import AgentAnswer, AgentCall, RequestOptions
from agentrl.gateway.pictures import read_base64
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
    function,
    invalid,
    pieces,
    text_of,
)
from agentrl.tokens.encoded_image import EncodedImage
from agentrl.trajectory import Message

if TYPE_CHECKING:
    from anthropic.types import Message as AnthropicMessage

_FIELDS = Fields(
    supported=(
        "messages",
        "model",
        "max_tokens",
        "system",
        "stop_sequences",
        "temperature",
        "top_p",
        "tools",
        "tool_choice",
        "stream",
    ),
    ignored=(
        "metadata",
        "service_tier",
        "cache_control",
        "thinking",
        "top_k",
        "speed",
        "inference_geo",
        "user_profile_id",
        "context_management",
        "workspace_id",
    ),
    refused={
        "output_config": "the engines do not constrain answers; describe the format in the prompt"
    },
    neutral={"output_config": ({},)},
)


def _read(checked: Json, _: Json) -> WireRequest:
    messages = (
        [Message("system", text_of(checked["system"], "system"))] if checked.get("system") else []
    )
    for place, message in enumerate(checked["messages"]):
        messages += _messages(message, f"messages[{place}]")
    choice = checked.get("tool_choice") or {}
    options = RequestOptions(
        max_tokens=checked.get("max_tokens"),
        temperature=checked.get("temperature"),
        top_p=checked.get("top_p"),
        stop=tuple(checked.get("stop_sequences") or ()),
        may_call=choice.get("type") != "none",
    )
    tools = [_read_tool(tool) for tool in checked.get("tools") or ()]
    model = str(checked["model"])
    return WireRequest(
        chat_request(messages, tools, options, model=model),
        bool(checked.get("stream")),
        lambda session, call: as_json(_answer(call, model)),
        lambda session, call: _events(call, model),
    )


def _drop_effort(body: Json, _: AgentSession) -> Json:
    """The body without `output_config.effort`, which constrains no answer. Other entries stay, and
    are refused.
    """
    config = body.get("output_config")
    if not isinstance(config, dict):
        return body
    left = {key: value for key, value in config.items() if key != "effort" and value is not None}
    return body | {"output_config": left}


def _messages(message: Json, where: str) -> Iterator[Message]:
    """The messages of one of Anthropic's, in which tool results are blocks of a user message."""
    role, content = message["role"], message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if role == "assistant":
        texts = [
            block
            for block in blocks
            if block.get("type") not in ("tool_use", "thinking", "redacted_thinking")
        ]
        calls = [
            call_of(block["id"], block["name"], block["input"])
            for block in blocks
            if block.get("type") == "tool_use"
        ]
        yield assistant(text_of(texts, where), calls)
        return
    texts = []
    for block in blocks:
        if block.get("type") != "tool_result":
            texts.append(block)
            continue
        if texts:
            yield _user_message(role, texts, where)
            texts = []
        said = content_of(block.get("content"), where, ("text",), _PICTURES)
        yield Message("tool", said.text, tool_call_id=block["tool_use_id"], images=said.images)
    if texts or not blocks:
        yield _user_message(role, texts, where)


def _user_message(role: Any, blocks: Sequence[Json], where: str) -> Message:
    said = content_of(blocks, where, ("text",), _PICTURES)
    return Message(role, said.text, images=said.images)


def _read_picture(block: Mapping[str, Any], where: str) -> EncodedImage:
    source = block["source"]
    if source.get("type") != "base64":
        raise unsupported(
            f"{where}: a source of type {source.get('type')!r}",
            "pictures are never fetched; write one of type base64",
        )
    return read_base64(source.get("data"), source.get("media_type"), where)


_PICTURES = {"image": _read_picture}


def _read_tool(tool: Json) -> Mapping[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise unsupported(
            f"a tool of type {tool['type']!r}", "the model has no tools of its own; describe yours"
        )
    if "input_schema" not in tool:
        raise invalid(f"the tool {tool.get('name')!r:.80} has no input_schema")
    return function(tool["name"], tool.get("description"), tool["input_schema"])


def _stop_reason(answer: AgentAnswer) -> Any:
    if answer.completion.finish_reason == "length":
        return "max_tokens"
    if answer.message.tool_calls:
        return "tool_use"
    return "stop_sequence" if answer.stopped_at else "end_turn"


def _content_blocks(answer: AgentAnswer) -> list[Any]:
    from anthropic.types import TextBlock, ThinkingBlock, ToolUseBlock

    blocks: list[Any] = []
    if answer.message.reasoning:
        blocks.append(
            ThinkingBlock(type="thinking", thinking=answer.message.reasoning, signature="")
        )
    if answer.message.said:
        blocks.append(TextBlock(type="text", text=answer.message.said))
    for call in answer.calls:
        blocks.append(
            ToolUseBlock(type="tool_use", id=call.id, name=call.name, input=dict(call.arguments))
        )
    return blocks


def _answer(call: AgentCall, model: str) -> "AnthropicMessage":
    from anthropic.types import Message as AnthropicMessage
    from anthropic.types import Usage

    (answer,) = call.answers
    return AnthropicMessage(
        id=f"msg_{call.name}",
        type="message",
        role="assistant",
        model=model,
        content=_content_blocks(answer),
        stop_reason=_stop_reason(answer),
        stop_sequence=answer.stopped_at or None,
        usage=Usage(
            input_tokens=call.prompt_length, output_tokens=len(answer.completion.token_ids)
        ),
    )


def _events(call: AgentCall, model: str) -> Iterator[bytes]:
    from anthropic.types import (
        MessageDeltaUsage,
        RawContentBlockStopEvent,
        RawMessageDeltaEvent,
        RawMessageStartEvent,
        RawMessageStopEvent,
    )
    from anthropic.types.raw_message_delta_event import Delta

    whole = _answer(call, model)
    nothing_yet: Json = {"content": [], "stop_reason": None, "stop_sequence": None}
    begun = whole.model_copy(
        update=nothing_yet | {"usage": whole.usage.model_copy(update={"output_tokens": 0})}
    )
    yield _event(RawMessageStartEvent(type="message_start", message=begun))
    for place, block in enumerate(whole.content):
        yield from _block_events(block, place)
        yield _event(RawContentBlockStopEvent(type="content_block_stop", index=place))
    delta = Delta(stop_reason=whole.stop_reason, stop_sequence=whole.stop_sequence)
    used = MessageDeltaUsage(
        input_tokens=whole.usage.input_tokens, output_tokens=whole.usage.output_tokens
    )
    yield _event(RawMessageDeltaEvent(type="message_delta", delta=delta, usage=used))
    yield _event(RawMessageStopEvent(type="message_stop"))


def _block_events(block: Any, place: int) -> Iterator[bytes]:
    from anthropic.types import (
        InputJSONDelta,
        RawContentBlockDeltaEvent,
        RawContentBlockStartEvent,
        TextDelta,
        ThinkingDelta,
    )

    empty: Json
    deltas: list[Any]
    if block.type == "text":
        empty, deltas = (
            {"text": ""},
            [TextDelta(type="text_delta", text=piece) for piece in pieces(block.text)],
        )
    elif block.type == "thinking":
        empty = {"thinking": ""}
        deltas = [
            ThinkingDelta(type="thinking_delta", thinking=piece) for piece in pieces(block.thinking)
        ]
    else:
        written = json.dumps(block.input)
        empty = {"input": {}}
        deltas = [
            InputJSONDelta(type="input_json_delta", partial_json=piece) for piece in pieces(written)
        ]
    begun = block.model_copy(update=empty)
    yield _event(
        RawContentBlockStartEvent(type="content_block_start", index=place, content_block=begun)
    )
    for delta in deltas:
        yield _event(
            RawContentBlockDeltaEvent(type="content_block_delta", index=place, delta=delta)
        )


def _event(made: Any) -> bytes:
    return event(made.model_dump_json(exclude_unset=True), made.type)


MESSAGES = WireProtocol(
    path="/v1/messages",
    type_name="anthropic.types.message_create_params:MessageCreateParams",
    required=("model", "messages", "max_tokens"),
    fields=_FIELDS,
    reader=_read,
    typed=_drop_effort,
)

COUNTED = WireProtocol(
    path="/v1/messages/count_tokens",
    type_name="anthropic.types.message_count_tokens_params:MessageCountTokensParams",
    required=("model", "messages"),
    fields=_FIELDS,
    reader=_read,
    typed=_drop_effort,
)
"""The same without an answer: only the length of the prompt is asked for."""
