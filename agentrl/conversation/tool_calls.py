"""Calls of tools in the text of a message: `<tool_call>` tags, or bare JSON objects.

The tags are those of the Hermes and Qwen chat templates (`<tool_call>{"name": ..., "arguments":
{...}}</tool_call>`). Model output is never trusted: parsing it raises nothing, and a bad call
becomes a text with its error.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from agentrl.trajectory import ToolCall, unquoted


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """A model's message: the text around its calls, the calls in order, and what is wrong with the
    malformed ones.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()


def parse_tool_calls(text: str) -> ParsedReply:
    """Parse a model's message.

    Calls are in `<tool_call>` tags; without any tag, JSON objects with "name" and "arguments" (or
    "parameters") count as calls, bare, fenced, or in a list. `arguments` may be JSON inside a
    string. Never raises, whatever the text is; after eight malformed calls the rest is not parsed.
    A tag in a fenced block of code or after a backtick is a quotation: it is not run, and an error
    says so. Nor is a call with other keys, which would be read half.
    """
    prose: list[str] = []
    calls: list[ToolCall] = []
    errors: list[str] = []
    for piece in _split_at_tags(text) if _OPEN in text else _find_bare_calls(text):
        match piece:
            case ToolCall():
                calls.append(piece)
            case _Malformed():
                errors.append(piece.why)
                if len(errors) == _MAX_ERRORS:
                    break
            case str():
                prose.append(piece)
    return ParsedReply(_EMPTY_FENCE.sub("", "".join(prose)).strip(), tuple(calls), tuple(errors))


def holds_calls(text: str) -> bool:
    """True if `parse_tool_calls` may find calls in a text, or errors of such, or a tag that is
    marked as quoted.
    """
    return _OPEN.removesuffix(">") in text or not all(
        isinstance(piece, str) for piece in _find_bare_calls(text)
    )


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"

_END_OF_TAG = re.compile(rf"\s*(?:{_CLOSE}|(?={_OPEN})|\Z)")

_START_OF_JSON = re.compile(r'\{\s*"|\[\s*\{\s*"')

_START_OF_CALL = re.compile(r'(?:\[\s*)?\{\s*"name"\s*:')

_NEXT_CALL = re.compile(rf"{_CLOSE}|(?={_OPEN})|\Z")

_MAX_ERRORS = 8

_EMPTY_FENCE = re.compile(r"```\w*\s*```")

_WHITESPACE = re.compile(r"\s*")

_ARGUMENT_KEYS = ("arguments", "parameters")

_CALL_KEYS = frozenset((*_ARGUMENT_KEYS, "name", "id", "type"))

_EXAMPLE = '{"name": "...", "arguments": {...}}'

_MAX_REASON_CHARACTERS = 250


@dataclass(frozen=True, slots=True)
class _Malformed:
    """A failed attempt at a call; parsing continues at `resume`."""

    why: str
    resume: int = 0


_QUOTATION = _Malformed(
    "the tool call was not run, because it is quoted in backticks. To make it, write it without"
    " them"
)


@dataclass(frozen=True, slots=True)
class _Decoded:
    value: Any
    end: int


def refuse_constant(name: str) -> Any:
    """The `parse_constant` of a decoder that takes no NaN and no infinity, which JSON lacks.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"{name} is not JSON")


_NOT_PLAIN = (
    "the tool call is not usable: it has an infinite number, half of a surrogate pair, or too deep"
    " nesting"
)

# Not strict: models write unescaped line breaks into strings.
_DECODER = json.JSONDecoder(strict=False, parse_constant=refuse_constant)


def _decode(text: str, start: int) -> _Decoded | _Malformed:
    """The JSON value that starts at `start`, after white space."""
    blank = _WHITESPACE.match(text, start)
    begin = blank.end() if blank else start
    try:
        value, end = _DECODER.raw_decode(text, begin)
    except json.JSONDecodeError as error:
        near = text[max(begin, error.pos - 20) : error.pos + 20]
        where = f"near {near!r}" if near else "nothing is there"
        return _Malformed(
            f"the tool call is not valid JSON: {error.msg}, {where}. Write {_EXAMPLE}", error.pos
        )
    except ValueError as error:
        return _Malformed(f"the tool call is not valid JSON: {error}", begin + 1)
    except RecursionError:
        return _Malformed("the tool call is not usable: its JSON is nested too deeply", len(text))
    return _Decoded(value, end)


def _split_at_tags(text: str) -> Iterator[str | ToolCall | _Malformed]:
    at, said = 0, ""
    while (tag := text.find(_OPEN, at)) >= 0:
        yield unquoted(text[at:tag])
        said += text[at:tag]
        found = _decode(text, tag + len(_OPEN))
        if isinstance(found, _Malformed):
            yield found
            at = _next_call(text, tag + len(_OPEN))
            said += text[tag:at]
        elif (end := _END_OF_TAG.match(text, found.end)) is None:
            yield _Malformed(
                f"a {_OPEN} holds one JSON object and nothing after it. Write {_EXAMPLE}"
            )
            at = _next_call(text, found.end)
            said += text[tag:at]
        else:
            at = end.end()
            if found.value == []:  # no calls, and quotations before it have ended
                said = ""
            else:
                yield from (_QUOTATION,) if is_quoted(said) else _calls_in(found.value)
    yield unquoted(text[at:])


def is_quoted(said: str) -> bool:
    """True if what follows a text is quoted by it: the text begins a fenced block of code and does
    not end it, or ends with a backtick.

    Calls that were read are left out of `said`: backticks in their arguments quote nothing.
    """
    return said.count("```") % 2 == 1 or said.endswith("`")


QUOTED = "it is quoted, in backticks, and quoted calls are not run"
"""The reason why a call in a syntax of a family's own is not read."""


def _next_call(text: str, start: int) -> int:
    """The position after a malformed tag: its end, or the next opening tag."""
    found = _NEXT_CALL.search(text, start)
    return found.end() if found else len(text)


def _find_bare_calls(text: str) -> Iterator[str | ToolCall | _Malformed]:
    at = 0
    while (start := _START_OF_JSON.search(text, at)) is not None:
        yield text[at : start.start()]
        found = _decode(text, start.start())
        if isinstance(found, _Malformed):
            at = max(found.resume, start.start() + 1)
            # Prose may well contain braces: only what begins like a call is reported as a bad one.
            yield found if _START_OF_CALL.match(text, start.start()) else text[start.start() : at]
        else:
            at = found.end
            if _is_call(found.value) or (
                isinstance(found.value, list) and all(map(_is_call, found.value))
            ):
                yield from _calls_in(found.value)
            else:
                yield text[start.start() : at]
    yield text[at:]


def _is_call(value: Any) -> bool:
    return (
        isinstance(value, dict) and "name" in value and any(key in value for key in _ARGUMENT_KEYS)
    )


def _calls_in(value: Any) -> Iterator[ToolCall | _Malformed]:
    for item in value if isinstance(value, list) else [value]:
        yield _call(item)


def _call(value: Any) -> ToolCall | _Malformed:
    if isinstance(value, dict) and isinstance(value.get("unreadable"), str):
        return _Malformed(
            f"the tool call cannot be read: {value['unreadable'][:_MAX_REASON_CHARACTERS]}"
        )
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return _Malformed(
            f'a tool call is a JSON object with a "name" that is a text. Write {_EXAMPLE}'
        )
    given = [key for key in _ARGUMENT_KEYS if value.get(key) is not None]
    others = sorted(value.keys() - _CALL_KEYS) or given[1:]
    if others:
        return _Malformed(
            f"the tool call has the key {others[0][:64]!r}, which no call has. Write {_EXAMPLE}"
        )
    arguments: Any = next((value[key] for key in _ARGUMENT_KEYS if value.get(key) is not None), {})
    if isinstance(arguments, str):
        decoded = _decode(arguments, 0)
        if isinstance(decoded, _Malformed):
            return decoded
        arguments = decoded.value
    if not isinstance(arguments, dict):
        return _Malformed(
            f'the "arguments" of {value["name"][:64]!r} must be a JSON object. Write {_EXAMPLE}'
        )
    call = ToolCall(value["name"], arguments)
    return call if call.is_plain else _Malformed(_NOT_PLAIN)
