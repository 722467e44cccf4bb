"""Calls whose arguments are nested elements, as MiniMax-M3 writes them, read back to the letter.

Each tag has a mark of the family before it, so that texts may hold any tags without it:

    M<tool_call> M<invoke name="NAME">M<KEY>text M</KEY>M<LIST>M<item>a M</item>M<item>b
    M</item>M</LIST>M</invoke> M</tool_call>

A list is written as one `item` for each of its items, an empty list or object as nothing; what is
declared of the parameter tells an object from a list, and a text from a number.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from agentrl.conversation.declared import Declared, Tools, declared, value_of
from agentrl.conversation.reading import Reading, Unread, Write
from agentrl.conversation.tool_calls import QUOTED, is_quoted
from agentrl.trajectory import ToolCall

_MARK = re.compile(r"(\S+)<tool_call>")
_PROBE = ToolCall("xq_tool", {"one": "  a\n", "two": [["x"], []], "three": [{"four": " 3.10"}]})
_PROBE_TOOLS: Tools = [
    {
        "name": "xq_tool",
        "parameters": {
            "properties": {
                "one": {"type": "string"},
                "two": {"type": "array", "items": {"type": "array", "items": {"type": "string"}}},
                "three": {
                    "type": "array",
                    "items": {"type": "object", "properties": {"four": {"type": "string"}}},
                },
            }
        },
    }
]


class _UnreadableError(Exception):
    """The reason why a call cannot be read."""


@dataclass(frozen=True, slots=True)
class _Element:
    """A tag's name, its text if it has no inner tags, and the elements in it."""

    name: str
    text: str
    inner: "tuple[_Element, ...]"


@dataclass(frozen=True, slots=True)
class NestedSyntax:
    """Reads calls whose tags have this mark before them."""

    mark: str

    def read(self, text: str, tools: Tools) -> Reading:
        """The calls in an answer's text, and what cannot be read of it."""
        calls, unread, content = list[ToolCall](), list[Unread](), list[str]()
        begin, end = f"{self.mark}<tool_call>", f"{self.mark}</tool_call>"
        at, before = 0, ""
        while (start := text.find(self.mark, at)) >= 0:
            content.append(text[at:start])
            before += text[at:start]
            stop = text.find(end, start)
            whole = text.startswith(begin, start) and stop >= 0
            at = stop + len(end) if whole else len(text)
            if not whole:
                unread.append(Unread(text[start:], f"{begin} and {end} must stand around calls"))
                continue
            quotes = is_quoted(before)
            try:
                found = self._calls(text[start + len(begin) : stop], len(calls), tools)
                if quotes:
                    unread.append(Unread(text[start:at], QUOTED))
                else:
                    calls += found
            except _UnreadableError as error:
                unread.append(Unread(text[start:at], QUOTED if quotes else str(error)))
                before += text[start:at]
        content.append(text[at:])
        said = "\n".join(filter(None, (part.strip() for part in content))) if calls else text
        return Reading(
            text if unread else said, calls=tuple(calls), malformed=tuple(unread), literal=True
        )

    def start(self, text: str) -> int:
        """The position of the first tag; -1 if there is none."""
        return text.find(self.mark)

    def _calls(self, text: str, number: int, tools: Tools) -> Sequence[ToolCall]:
        found: list[ToolCall] = []
        elements, at = self._elements(text, 0, "")
        if at != len(text) or not elements:
            raise _UnreadableError("it holds no call")
        for one in elements:
            named = re.fullmatch(r'invoke name="([^"<>\s]+)"', one.name)
            if named is None or one.text.strip():
                raise _UnreadableError(
                    f"{self.mark}<invoke name=...> must stand around the parameters"
                )
            arguments = _read_object(one, declared(tools, named[1]))
            call = ToolCall(named[1], arguments, f"call{number + len(found):05d}")
            if not call.is_plain:
                raise _UnreadableError("it has half of a surrogate pair, or too deep nesting")
            found.append(call)
        return found

    def _elements(self, text: str, at: int, within: str) -> tuple[list[_Element], int]:
        """The elements from here on to the closing tag of that which they stand in, and where that
        tag begins.
        """
        found: list[_Element] = []
        while True:
            start = text.find(self.mark, at)
            if start < 0:
                if within or text[at:].strip():
                    raise _UnreadableError(f"{within or 'a text'!r} does not end")
                return found, len(text)
            if text.startswith(f"{self.mark}</", start):
                return found, start
            if text[at:start].strip():
                raise _UnreadableError(
                    f"a text stands beside a tag: {text[at:start].strip()[:40]!r}"
                )
            tag = start + len(self.mark)
            close = text.find(">", tag)
            name = text[tag + 1 : close]
            if close < 0 or not text.startswith("<", tag):
                raise _UnreadableError("a tag does not end")
            begun = close + 1
            inner, stop = self._elements(text, begun, name)
            # An opening tag may have attributes, which its closing tag does not repeat.
            ending = f"{self.mark}</{name.split(' ')[0]}>"
            if not text.startswith(ending, stop):
                raise _UnreadableError(f"{ending} is missing")
            # A value is a text or elements, never both.
            if inner and text[text.rindex(">", 0, stop) + 1 : stop].strip():
                raise _UnreadableError(f"a text stands beside a tag in {name!r}")
            found.append(_Element(name, "" if inner else text[begun:stop], tuple(inner)))
            at = stop + len(ending)


def learn_nested_syntax(write: Write) -> NestedSyntax | None:
    """The syntax, if a template writes its calls so; else None."""
    with suppress(Exception):  # templates raise what they like
        written = write([_PROBE])
        marked = _MARK.search(written)
        if marked is not None:
            syntax = NestedSyntax(marked[1])
            (call,) = syntax.read(written, _PROBE_TOOLS).calls
            if (call.name, call.arguments) == (_PROBE.name, _PROBE.arguments):
                return syntax
    return None


def _read_object(element: _Element, declares: Declared) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in element.inner:
        if one.name in found:
            raise _UnreadableError(f"{one.name!r} is given twice")
        found[one.name] = _value(one, declares.inner(one.name))
    return found


def _value(element: _Element, declares: Declared) -> Any:
    kinds = declares.kinds
    names = {one.name for one in element.inner}
    if "array" in kinds and (
        names == {"item"} or (not names and "string" not in kinds and not element.text.strip())
    ):
        return [_value(one, declares.items) for one in element.inner]
    if not element.inner:
        empty = "object" in kinds and "string" not in kinds and not element.text.strip()
        return {} if empty else value_of(element.text, declares)
    if names == {"item"} and "object" not in kinds:
        return [_value(one, declares.items) for one in element.inner]
    return _read_object(element, declares)
