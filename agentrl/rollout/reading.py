"""What a model wrote, taken apart: its reasoning, its answer, and its calls of tools.

A family writes reasoning and calls in a syntax of its own. `Reading` is what remains of it: reasoning without its
marks, and calls as values. An environment gets `action`: the answer, followed by the calls in the canonical form, which
is that of Hermes and Qwen, whatever the model's own form is.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from agentrl.trajectory import ToolCall


class Marks(NamedTuple):
    """What a family writes around its reasoning."""

    begin: str
    end: str


MARKS = (
    Marks("<think>", "</think>"),
    Marks("[THINK]", "[/THINK]"),
    Marks("<|START_THINKING|>", "<|END_THINKING|>"),
    Marks("<seed:think>", "</seed:think>"),
    Marks("<mm:think>", "</mm:think>"),
    Marks("◁think▷", "◁/think▷"),
    Marks("<|channel>thought\n", "<channel|>"),
)
"""Those known, for templates that no family of the library is recognised in."""


@dataclass(frozen=True, slots=True)
class Reading:
    """An answer, taken apart.

    `malformed`: texts that were meant as calls and cannot be read. `cut`: the answer ended within its reasoning.
    """

    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()
    cut: bool = False

    @property
    def action(self) -> str:
        """What the environment gets: the answer, then its calls in the canonical form."""
        written = [call.render() for call in self.calls]
        broken = [f"<tool_call>\n{text.strip()}\n</tool_call>" for text in self.malformed]
        return "\n".join(filter(None, (self.content, *written, *broken))) if written or broken else self.content


def marks_in(template: str) -> Marks | None:
    """The marks around reasoning that a chat template writes; None if it knows no reasoning."""
    return next((marks for marks in MARKS if marks.end in template), None)


def without_reasoning(text: str, marks: Marks | None, prompt: str) -> Reading:
    """The reasoning at the beginning of an answer, apart from the rest.

    `prompt`: the text before the answer. Many templates begin the reasoning there.
    """
    if marks is None:
        return Reading(text)
    begun = prompt.rstrip().endswith(marks.begin.strip())
    if not begun and not text.lstrip().startswith(marks.begin.strip()):
        return Reading(text)
    thought = text if begun else text.lstrip()[len(marks.begin.strip()) :]
    reasoning, ended, content = thought.partition(marks.end)
    if not ended:
        return Reading("", reasoning.strip("\n"), cut=True)
    return Reading(content.lstrip("\n"), reasoning.strip("\n"))


Tools = Sequence[Mapping[str, Any]]
"""Schemas of tools, in OpenAI's form."""
ReadCalls = Callable[[str, Tools], Reading]
"""Takes the calls of these tools out of an answer's text."""


def call_of(name: str, arguments: Any, number: int, given: str | None = None) -> ToolCall | None:
    """A call as a parser of others has found it, arguments as a mapping or as JSON; None if they are neither."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (RecursionError, ValueError):
            return None
    if not isinstance(arguments, Mapping):
        return None
    call = ToolCall(name, dict(arguments), given or f"call{number:05d}")
    return call if call.is_plain else None


def as_declared(call: ToolCall, tools: Tools) -> ToolCall:
    """A call whose arguments are texts where its tool declares texts.

    In tags, nothing tells the text "12" from the number 12, and parsers that do not know the tools take it for one.
    """
    functions = [tool.get("function", tool) for tool in tools]
    schema: Mapping[str, Any] = next(
        (one.get("parameters", {}) for one in functions if one.get("name") == call.name), {}
    )
    declared = schema.get("properties", {})
    arguments = {
        name: json.dumps(value, ensure_ascii=False)
        if declared.get(name, {}).get("type") == "string" and not isinstance(value, str)
        else value
        for name, value in call.arguments.items()
    }
    return ToolCall(call.name, arguments, call.id)
