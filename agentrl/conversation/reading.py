"""The parts of a text that a model wrote: its reasoning, its answer, and its calls of tools.

A family writes reasoning and calls in a syntax of its own. `Reading` is what remains of it:
reasoning without its marks, and calls as values. An environment gets `action`: the answer, followed
by the calls in the canonical form, which is that of Hermes and Qwen, whatever the model's own form
is.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from agentrl.conversation.declared import Tools, declared
from agentrl.conversation.tool_calls import holds_calls, is_quoted
from agentrl.protocols.offers import Offers
from agentrl.trajectory import NO_CALLS, ToolCall, quoted, unreadable


class Marks(NamedTuple):
    """The marks that a family writes around its reasoning."""

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
"""The known marks, for templates in which no family of the library is recognised."""


_QUOTED_CHARACTERS = 160
"""Most characters that are quoted of a text that cannot be read."""


class Unread(NamedTuple):
    """A text that was meant as a call, or may have been, and why it cannot be read as one."""

    text: str
    why: str

    @property
    def told(self) -> str:
        """The message to the model about it."""
        near = self.text.strip()
        if len(near) > _QUOTED_CHARACTERS:
            near = f"{near[:_QUOTED_CHARACTERS]}..."
        return f"{self.why}: {near!r}"


@dataclass(frozen=True, slots=True)
class Reading:
    """An answer, taken apart: all that the model wrote is here.

    `malformed`: what was meant as calls and cannot be read; it stands in `content`, too. `cut`: the
    answer ended within its reasoning. `literal`: the content holds no calls, whatever it looks
    like; else the environment looks for calls in the canonical form there.
    """

    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[Unread, ...] = ()
    cut: bool = False
    literal: bool = False

    @property
    def action(self) -> str:
        """The text for the environment: the answer, then its calls in the canonical form, and what
        cannot be read.
        """
        written = [
            *(call.render() for call in self.calls),
            *(unreadable(one.told) for one in self.malformed),
        ]
        if not self.literal and not self.malformed:
            return "\n".join(filter(None, (self.content, *written))) if written else self.content
        # All calls have been taken out, so what looks like one in the rest must not be run.
        content = quoted(self.content)
        if is_quoted(self.content) if written else holds_calls(self.content):
            written = [NO_CALLS, *written]
        return "\n".join(filter(None, (content, *written))) if written else content


def refused_by_parser(found: Reading, error: BaseException) -> Reading:
    """An answer at which a vendor's parser raises, so that its calls are unknown."""
    if found.cut or not found.content.strip():
        return found
    said = f"{type(error).__name__}: {error}".removesuffix(": ")
    why = f"the parser of calls refuses it ({said:.{_QUOTED_CHARACTERS}})"
    return replace(found, malformed=(Unread(found.content, why),), literal=True)


def marks_in(template: str, known: Sequence[Marks] = MARKS) -> Marks | None:
    """The marks around reasoning that a chat template writes; None if it knows no reasoning."""
    return next((marks for marks in known if marks.end in template), None)


def without_reasoning(text: str, marks: Marks | None, prompt: str) -> Reading:
    """The reasoning at the beginning of an answer, apart from the rest.

    `prompt`: the text before the answer. Many templates begin the reasoning there.
    """
    if marks is None:
        return Reading(text)
    begun = prompt.rstrip().endswith(marks.begin.strip())
    if text.lstrip().startswith(marks.end):  # empty, and begun by the prompt or not at all
        return Reading(text.lstrip()[len(marks.end) :].lstrip("\n"))
    if not begun and not text.lstrip().startswith(marks.begin.strip()):
        return Reading(text)
    thought = text if begun else text.lstrip()[len(marks.begin.strip()) :]
    reasoning, ended, content = thought.partition(marks.end)
    if not ended:
        return Reading("", reasoning.strip("\n"), cut=True)
    return Reading(content.lstrip("\n"), reasoning.strip("\n"))


Write = Callable[[Sequence[ToolCall]], str]
"""Writes calls as a template does, from where an answer's own text ends."""
ReadCalls = Callable[[str, Tools], Reading]
"""Takes the calls of these tools out of an answer's text."""


def call_of(name: str, arguments: Any, number: int, given: str | None = None) -> ToolCall | None:
    """A call as a parser of others has found it, arguments as a mapping or as JSON; None if they
    are neither.
    """
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (RecursionError, ValueError):
            return None
    if not isinstance(arguments, Mapping):
        return None
    call = ToolCall(name, dict(arguments), given or f"call{number:05d}")
    return call if call.is_plain else None


def is_call(found: Sequence[ToolCall], call: ToolCall) -> bool:
    """True if this call alone was found, whatever its id."""
    return [(one.name, dict(one.arguments)) for one in found] == [(call.name, call.arguments)]


def are_calls(found: Reading, calls: Sequence[ToolCall]) -> bool:
    """True if these calls were found, whatever their ids, and nothing that is malformed."""
    return not found.malformed and [(one.name, one.arguments) for one in found.calls] == [
        (one.name, one.arguments) for one in calls
    ]


def as_declared(call: ToolCall, tools: Tools) -> ToolCall:
    """The call with text for each argument that its tool declares as text alone.

    In tags, nothing tells the text "12" from the number 12, and parsers that do not know the tools
    take it for one.
    """
    declares = declared(tools, call.name)
    arguments = {
        name: json.dumps(value, ensure_ascii=False)
        if not isinstance(value, str) and declares.inner(name).kinds == {"string"}
        else value
        for name, value in call.arguments.items()
    }
    return ToolCall(call.name, arguments, call.id)


@dataclass(frozen=True, slots=True)
class ToolFormatOffers(Offers):
    """The optional attribute of a `ToolFormat`, which is found by its name."""

    reasoning_marks: tuple[str, str] | None = None
    """The texts around the reasoning of its models, as `("<think>", "</think>")`."""


class ToolFormat(Protocol):
    """A syntax of tool calls, made for a tokenizer: `MyFormat(tokenizer)`. A plug-in of the
    entry-point group `agentrl.tool_formats`.

    A model is read by it if it reads the call that the model's chat template writes, or if
    `model.tool_format` names it. Its class may have the attributes of `ToolFormatOffers`.
    """

    def read(self, text: str, tools: Tools) -> Reading:
        """The calls in an answer, and the text around them. `text` has no reasoning any more, and
        no token that ends an answer. `tools`: the tools in OpenAI's form.

        What is left out or read half is found by comparing the result with what the template would
        write for it, so a format need not check that.
        """
        ...
