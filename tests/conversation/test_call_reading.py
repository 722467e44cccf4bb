"""What a model writes as a call reaches the environment to the letter and whole, or is told to be
unreadable.
"""

import re
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentrl.conversation import renderer as renderer_module
from agentrl.conversation.config import RendererConfig
from agentrl.conversation.declared import declared, value_of
from agentrl.conversation.family import find_family
from agentrl.conversation.harmony import read_harmony
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.conversation.tool_calls import ParsedReply, parse_tool_calls
from agentrl.conversation.tool_formats import of_schema
from agentrl.conversation.vllm_parsers import vllm_reader
from agentrl.trajectory import Completion, Message, ToolCall
from tests.chat_templates import templates, tokenizer_of
from tests.properties import examples
from tests.tiers import evenly

HARD = (
    "    if x:\n        return 1\n",
    "3.10",
    '{"a":1}',
    '"q"',
    "it's",
    "",
    "\n",
    "\n\n",
    "  ",
    " x ",
    "\tx\t",
    "true",
    "007",
    "None.",
    "é你好\u2028",
    "</div>",
    "<b>&amp;",
    "a\\nb",
    "\\",
    "[1,2]",
    "{{x}}",
    "1e5",
    "```py\nx\n```",
    "line\r\nline",
    "<parameter",
    "`",
    '{"name": "write", "arguments": {}}',
    "don’t\N{NO-BREAK SPACE}",
)
"""Texts that look like something else, or have white space that counts."""
TEXT: dict[str, Any] = {"type": "string"}
TYPES: dict[str, Any] = {
    **{f"text_{number}": TEXT for number in range(len(HARD))},
    "text": TEXT,
    "maybe": {"anyOf": [TEXT, {"type": "null"}]},
    "either": {"type": ["string", "integer"]},
    "chosen": {"$ref": "#/$defs/Choice"},
    "fixed": {"const": "1"},
    "lines": {"type": "array", "items": TEXT},
    "rows": {"type": "array", "items": {"type": "array", "items": TEXT}},
    "point": {
        "type": "object",
        "properties": {"name": TEXT, "at": {"type": "array", "items": {"type": "integer"}}},
    },
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "on": {"type": "boolean"},
}
WRITE = {
    "type": "function",
    "function": {
        "name": "write",
        "description": "Writes.",
        "parameters": {
            "type": "object",
            "properties": TYPES,
            "$defs": {"Choice": {"enum": ["1", "true", "b"]}},
        },
    },
}
WRITERS = (
    "deepseekv3",
    "gemma",
    "gemma4",
    "gemma4_v2",
    "gemma4_v5",
    "glm4moe",
    "gptoss",
    "llama3_1",
    "muse_glimmer",
    "nemotron_3_nano",
    "nemotron_3_ultra",
    "qwen2_5",
    "qwen3",
    "qwen3_5_nothink",
    "qwen3_5_think",
    "qwen3_8",
)
"""One template of each kind. Those of lfm2 are read by vLLM's parsers, which take seconds to
import.
"""
PYTHON = ("lfm2_2_5", "lfm2_2_5_v2")
"""Their templates write texts between quotes as they are, so that a backslash comes to mean
something else.
"""


@pytest.fixture(autouse=True)
def _without_vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "vllm" not in request.keywords:
        monkeypatch.setattr(renderer_module, "slow_call_reader", lambda *_: None)


@cache
def renderer(name: str) -> TemplateRenderer:
    tokenizer = tokenizer_of(name)
    return TemplateRenderer(tokenizer, RendererConfig(), (), find_family(tokenizer, {}, {}))


@cache
def prompt_of(one: TemplateRenderer) -> str:
    return one.decode(one.conversation([WRITE]).prompt([Message("user", "Go.")]).ids)


def written(one: TemplateRenderer, *calls: ToolCall) -> str:
    """The calls as the template writes them; in the canonical form if it writes none."""
    text = one.template.calls(calls) or "\n".join(call.render() for call in calls)
    for begin, end in (("<think>", "</think>"), ("<mm:think>", "</mm:think>")):
        if prompt_of(one).rstrip().endswith(begin) and end not in text:
            text = f"\n{end}\n\n{text}"
    return text


def got(one: TemplateRenderer, text: str, stopped: bool = True) -> tuple[ParsedReply, Message]:
    """What the environment reads, and the message that is kept."""
    conversation = one.conversation([WRITE])
    conversation.prompt([Message("user", "Go.")])
    ids = [*one.encode(text).tolist(), *([one.stop_token_ids[0]] if stopped else [])]
    action = conversation.answer(
        Completion(ids, [0.0] * len(ids), [0] * len(ids), "stop" if stopped else "length")
    )
    return parse_tool_calls(action), conversation.messages[-1]


def named(reply: ParsedReply) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, dict(call.arguments)) for call in reply.calls]


@pytest.mark.parametrize("name", WRITERS)
def test_arguments_reach_the_environment_as_the_template_writes_them(name: str) -> None:
    one = renderer(name)
    cases: list[dict[str, Any]] = [
        {f"text_{number}": text for number, text in enumerate(HARD)},
        {
            "lines": list(HARD),
            "rows": [["a", "1"], [" x "], []],
            "point": {"name": " 3.10", "at": [1, 2]},
        },
        {"maybe": "3.10", "either": "12", "chosen": "1", "fixed": "1", "text": "null"},
        {"count": -3, "share": 2.5, "on": True, "lines": []},
        {"on": False, "rows": [["x"]], "text": "only"},
        {},
    ]
    for case in cases:
        reply, message = got(one, written(one, ToolCall("write", case)))
        assert (named(reply), reply.errors) == ([("write", case)], ())
        assert not message.tool_calls or message.said == ""
    several = [
        ToolCall("write", {"text": " a"}),
        ToolCall("write", {}),
        ToolCall("write", {"text": "b\n"}),
    ]
    if name not in ("llama3_1", "llama3_2"):  # which refuse to write more than one
        if name == "gptoss":  # which writes the first alone
            text = "<|start|>assistant".join(written(one, call) + "<|call|>" for call in several)
        else:
            text = written(one, *several)
        assert named(got(one, text)[0]) == [("write", dict(call.arguments)) for call in several]


@pytest.mark.parametrize("name", [name for name in WRITERS if name not in ("llama3_1", "gptoss")])
def test_a_fence_in_an_argument_quotes_none_of_the_calls_after_it(name: str) -> None:
    one = renderer(name)
    calls = [ToolCall("write", {"text": text}) for text in ("a ``` b", "c", "`", "```", "d")]
    reply, _ = got(one, written(one, *calls))
    assert (named(reply), reply.errors) == ([("write", dict(one.arguments)) for one in calls], ())


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_nothink", "glm4moe", "gemma"])
def test_a_quoted_call_with_a_fence_in_an_argument_does_not_end_the_quotation(name: str) -> None:
    one = renderer(name)
    call = ToolCall("write", {"text": "a ``` b"})
    quotation = f"```\n{written(one, call)}\n```"
    reply, _ = got(one, f"{quotation}\n{written(one, call)}")
    assert "quoted" in " ".join(reply.errors)
    assert named(reply) == [("write", dict(call.arguments))]


@example(name="gemma4", text="\u00b9")  # a digit, and no number
@given(
    name=st.sampled_from(WRITERS),
    text=st.lists(
        st.sampled_from([*HARD, "<", ">", "</parameter>", "<tool_call>", "</arg_value>"])
        | st.text()
    ).map("".join),
)
@examples(200)
def test_any_text_at_all_is_read_as_it_was_written_or_told_to_be_unreadable(
    name: str, text: str
) -> None:
    one = renderer(name)
    call = ToolCall("write", {"text": text, "count": 3})
    if call.is_plain and one.decode(one.encode(text)) == text:
        reply, _ = got(one, written(one, call))
        assert named(reply) == [("write", dict(call.arguments))] or (
            not reply.calls and reply.errors
        )
        if "<" not in text:
            assert reply.calls, reply


@pytest.mark.vllm
@pytest.mark.parametrize(
    "name", evenly((name for name in templates() if "lfm2" in name or "glimmer" in name), 4)
)
def test_the_parsers_of_vllm_read_texts_as_they_were_written_or_tell_that_they_cannot(
    name: str,
) -> None:
    one = renderer(name)
    for text in HARD:
        reply, _ = got(one, written(one, ToolCall("write", {"text": text, "count": 3})))
        whole = named(reply) == [("write", {"text": text, "count": 3})]
        assert whole or (name in PYTHON and not reply.calls and reply.errors), (text, reply)


def test_an_answer_at_which_a_parser_raises_is_told_with_its_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = renderer("qwen3")
    assert one._family is not None

    def fail(*_: Any) -> Any:
        raise IndexError("list index out of range")

    monkeypatch.setattr(type(one._family), "read", fail)
    prompt, text = (
        one.encode("Go."),
        f"<think>\nHm.\n</think>\n\n{ToolCall('write', {'text': 'a'}).render()}",
    )
    reading = one.read(prompt, one.encode(text), [WRITE])
    assert (reading.reasoning, reading.calls) == ("Hm.", ())
    assert [unread.why for unread in reading.malformed] == [
        "the parser of calls refuses it (IndexError: list index out of range)"
    ]
    reply = parse_tool_calls(one.answer_message(prompt, one.encode(text), [WRITE]).content)
    assert not reply.calls
    assert "list index out of range" in reply.errors[0]
    assert not one.read(prompt, one.encode(text), ()).malformed  # no tools, no calls
    thought = one.read(prompt, one.encode("<think>\nHm, <tool_call>"), [WRITE])
    assert thought.cut
    assert not thought.malformed


def test_an_answer_that_does_not_fit_a_response_schema_is_told_with_the_words_of_its_reader() -> (
    None
):
    def parse(text: str) -> Any:
        raise ValueError("no match at 3")

    (unread,) = of_schema(parse)("<call>write", [WRITE]).malformed
    assert (
        unread.told == "the parser of calls refuses it (ValueError: no match at 3): '<call>write'"
    )


@pytest.mark.vllm
def test_an_error_that_a_parser_of_vllm_swallows_is_told() -> None:
    text = '<tool_call>\n{"name": "write", "arguments": {\n</tool_call>'
    (unread,) = vllm_reader(tokenizer_of("qwen3"), "hermes")(text, [WRITE]).malformed
    assert "JSONDecodeError" in unread.why
    assert vllm_reader(tokenizer_of("qwen3"), "hermes")("It is 3.", [WRITE]).malformed == ()


def spoiled(text: str) -> list[str]:
    """A text with calls, cut short, and with each of its tags and words left out, doubled, or
    replaced.
    """
    cuts = [text[:at] for at in range(1, len(text), max(1, len(text) // 40))]
    parts = [part for part in re.split(r"(<[^<>]*>?|[{}\[\]\",:]|\n)", text) if part]
    changed = [
        "".join([*parts[:at], *put, *parts[at + 1 :]])
        for at, part in enumerate(parts)
        for put in ([], [part, part], ["</x>"], [part, text], [text, part])
        if part.strip()
    ]
    return [
        *cuts,
        *changed,
        f"{text}{text}",
        f"{text} and {text}",
        f"```\n{text}\n```",
        f"`{text}`",
        f"I write {text}",
    ]


def plain(text: str) -> str:
    return re.sub(r"\s", "", text)


@pytest.mark.parametrize("name", evenly(WRITERS, 6))
def test_no_spoiled_call_is_run_half_or_dropped_in_silence(name: str) -> None:
    one = renderer(name)
    call = ToolCall("write", {"text": "left right", "count": 37})
    whole = written(one, call)
    begun = next((whole[: at + 8] for at in [whole.find("</think>")] if at >= 0), "")
    for text in (begun + one for one in spoiled(whole.removeprefix(begun))):
        reply, message = got(one, text, stopped=len(text) % 2 == 0)
        there = plain(text)
        for each in reply.calls:
            assert all(
                plain(str(part)) in there
                for part in (each.name, *each.arguments, *each.arguments.values())
            )
        if not reply.errors:
            seen = plain(f"{reply.text} {message.reasoning} {' '.join(map(str, named(reply)))}")
            for word in ("left", "right", "37"):
                assert there.count(word) == seen.count(word), (text, reply)


PARAMETERS = {"type": "object", "properties": {"text": TEXT}}
FIND = [
    {
        "type": "function",
        "function": {"name": "find", "description": "Finds.", "parameters": PARAMETERS},
    }
]


def told(name: str, text: str, tools: Any = FIND) -> tuple[str, Message]:
    """What the environment gets of an answer, and the message that is kept."""
    one = renderer(name)
    conversation = one.conversation(tools)
    conversation.prompt([Message("user", "Go.")])
    ids = one.encode(text)
    action = conversation.answer(Completion(ids, [0.0] * len(ids), [0] * len(ids), "stop"))
    return action, conversation.messages[-1]


@pytest.mark.parametrize(
    "text",
    [
        "left<|return|>",
        "<|message|>left<|return|>",
        "<|channel|>thought<|message|>left<|return|>",
        "<|channel|>analysis<|message|>Hm.<|end|>left<|return|>",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|message|>left<|return|>",
        "left<|channel|>final<|message|><|return|>",
        "<|channel|>commentary<|message|>left<|end|><|start|>assistant<|channel|>final<|message|><|return|>",
    ],
)
def test_no_text_of_gpt_oss_vanishes(text: str) -> None:
    for tools in ([], FIND):
        action, message = told("gptoss", text, tools)
        assert (action, message.said) == ("left", "left")
        assert message.reasoning == ("Hm." if "Hm." in text else "")


def test_gpt_oss_goes_on_in_the_channel_that_its_prompt_has_opened() -> None:
    tokenizer = tokenizer_of("gptoss")
    encode = renderer("gptoss").encode
    opened = encode("Go.<|end|><|start|>assistant<|channel|>analysis<|message|>").tolist()
    call = (
        '<|start|>assistant<|channel|>commentary to=functions.write<|message|>{"text": "a"}<|call|>'
    )
    found = read_harmony(tokenizer, opened, encode(f"Hm.<|end|>{call}").tolist())
    assert (found.reasoning, found.content, found.malformed) == ("Hm.", "", ())
    assert [(one.name, one.arguments) for one in found.calls] == [("write", {"text": "a"})]
    cut = read_harmony(tokenizer, opened, encode("Hm, wha").tolist())
    assert (cut.reasoning, cut.content, cut.cut) == ("Hm, wha", "", True)
    plain = encode("Go.<|end|><|start|>assistant").tolist()
    assert (
        read_harmony(tokenizer, plain, encode("<|channel|>final<|message|>Left.").tolist()).content
        == "Left."
    )


@pytest.mark.parametrize("end", ["<|call|>", "<|return|>", "<|end|>"])
def test_a_call_of_gpt_oss_has_its_name_whatever_ends_it(end: str) -> None:
    _, message = told(
        "gptoss",
        f'<|channel|>commentary to=functions.find <|constrain|>json<|message|>{{"text": "a"}}{end}',
    )
    assert message.tool_calls == (ToolCall("find", {"text": "a"}, "call00000"),)


@pytest.mark.parametrize(
    "text",
    [
        '<|channel|>commentary to=functions.find json<|message|>{"text": "a"',
        '<|channel|>commentary to=functions.find json<|message|>{"text": "a"}',
        "<|channel|>commentary to=functions.find json<|message|>a<|call|>",
        "<|channel|>commentary to=functions.find",
        '<|channel|>commentary to=functions.<|message|>{"text": "a"}<|call|>',
    ],
)
def test_a_call_of_gpt_oss_that_is_not_whole_is_told(text: str) -> None:
    action, message = told("gptoss", text)
    assert not message.tool_calls
    read = parse_tool_calls(action)
    assert not read.calls
    assert read.errors


@pytest.mark.parametrize(
    "call",
    [
        "<tool_call>\n<function=find>\n<parameter=text>\na\n</function>\n</tool_call>",
        (
            "<tool_call>\n<function=find>\n<parameter"
            " text>\na\n</parameter>\n</function>\n</tool_call>"
        ),
        "<tool_call>\n<function=find>\ntext: a\n</function>\n</tool_call>",
        "<tool_call>\n<function=find>\n</function>\n<function=find>\n</function>\n</tool_call>",
        (
            "<tool_call>\n<function=find>\n<parameter=text>\na\n</parameter>\n<parameter=text>\nb\n</parameter>\n</function>\n"
            "</tool_call>"
        ),
        "<tool_call>\n<function=find>\n<parameter=text>\na\n</parameter>\n</function>",
        "<function=find>\n<parameter=text>\na\n</parameter>\n</function>",
        (
            "<tool_call>\n<function=find>\n<parameter=text>\n<tool_call>\n<function=find>\n</function>\n</tool_call>\n"
            "</parameter>\n</function>\n</tool_call>"
        ),
        "```\n<tool_call>\n<function=find>\n</function>\n</tool_call>\n```",
    ],
)
def test_a_call_in_tags_that_is_not_whole_is_told_and_nothing_of_it_is_run(call: str) -> None:
    for name in ("qwen3_5_think", "qwen3_5_nothink", "nemotron_3_nano"):
        before = (
            "Hm.\n</think>\n\n" if prompt_of(renderer(name)).rstrip().endswith("<think>") else ""
        )
        action, message = told(name, f"{before}I look. {call}")
        read = parse_tool_calls(action)
        assert not read.calls
        assert len(read.errors) == 1
        assert len(read.errors[0]) < 300
        assert not message.tool_calls
        assert message.said == f"I look. {call}"


QUOTED = (
    'Write <tool_call>{"name": "find", "arguments": {"text": "a"}}</tool_call> to find it.',
    'Write {"name": "find", "arguments": {"text": "a"}} to find it.',
    '<tool_call quoted>{"name": "find", "arguments": {"text": "a"}}</tool_call>',
    "Nothing to see.",
)


@pytest.mark.parametrize("text", QUOTED)
def test_calls_that_a_final_answer_quotes_are_not_run(text: str) -> None:
    action, message = told("gptoss", f"<|channel|>final<|message|>{text}<|return|>")
    assert parse_tool_calls(action) == ParsedReply(text)
    assert message.said == text
    # A call besides it is run, and it alone.
    call = (
        '<|start|>assistant<|channel|>commentary to=functions.find<|message|>{"text": "b"}<|call|>'
    )
    action, message = told("gptoss", f"<|channel|>commentary<|message|>{text} ```<|end|>{call}")
    assert named(parse_tool_calls(action)) == [("find", {"text": "b"})]
    assert parse_tool_calls(action).text == message.said == f"{text} ```"


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "gemma"])
def test_a_call_in_the_canonical_form_is_not_run_where_it_is_quoted_and_the_model_is_told(
    name: str,
) -> None:
    call = ToolCall("find", {"text": "a"})
    for text in (f"Write:\n```\n{call.render()}\n```\n", f"Write `{call.render()}`."):
        read = parse_tool_calls(told(name, text)[0])
        assert not read.calls
        assert "quoted in backticks" in read.errors[0]
    both = parse_tool_calls(told(name, f"```py\nx\n```\n{call.render()}")[0])
    assert both.calls == (call,)


def test_a_call_with_other_keys_is_not_read_half() -> None:
    for body in (
        '{"name": "find", "text": "a"}',
        '{"name": "find", "arguments": {}, "parameters": {"text": "a"}}',
    ):
        read = parse_tool_calls(f"<tool_call>\n{body}\n</tool_call>")
        assert not read.calls
        assert "which no call has" in read.errors[0]


@given(
    text=st.lists(st.sampled_from(["<tool_call>", "<tool_call quoted>", " ", "a", "{", "\n"])).map(
        "".join
    )
)
@examples(50)
def test_what_an_answer_says_is_kept_whatever_it_looks_like(text: str) -> None:
    _, message = told("gptoss", f"<|channel|>final<|message|>{text}<|return|>")
    assert message.said == text.strip()


@pytest.mark.parametrize("name", ["glm4moe", "qwen3_5_think", "qwen3", "nemotron_3_nano"])
def test_empty_reasoning_is_no_part_of_the_action(name: str) -> None:
    begun = prompt_of(renderer(name)).rstrip().endswith("<think>")
    for text in ("</think>\n\nleft", "<think></think>\n\nleft", "<think>\n\n</think>\n\nleft"):
        if begun is text.startswith("</think>"):
            assert told(name, text, [])[0] == "left"
            assert told(name, text)[0] == "left"


@pytest.mark.parametrize(
    ("written", "schema", "value"),
    [
        ("3.10", TEXT, "3.10"),
        ("3.10", {"type": "number"}, 3.1),
        (" 3 ", {"type": "integer"}, 3),
        ("True", {"type": "boolean"}, True),
        ("None", {"type": ["integer", "null"]}, None),
        ("null", {"type": ["string", "null"]}, None),
        ("null", TEXT, "null"),
        ("12", {"anyOf": [TEXT, {"type": "integer"}]}, "12"),
        ('["a"]', {"anyOf": [TEXT, {"type": "array"}]}, ["a"]),
        ('{"a":1}', {"oneOf": [TEXT, {"type": "array"}]}, '{"a":1}'),
        ("1", {"enum": ["1", "2"]}, "1"),
        ("1", {"enum": [1, 2]}, 1),
        ("1", {"allOf": [{"$ref": "#/$defs/Name"}]}, "1"),
        ("1", {"$ref": "#/$defs/Loop"}, 1),
        ("1", {}, 1),
        ("1.0", {}, 1.0),
        ("1.00", {}, "1.00"),
        ('{"a":1}', {}, '{"a":1}'),
        ('{"a": 1}', {}, {"a": 1}),
        ('"q"', {}, '"q"'),
        ("NaN", {"type": "number"}, "NaN"),
        ("two", {"type": "integer"}, "two"),
    ],
)
def test_what_stands_between_tags_is_what_the_tool_declares(
    written: str, schema: Any, value: Any
) -> None:
    root = {"properties": {"x": schema}, "$defs": {"Name": TEXT, "Loop": {"$ref": "#/$defs/Loop"}}}
    found = value_of(
        written,
        declared([{"type": "function", "function": {"name": "f", "parameters": root}}], "f").inner(
            "x"
        ),
    )
    assert found == value
    assert type(found) is type(value)
