"""Calls whose arguments are JSON between marks of a family's own, read back to the letter.

Two forms are learned from what a template writes for a few calls:

    MARK[{"tool_name": NAME, "parameters": {...}}, ...]END     entries, or {NAME: {...}} each
    MARK NAME SEPARATOR {...}                                  a name before its arguments

The first is that of Cohere and Apertus, the second that of Mistral, whose separator may hold the
call's id. A call is read whole or not at all: what cannot be read is reported, and so is an entry
with a key that the template does not write.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from agentrl.conversation.declared import Tools
from agentrl.conversation.reading import Reading, Unread, Write, are_calls, call_of
from agentrl.conversation.tool_calls import QUOTED, is_quoted
from agentrl.trajectory import ToolCall

_ONE, _TWO, _KEY = "xq_tool_one", "xq_tool_two", "xq_key"
_PROBES = (
    (ToolCall(_ONE, {_KEY: '  x"q\\ \n{"a":[1]}  '}),),
    (ToolCall(_ONE, {_KEY: [" a", {"b": 1.5}]}), ToolCall(_TWO, {})),
)
_MARK = re.compile(r"(?:<[^<>\s]+>|\[[A-Z_]+\])\Z")
"""A mark at the end of a text."""
_ID = re.compile(r"call\d{5}")
"""The id of a call, as it is given to templates."""
_ANY_ID = r"[\w.:-]+"
_NAME = r"\s*([^\s<>\"'{}\[\]]+)"
# Not strict: models write unescaped line breaks into strings.
_DECODER = json.JSONDecoder(strict=False)


class _UnreadableError(Exception):
    """The reason why a call cannot be read."""


@dataclass(frozen=True)
class _Entries:
    """A list of objects, each of which is a call."""

    keys: frozenset[str] = frozenset()
    """All keys of an object that the template writes."""
    name: str = ""
    """The key of the name; an empty text if the name is itself the key of the arguments."""
    arguments: str = ""
    """The key of the arguments."""

    def calls(self, text: str, at: int, number: int) -> tuple[Sequence[ToolCall], int]:
        """The calls of the list that begins at `at`, numbered from `number` on, and its end."""
        entries, end = _decode(text, at)
        if not isinstance(entries, list) or not entries:
            raise _UnreadableError("a list of calls must follow")
        found = [self._call(entry, number + place) for place, entry in enumerate(entries)]
        return found, end

    def _call(self, entry: Any, number: int) -> ToolCall:
        if not isinstance(entry, Mapping):
            raise _UnreadableError("a call is an object of JSON")
        if not self.name:
            if len(entry) != 1:
                raise _UnreadableError("a call has its tool's name as its only key")
            ((name, arguments),) = entry.items()
            return _call(name, arguments, number)
        if odd := [key for key in entry if key not in self.keys]:
            raise _UnreadableError(f"it has the key {odd[0][:64]!r}, which no call has")
        return _call(entry.get(self.name), entry.get(self.arguments), number)


@dataclass(frozen=True)
class _Named:
    """A name, what separates it from its arguments, and these."""

    separator: re.Pattern[str]
    """The name, as its first group, up to where the arguments begin."""

    def calls(self, text: str, at: int, number: int) -> tuple[Sequence[ToolCall], int]:
        """The call that begins at `at`, and its end."""
        named = self.separator.match(text, at)
        if named is None:
            raise _UnreadableError("a tool's name and its arguments must follow")
        arguments, end = _decode(text, named.end())
        return [_call(named[1], arguments, number)], end


@dataclass(frozen=True)
class JsonSyntax:
    """Reads calls in one of the two forms."""

    mark: str
    """The text before a list of calls, or before each call."""
    end: str
    """The mark after it; an empty text if there is none."""
    form: _Entries | _Named
    header: str = ""
    """The marks of a message of its own that holds the calls, before the mark."""

    def read(self, text: str, tools: Tools) -> Reading:
        """The calls in an answer's text, and what cannot be read of it."""
        calls, unread, content = list[ToolCall](), list[Unread](), list[str]()
        at, before = 0, ""
        while (mark := self._marks.search(text, at)) is not None:
            content.append(text[at : mark.start()].rstrip().removesuffix(self.header))
            before += text[at : mark.start()]
            at = mark.end()
            if mark[0] != self.mark:
                unread.append(Unread(mark[0], f"{mark[0]!r} stands where no call has it"))
                continue
            quotes = is_quoted(before)
            try:
                found, stop = self.form.calls(text, at, len(calls))
                at = self._position_after_end(text, stop)
                if quotes:
                    unread.append(Unread(text[mark.start() : at], QUOTED))
                else:
                    calls += found
            except _UnreadableError as error:
                at = self._next(text, at)
                unread.append(Unread(text[mark.start() : at], QUOTED if quotes else str(error)))
                before += text[mark.start() : at]
        content.append(text[at:])
        said = "\n".join(filter(None, (part.strip() for part in content))) if calls else text
        return Reading(
            text if unread else said, calls=tuple(calls), malformed=tuple(unread), literal=True
        )

    def start(self, text: str) -> int:
        """The position of the first mark; -1 if there is none."""
        return text.find(self.mark)

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        return re.compile("|".join(re.escape(one) for one in (self.mark, self.end) if one))

    def _next(self, text: str, at: int) -> int:
        """The position from which reading goes on after a call that cannot be read."""
        after = self._marks.search(text, at)
        if after is None:
            return len(text)
        return after.start() if after[0] == self.mark else after.end()

    def _position_after_end(self, text: str, at: int) -> int:
        """The position after the mark that ends a call, which may be cut off with the answer."""
        rest = text[at:].lstrip()
        if self.end and not rest.startswith(self.end):
            raise _UnreadableError(f"{self.end!r} must follow the calls")
        return len(text) - len(rest) + len(self.end) if self.end else at


def learn_json_syntax(write: Write) -> JsonSyntax | None:
    """The syntax, if a template writes its calls in one of the two forms; else None."""
    for learn in (_learn_entries, _learn_named):
        with suppress(Exception):  # templates raise what they like, and texts may lack the marks
            syntax = learn(write)
            readings = (syntax.read(write(calls), ()) for calls in _PROBES)
            if all(map(are_calls, readings, _PROBES)):
                return syntax
    return None


def _learn_entries(write: Write) -> JsonSyntax:
    written = write([ToolCall(_ONE, {_KEY: "x"})])
    begin = written.rindex("[", 0, written.index(_ONE))
    (entry,), end = _DECODER.raw_decode(written, begin)
    if list(entry) == [_ONE]:
        form = _Entries()
    else:
        name = next(key for key, value in entry.items() if value == _ONE)
        is_json = {_KEY: "x"}, json.dumps({_KEY: "x"})
        arguments = next(key for key, value in entry.items() if value in is_json)
        form = _Entries(frozenset(entry), name, arguments)
    return _between_marks(written, begin, end, form)


def _learn_named(write: Write) -> JsonSyntax:
    written = write([ToolCall(_ONE, {_KEY: "x"})])
    begin = written.index(_ONE)
    opened = written.index("{", begin)
    separator = re.escape(written[begin + len(_ONE) : opened].strip())
    if not separator:
        raise ValueError("nothing tells a name from its arguments")
    pattern = re.compile(rf"{_NAME}\s*{_ID.sub(lambda _: _ANY_ID, separator)}\s*")
    end = _DECODER.raw_decode(written, opened)[1]
    return _between_marks(written, begin, end, _Named(pattern))


def _between_marks(written: str, begin: int, end: int, form: _Entries | _Named) -> JsonSyntax:
    """The syntax of calls that stand there in a text that a template has written."""
    before = written[:begin].rstrip()
    mark = _MARK.search(before)
    if mark is None:
        raise ValueError("no mark stands before the calls")
    return JsonSyntax(mark[0], written[end:].strip(), form, before[: mark.start()].strip())


def _decode(text: str, at: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, at + len(text[at:]) - len(text[at:].lstrip()))
    except (ValueError, RecursionError) as error:
        raise _UnreadableError(f"its arguments are no JSON: {error}") from error


def _call(name: Any, arguments: Any, number: int) -> ToolCall:
    call = call_of(name, arguments, number) if isinstance(name, str) and name else None
    if call is None:
        raise _UnreadableError(
            "a call has a name and an object of arguments, without infinite numbers, halves of"
            " surrogate pairs and too deep nesting"
        )
    return call
