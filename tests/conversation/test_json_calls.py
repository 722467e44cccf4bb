"""Calls in JSON between marks of a family's own: as the templates of Mistral, Cohere and Apertus
write them, which TRL does not ship. The templates here have their forms, in short.
"""

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.conversation import renderer as renderer_module
from agentrl.conversation import tool_formats
from agentrl.conversation.config import RendererConfig
from agentrl.conversation.json_calls import JsonSyntax
from agentrl.conversation.reading import Reading
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.conversation.tool_formats import PROBE_CALL, accounted, slow_call_reader, syntax_of
from agentrl.errors import ConfigError
from agentrl.trajectory import ToolCall
from tests.chat_templates import byte_tokenizer, tokenizer_of
from tests.conversation.test_call_reading import HARD, WRITE, got, named, plain, spoiled, written
from tests.conversation.test_conversations import check_all_there, spoken
from tests.properties import examples

_MISTRAL = """
{%- if messages[0].role == 'system' -%}
  [SYSTEM_PROMPT]{{ messages[0].content }}[/SYSTEM_PROMPT]
  {%- set messages = messages[1:] -%}
{%- endif -%}
{%- set ns = namespace(turn=0) -%}
{%- for m in messages -%}
  {%- if m.role != 'tool' and not m.tool_calls -%}
    {%- if (m.role == 'user') != (ns.turn % 2 == 0) -%}
      {{- raise_exception('roles must alternate user/assistant/user/assistant/...') -}}
    {%- endif -%}
    {%- set ns.turn = ns.turn + 1 -%}
  {%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}
    {%- if tools and loop.first -%}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]
    {%- endif -%}
    [INST]{{ m.content }}[/INST]
  {%- elif m.role == 'tool' -%}
    [TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}[/TOOL_RESULTS]
  {%- elif m.tool_calls -%}
    {%- for call in m.tool_calls -%}
      [TOOL_CALLS]{{ call.function.name }}[CALL_ID]{{ call.id }}[ARGS]
      {{- call.function.arguments | tojson }}
    {%- endfor -%}
    </s>
  {%- else -%}
    {{ m.content }}</s>
  {%- endif -%}
{%- endfor -%}
"""
_COHERE = """
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}
    <|CHATBOT_TOKEN|>
    {%- if m.tool_calls -%}
      <|START_THINKING|>{{ m.content }}<|END_THINKING|><|START_ACTION|>[
      {%- for call in m.tool_calls %}
    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ call.function.name }}", "parameters":
      {{- ' ' ~ call.function.arguments | tojson }}}
      {{- '' if loop.last else ',' -}}
      {%- endfor %}
]<|END_ACTION|>
    {%- else -%}
      <|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>
    {%- endif -%}
  {%- else -%}
    {{ '<|SYSTEM_TOKEN|>' if m.role == 'system' else '<|USER_TOKEN|>' if m.role == 'user' else
       '<|TOOL_TOKEN|>' }}{{ m.content }}
    {%- if tools and loop.first %}{{ tools | tojson }}{% endif -%}
  {%- endif -%}
  <|END_OF_TURN_TOKEN|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|CHATBOT_TOKEN|>{%- endif -%}
"""
_APERTUS = """
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}
    <|assistant_start|>{{ m.content }}
    {%- if m.tool_calls -%}
      <|tools_prefix|>[
      {%- for call in m.tool_calls -%}
        {"{{ call.function.name }}": {{ call.function.arguments | tojson }}}
        {{- '' if loop.last else ', ' -}}
      {%- endfor -%}
      ]<|tools_suffix|>
    {%- endif -%}
    <|assistant_end|>
  {%- else -%}
    <|{{ m.role }}_start|>{{ m.content }}
    {%- if tools and loop.first %}{{ tools | tojson }}{% endif -%}
    <|{{ m.role }}_end|>
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant_start|>{%- endif -%}
"""
TEMPLATES = {
    "mistral": _MISTRAL,
    "mistral without ids": _MISTRAL.replace("[CALL_ID]{{ call.id }}", ""),
    "cohere": _COHERE,
    "apertus": _APERTUS,
}
each_template = pytest.mark.parametrize("name", TEMPLATES)


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer_module, "slow_call_reader", lambda *_: None)


@cache
def renderer(name: str) -> TemplateRenderer:
    return TemplateRenderer(byte_tokenizer(TEMPLATES[name]), RendererConfig())


@cache
def syntax(name: str) -> JsonSyntax:
    found = syntax_of(renderer(name).template.calls)
    assert isinstance(found, JsonSyntax)
    return found


@each_template
def test_arguments_reach_the_environment_to_the_letter(name: str) -> None:
    one = renderer(name)
    for arguments in (
        {f"text_{number}": text for number, text in enumerate(HARD)},
        {"lines": list(HARD), "rows": [["a", "1"], []], "point": {"name": " 3.10", "at": [1, 2]}},
        {"maybe": "3.10", "either": "12", "chosen": "1", "fixed": "1", "text": "null"},
        {"count": -3, "share": 2.5, "on": True},
        {},
    ):
        reply, kept = got(one, written(one, ToolCall("write", arguments)))
        assert (named(reply), reply.errors) == ([("write", arguments)], ())
        assert kept.said == ""


@each_template
def test_several_calls_and_the_text_beside_them_are_read(name: str) -> None:
    one = renderer(name)
    calls = [ToolCall("write", {"text": " a"}), ToolCall("write", {}), ToolCall("find", {"n": 1})]
    reply, kept = got(one, f"I write.{written(one, *calls)}")
    assert named(reply) == [(call.name, dict(call.arguments)) for call in calls]
    assert kept.said == "I write."


@each_template
def test_no_spoiled_call_is_run_half_or_dropped_in_silence(name: str) -> None:
    one = renderer(name)
    whole = written(one, ToolCall("write", {"text": "left right", "count": 37}))
    for text in spoiled(whole):
        reply, kept = got(one, text)
        there = plain(text)
        if not reply.errors:
            seen = plain(f"{reply.text} {kept.reasoning} {' '.join(map(str, named(reply)))}")
            for word in ("left", "right", "37"):
                assert there.count(word) == seen.count(word), (text, reply)


@given(name=st.sampled_from([*TEMPLATES]), text=st.text())
@examples(200)
def test_any_text_is_the_same_after_writing_and_reading(name: str, text: str) -> None:
    one = renderer(name)
    call = ToolCall("write", {"text": text})
    found = syntax(name).read(one.template.calls([call]), [WRITE])
    assert [dict(one.arguments) for one in found.calls] == (
        [{"text": text}] if call.is_plain else []
    )
    assert bool(found.malformed) != call.is_plain


@given(
    name=st.sampled_from([*TEMPLATES]),
    parts=st.lists(
        st.sampled_from(["[TOOL_CALLS]", "[ARGS]", "<|START_ACTION|>", "<|tools_prefix|>"])
        | st.sampled_from(["write", "{}", "[", "]", "```", "<|END_ACTION|>", '{"write": {}}'])
        | st.text(max_size=5)
    ),
)
@examples(300)
def test_any_text_at_all_is_read_without_an_exception_and_none_of_it_is_lost(
    name: str, parts: list[str]
) -> None:
    text = "".join(parts)
    found = syntax(name).read(text, [WRITE])
    assert found.content == text or found.calls
    if syntax(name).mark in text:
        assert found.calls or found.malformed


def test_what_is_wrong_with_a_call_is_said() -> None:
    read = syntax("cohere").read
    begin, end = "<|START_ACTION|>", "<|END_ACTION|>"
    entry = {"tool_call_id": "0", "tool_name": "write", "parameters": {}}
    for text, why in (
        (f"{begin}[]{end}", "a list of calls must follow"),
        (f"{begin}{json.dumps([entry])}", "'<|END_ACTION|>' must follow the calls"),
        (f"{begin}{json.dumps([entry | {'more': 1}])}{end}", "it has the key 'more'"),
        (f"{begin}{json.dumps([entry | {'parameters': 3}])}{end}", "a name and an object"),
        (f'{begin}[{{"tool_name": "wri', "its arguments are no JSON"),
        (f"left {end}", "stands where no call has it"),
        (f"`{begin}{json.dumps([entry])}{end}`", "it is quoted, in backticks"),
    ):
        (unread,) = read(text, [WRITE]).malformed
        assert why in unread.why
    (unread,) = syntax("mistral").read("[TOOL_CALLS]write[ARGS]{}", [WRITE]).malformed
    assert "a tool's name and its arguments must follow" in unread.why


@each_template
def test_a_fence_in_an_argument_quotes_none_of_the_calls_after_it(name: str) -> None:
    one = syntax(name)
    calls = [ToolCall("write", {"text": text}) for text in ("a ``` b", "`", "c")]
    text = "".join(renderer(name).template.calls([call]) for call in calls)
    found = one.read(text, [WRITE])
    assert [call.arguments for call in found.calls] == [call.arguments for call in calls]
    assert not found.malformed


def test_the_ids_of_a_model_may_be_any() -> None:
    (call,) = syntax("mistral").read("[TOOL_CALLS]write[CALL_ID]Zk9-x_1.a[ARGS]{}", [WRITE]).calls
    assert call.name == "write"


@each_template
@pytest.mark.parametrize("roles", ["UXT", "XT", "UXTU", "UXTXTU", "UXTAUXT"])
def test_a_text_beside_calls_stands_in_the_prompt_also_where_the_template_leaves_it_out(
    name: str, roles: str
) -> None:
    one = renderer(name)
    said = spoken(roles)
    check_all_there(one, one.whole(said, [WRITE]), said)
    text = one.text(said, [WRITE])
    called = [place for place, role in enumerate(roles) if role == "X"]
    begins = [text.index(said[place].said) for place in called]
    assert begins == sorted(begins)
    if name.startswith("mistral"):
        assert f"{said[called[0]].said}[TOOL_CALLS]add" in text


def test_a_text_beside_calls_that_are_not_found_either_is_refused() -> None:
    numbered = _MISTRAL.replace("{{ call.id }}", "{{ call.id }}{{ messages | length }}")
    one = TemplateRenderer(byte_tokenizer(numbered), RendererConfig())
    with pytest.raises(ConfigError, match=r"leaves out message 2 \(assistant\) .*text1x"):
        one.text(spoken("UXT"), [WRITE])


def test_a_parser_of_others_that_drops_a_text_in_silence_is_not_believed() -> None:
    template = renderer("apertus").template
    for text in ("<|tools_prefix|>[[{}]<|tools_suffix|>", "left", "functions.write:0 {}"):
        found = accounted(Reading(""), text, template)
        assert found.malformed
        assert found.content == text
    assert accounted(Reading("It is 3."), " It is 3.\n", template) == Reading(
        "It is 3.", literal=True
    )


def test_a_parser_that_leaves_a_part_of_the_call_beside_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's parser of DeepSeek-V3.2 reads calls of V4, and leaves the first mark in the answer."""

    def leaves(text: str, tools: Any) -> Reading:
        return Reading("<|tools_prefix|>", calls=(PROBE_CALL,))

    def reads(text: str, tools: Any) -> Reading:
        return Reading("", calls=(PROBE_CALL,))

    def raises(text: str, tools: Any) -> Reading:
        raise IndexError(text)

    template, tokenizer = renderer("apertus").template, tokenizer_of("qwen3")
    for readers, is_found in (
        ((raises, leaves), False),
        ((leaves, raises, reads), True),
    ):
        monkeypatch.setattr(tool_formats, "vllm_readers", lambda _, readers=readers: iter(readers))
        found = slow_call_reader(tokenizer, template)
        assert (found is not None) == is_found
    assert found is not None
    assert found(template.call(PROBE_CALL)[1].removesuffix("<|assistant_end|>"), ()).calls == (
        PROBE_CALL,
    )
