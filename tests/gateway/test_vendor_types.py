"""JSON is checked as pydantic checks it by the vendors' types, only quicker."""

from pkgutil import resolve_name

import pytest
from pydantic import TypeAdapter, ValidationError

from agentrl.gateway.anthropic_messages import MESSAGES
from agentrl.gateway.google_content import GENERATE
from agentrl.gateway.openai_chat import CHAT
from agentrl.gateway.openai_responses import RESPONSES
from agentrl.gateway.vendor_types import checker
from agentrl.gateway.wire import WireProtocol
from tests.gateway.served import TOOL
from tests.tiers import evenly

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
CHAT_MESSAGES = [
    {"role": "system", "content": "a"},
    {"role": "developer", "content": [{"type": "text", "text": "a"}]},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "a"},
            {"type": "image_url", "image_url": {"url": "b"}},
        ],
    },
    {
        "role": "assistant",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}],
    },
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    {"role": "tool", "tool_call_id": "1", "content": "a"},
]
BLOCKS = [
    {"type": "text", "text": "a"},
    {"type": "tool_use", "id": "1", "name": "f", "input": {"a": [1]}},
    {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "a"}, IMAGE]},
    {"type": "thinking", "thinking": "a", "signature": "b"},
    IMAGE,
]
ITEMS = [
    {"role": "user", "content": "a"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "a"},
    {"type": "reasoning", "id": "1", "summary": []},
]
WRONG = [
    5,
    None,
    "a",
    [],
    {},
    {"role": "robot"},
    {"type": "robot"},
    {"role": "user"},
    {"type": "text", "text": 5},
]


def chat(**fields):
    return CHAT, {"model": "m", **fields}


def claude(*messages, **fields):
    return MESSAGES, {"model": "m", "max_tokens": 5, "messages": messages, **fields}


def responses(given, **fields):
    return RESPONSES, {"input": given, **fields}


CASES = [
    *(chat(messages=[message]) for message in [*CHAT_MESSAGES, *WRONG]),
    *(chat(messages=CHAT_MESSAGES, tools=[tool], stop=["a"]) for tool in [TOOL, *WRONG]),
    # Which pydantic takes for an empty sequence.
    *(chat(messages=wrong) for wrong in WRONG if wrong != {}),
    chat(messages=[], stream=True, response_format={"type": "json_object"}),
    chat(messages=[], stream=5),
    *(claude({"role": "user", "content": [block]}) for block in [*BLOCKS, *WRONG]),
    *(claude(message) for message in WRONG),
    claude(
        {"role": "assistant", "content": "a"},
        stream=True,
        tools=[{"name": "f", "input_schema": {"type": "object"}}],
    ),
    *(responses([item]) for item in [*ITEMS, *WRONG]),
    *(chat(messages=[], metadata=metadata) for metadata in ({"a": "b"}, {"a": 5}, 5)),
    *(claude(metadata=metadata) for metadata in ({"user_id": "b"}, {"user_id": 5})),
    *(responses("a", metadata=metadata) for metadata in ({"a": "b"}, {"a": 5})),
    responses(
        "a",
        stream=True,
        tools=[{"type": "function", "name": "f", "parameters": {}, "strict": None}],
    ),
]


@pytest.mark.parametrize(("protocol", "body"), evenly(CASES, 40))
def test_json_is_checked_as_the_vendors_type_does(protocol: WireProtocol, body):
    body = (
        {**body, "messages": [*body["messages"]]}
        if isinstance(body.get("messages"), tuple)
        else body
    )
    ours = result_of(
        lambda: checker(protocol.type_name, bool(body.get("stream"))).validate_python(body)
    )
    slow = TypeAdapter(resolve_name(protocol.type_name))
    assert ours == result_of(lambda: in_lists(slow.validate_python(body)))


def result_of(check):
    """What is checked, or that it is wrong: its type and place are said differently."""
    try:
        return check()
    except (ValidationError, TypeError):
        return "wrong"


def in_lists(value):
    """The same with lists for the generators that check sequences as they are read."""
    if isinstance(value, dict):
        return {key: in_lists(one) for key, one in value.items()}
    if isinstance(value, str | int | float) or value is None:
        return value
    return [in_lists(one) for one in value]


@pytest.mark.parametrize("wrong", [5, {}], ids=["no object", "an empty one"])
@pytest.mark.parametrize(
    ("protocol", "field"),
    [(CHAT, "messages"), (MESSAGES, "messages"), (RESPONSES, "input"), (GENERATE, "contents")],
)
def test_a_list_is_checked_up_to_its_first_wrong_item(protocol: WireProtocol, field, wrong):
    """A finding takes a hundred bytes, and a request may have millions of wrong items, each wrong
    in hundreds of ways.
    """

    def findings(count: int) -> int:
        body = {"model": "m", "max_tokens": 5, field: [wrong] * count, "tools": [5] * count}
        with pytest.raises(ValidationError) as refused:
            checker(protocol.type_name, False).validate_python(body)
        return refused.value.error_count()

    assert findings(1000) == findings(1)
