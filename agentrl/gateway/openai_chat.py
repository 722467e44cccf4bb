"""OpenAI's chat completions: `POST /v1/chat/completions`."""

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from agentrl.gateway.call import AgentAnswer, AgentCall, RequestOptions
from agentrl.gateway.pictures import read_address
from agentrl.gateway.refusal import unsupported
from agentrl.gateway.session import AgentSession
from agentrl.gateway.wire import (
    Fields,
    Json,
    WireProtocol,
    WireRequest,
    assistant,
    call_of,
    chat_request,
    content_of,
    event,
    format_of,
    function,
    pieces,
    text_of,
)
from agentrl.trajectory import Message, ToolCall

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion
    from openai.types.chat.chat_completion import ChoiceLogprobs
    from openai.types.completion_usage import CompletionUsage

_FIELDS = Fields(
    supported=(
        "messages",
        "model",
        "n",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "stop",
        "seed",
        "tools",
        "tool_choice",
        "stream",
        "stream_options",
        "logprobs",
        "response_format",
    ),
    ignored=(
        "metadata",
        "store",
        "user",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "service_tier",
        "reasoning_effort",
        "verbosity",
        "moderation",
        "prediction",
        "parallel_tool_calls",
    ),
    refused={
        "top_logprobs": "only the logprobs of the sampled tokens are known",
        "functions": "write tools",
        "function_call": "write tool_choice",
        "frequency_penalty": "the run decides how the policy is sampled (rollout.sampling)",
        "presence_penalty": "the run decides how the policy is sampled (rollout.sampling)",
        "logit_bias": "the run decides how the policy is sampled (rollout.sampling)",
    },
    neutral={
        "top_logprobs": (0,),
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "logit_bias": ({},),
        "modalities": (["text"],),
    },
)


def _read(checked: Json, _: Json) -> WireRequest:
    model, wants_logprobs = str(checked["model"]), bool(checked.get("logprobs"))
    with_usage = bool((checked.get("stream_options") or {}).get("include_usage"))
    stop = checked.get("stop") or ()
    max_tokens = checked.get("max_completion_tokens")
    if max_tokens is None:  # the older name
        max_tokens = checked.get("max_tokens")
    options = RequestOptions(
        max_tokens=max_tokens,
        temperature=checked.get("temperature"),
        top_p=checked.get("top_p"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        seed=checked.get("seed"),
        may_call=checked.get("tool_choice") != "none",
        format=format_of(checked.get("response_format")),
    )
    messages = [_message(message, place) for place, message in enumerate(checked["messages"])]
    tools = [_read_tool(tool) for tool in checked.get("tools") or ()]
    request = chat_request(
        messages, tools, options, 1 if checked.get("n") is None else checked["n"], model
    )
    return WireRequest(
        request,
        bool(checked.get("stream")),
        lambda session, call: (
            _completion(session, call, model, wants_logprobs)
            .model_dump_json(exclude_unset=True)
            .encode()
        ),
        lambda session, call: _chunks(session, call, model, wants_logprobs, with_usage),
    )


def _message(message: Json, place: int) -> Message:
    where, role = f"messages[{place}]", message["role"]
    if role == "user":
        said = content_of(message["content"], where, ("text",), _PICTURES)
        return Message("user", said.text, images=said.images)
    if role in ("system", "developer"):
        return Message("system", text_of(message["content"], where))
    if role == "tool":
        return Message(
            "tool", text_of(message["content"], where), tool_call_id=message["tool_call_id"]
        )
    if role == "assistant":
        for name, instead in _REFUSED_IN_ANSWERS.items():
            if message.get(name):
                raise unsupported(f"{where}: {name}", instead)
        calls = [_call(call, where) for call in message.get("tool_calls") or ()]
        return assistant(text_of(message.get("content"), where, ("text", "refusal")), calls)
    raise unsupported(f"{where}: the role {role!r}", "write a message of the role tool")


_PICTURES = {
    "image_url": lambda part, where: read_address(part["image_url"].get("url"), where),
}
_REFUSED_IN_ANSWERS = {"function_call": "write tool_calls", "audio": "the model reads text"}


def _call(call: Json, where: str) -> ToolCall:
    if call.get("type") != "function":
        raise unsupported(f"{where}: a call of type {call.get('type')!r}", "tools are functions")
    return call_of(call["id"], call["function"]["name"], call["function"]["arguments"])


def _read_tool(tool: Json) -> Mapping[str, Any]:
    if tool.get("type") != "function":
        raise unsupported(f"a tool of type {tool.get('type')!r}", "tools are functions")
    described = tool["function"]
    return function(described["name"], described.get("description"), described.get("parameters"))


def _finish_reason(answer: AgentAnswer) -> Any:
    if answer.completion.finish_reason == "length":
        return "length"
    return "tool_calls" if answer.message.tool_calls else "stop"


def _usage(call: AgentCall) -> "CompletionUsage":
    from openai.types.completion_usage import CompletionUsage

    prompt, sampled = (
        call.prompt_length,
        sum(len(answer.completion.token_ids) for answer in call.answers),
    )
    return CompletionUsage(
        prompt_tokens=prompt, completion_tokens=sampled, total_tokens=prompt + sampled
    )


def _completion(
    session: AgentSession, call: AgentCall, model: str, wants_logprobs: bool
) -> "ChatCompletion":
    from openai.types.chat import ChatCompletion, ChatCompletionMessage
    from openai.types.chat.chat_completion import Choice
    from openai.types.chat.chat_completion_message_function_tool_call import (
        ChatCompletionMessageFunctionToolCall,
        Function,
    )

    choices = []
    for place, answer in enumerate(call.answers):
        calls = [
            ChatCompletionMessageFunctionToolCall(
                id=one.id,
                type="function",
                function=Function(name=one.name, arguments=json.dumps(one.arguments)),
            )
            for one in answer.calls
        ]
        more: Json = {"tool_calls": calls} if calls else {}
        if answer.message.reasoning:
            more["reasoning_content"] = answer.message.reasoning  # vLLM's extension
        message = ChatCompletionMessage(
            role="assistant", content=answer.message.said or None, refusal=None, **more
        )
        logprobs = _logprobs(session, answer) if wants_logprobs else None
        choices.append(
            Choice(
                index=place,
                message=message,
                finish_reason=_finish_reason(answer),
                logprobs=logprobs,
            )
        )
    return ChatCompletion(
        id=f"chatcmpl-{call.name}",
        object="chat.completion",
        created=call.created,
        model=model,
        choices=choices,
        usage=_usage(call),
    )


def _logprobs(session: AgentSession, answer: AgentAnswer) -> "ChoiceLogprobs":
    from openai.types.chat.chat_completion import ChoiceLogprobs
    from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob

    tokens = []
    for place, logprob in enumerate(answer.completion.logprobs.tolist()):
        text = session.decoded(answer.completion.token_ids[place : place + 1])
        # A token with a part of a character decodes to U+FFFD, whose bytes are not the token's.
        known = None if "\ufffd" in text else list(text.encode())
        tokens.append(
            ChatCompletionTokenLogprob(token=text, bytes=known, logprob=logprob, top_logprobs=[])
        )
    return ChoiceLogprobs(content=tokens)


def _chunks(
    session: AgentSession, call: AgentCall, model: str, wants_logprobs: bool, with_usage: bool
) -> Iterator[bytes]:
    from openai.types.chat import ChatCompletionChunk
    from openai.types.chat.chat_completion_chunk import Choice

    def chunk(choices: list[Choice], **more: Any) -> bytes:
        made: ChatCompletionChunk = ChatCompletionChunk(
            id=f"chatcmpl-{call.name}",
            object="chat.completion.chunk",
            created=call.created,
            model=model,
            choices=choices,
            **more,
        )
        return event(made.model_dump_json(exclude_unset=True))

    for place, answer in enumerate(call.answers):
        for delta in _deltas(answer):
            yield chunk([Choice(index=place, delta=delta, finish_reason=None)])
        logprobs: Any = _logprobs(session, answer).model_dump() if wants_logprobs else None
        end = Choice.model_validate(
            {
                "index": place,
                "delta": {},
                "finish_reason": _finish_reason(answer),
                "logprobs": logprobs,
            }
        )
        yield chunk([end])
    if with_usage:
        yield chunk([], usage=_usage(call))
    yield event("[DONE]")


def _deltas(answer: AgentAnswer) -> Iterator[Any]:
    from openai.types.chat.chat_completion_chunk import (
        ChoiceDelta,
        ChoiceDeltaToolCall,
        ChoiceDeltaToolCallFunction,
    )

    yield ChoiceDelta(role="assistant", content="")
    for piece in pieces(answer.message.reasoning):
        yield ChoiceDelta.model_validate({"reasoning_content": piece})
    for piece in pieces(answer.message.said):
        yield ChoiceDelta(content=piece)
    for place, call in enumerate(answer.calls):
        begun = ChoiceDeltaToolCallFunction(name=call.name, arguments="")
        yield ChoiceDelta(
            tool_calls=[
                ChoiceDeltaToolCall(index=place, id=call.id, type="function", function=begun)
            ]
        )
        for piece in pieces(json.dumps(call.arguments)):
            more = ChoiceDeltaToolCallFunction(arguments=piece)
            yield ChoiceDelta(tool_calls=[ChoiceDeltaToolCall(index=place, function=more)])


CHAT = WireProtocol(
    path="/v1/chat/completions",
    type_name="openai.types.chat.completion_create_params:CompletionCreateParams",
    required=("model", "messages"),
    fields=_FIELDS,
    reader=_read,
)
