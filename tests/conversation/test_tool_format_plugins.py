"""Tool formats of other packages: found by what a template writes, or named."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl import Reading, ToolCall
from agentrl.conversation.config import RendererConfig
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.conversation.tool_calls import parse_tool_calls
from agentrl.errors import ConfigError
from agentrl.tokens.arrays import floats, ints
from agentrl.trajectory import Completion, Message
from tests.chat_templates import byte_tokenizer

TEMPLATE = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<muse>{{ m.reasoning_content }}</muse>
{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}
>> {{ call.function.name }}
{%- for key, value in call.function.arguments.items() %} | {{ key }} = {{ value | tojson }}
{%- endfor %}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
ADD: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
        },
    },
}


class Arrows:
    """Calls such as `>> add | a = 1 | b = "x"`, each on a line of its own."""

    reasoning_marks = ("<muse>", "</muse>")

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def read(self, text: str, tools: Sequence[Mapping[str, Any]]) -> Reading:
        calls = []
        for number, line in enumerate(re.findall(r"^>> (.*)$", text, re.MULTILINE)):
            name, *arguments = line.split(" | ")
            pairs = (argument.split(" = ", 1) for argument in arguments)
            values = {key: json.loads(value) for key, value in pairs}
            calls.append(ToolCall(name, values, id=f"call{number:05d}"))
        content = re.sub(r"^>> .*\n?", "", text, flags=re.MULTILINE).strip()
        return Reading(content, calls=tuple(calls))


def read_by(renderer: TemplateRenderer, text: str) -> str:
    """The action that the environment gets for a model's answer."""
    conversation = renderer.conversation([ADD])
    conversation.prompt([Message("user", "Add.")])
    token_ids = [*renderer.encode(text), *renderer.stop_token_ids[:1]]
    zeros = [0.0] * len(token_ids)
    answer = Completion(ints(token_ids), floats(zeros), ints([0] * len(token_ids)), "stop")
    return conversation.answer(answer)


def renderer_with(tool_format: str) -> TemplateRenderer:
    settings = RendererConfig(tool_format=tool_format)
    return TemplateRenderer(byte_tokenizer(TEMPLATE), settings)


@pytest.fixture
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrows in a package that is installed."""
    metadata = tmp_path / "arrows-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: arrows\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text(
        f"[agentrl.tool_formats]\narrows = {__name__}:Arrows\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("tool_format", ["auto", "arrows"])
def test_a_registered_format_reads_the_template_that_writes_it(tool_format: str) -> None:
    renderer = renderer_with(tool_format)
    assert renderer.template.call(ToolCall("add", {"a": 1, "b": "x y"}))[1].strip().startswith(">>")
    action = read_by(renderer, '<muse>1 + 2</muse>\nSo:\n>> add | a = 1 | b = "x y"')
    parsed = parse_tool_calls(action)
    assert parsed.calls == (ToolCall("add", {"a": 1, "b": "x y"}),)
    assert parsed.text == "So:"
    # What the format drops, or cannot read, is told to be unreadable: no call is read half.
    for text in ('>> add | a = 1 | b = "x" | b = "y"', ">> add | a = oops"):
        assert "unreadable" in read_by(renderer, text)


def test_a_format_of_a_module_is_named() -> None:
    action = read_by(renderer_with(f"{__name__}:Arrows"), '>> add | a = 2 | b = "z"')
    assert parse_tool_calls(action).calls == (ToolCall("add", {"a": 2, "b": "z"}),)


@pytest.mark.usefixtures("registered")
def test_an_unknown_format_is_answered_with_those_that_are_registered() -> None:
    with pytest.raises(ConfigError, match=r"no format 'arows'. Formats: auto, canonical, arrows, "):
        renderer_with("arows")
