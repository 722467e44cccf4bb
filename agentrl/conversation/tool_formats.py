"""The syntaxes in which models call tools: which one a model's template writes, and what reads it.

Calls in tags, and in JSON between marks, are read here (`tagged_calls`, `nested_calls`,
`json_calls`), to the letter. Other parsers are registered formats (entry-point group
`agentrl.tool_formats`: those of other packages, and those of the library `renderers`), a
tokenizer's response schema (transformers), and vLLM's. A parser is chosen by what it does: the
template writes a call, and the parser must read that very call. Then all that a model writes is
held against what the template would write for what was read (`accounted`).
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from agentrl import plugins
from agentrl.conversation.chat_template import ChatTemplate
from agentrl.conversation.declared import Tools
from agentrl.conversation.json_calls import JsonSyntax, learn_json_syntax
from agentrl.conversation.library_formats import BUILT_IN
from agentrl.conversation.nested_calls import NestedSyntax, learn_nested_syntax
from agentrl.conversation.reading import (
    MARKS,
    Marks,
    ReadCalls,
    Reading,
    ToolFormat,
    ToolFormatOffers,
    Unread,
    Write,
    call_of,
    is_call,
    refused_by_parser,
)
from agentrl.conversation.tagged_calls import TaggedSyntax, learn_tagged_syntax, standard
from agentrl.conversation.tool_calls import QUOTED, is_quoted, parse_tool_calls
from agentrl.conversation.vllm_parsers import parser_names, vllm_reader, vllm_readers
from agentrl.errors import ConfigError
from agentrl.trajectory import ToolCall

PROBE_CALL = ToolCall("find_it", {"text": "a b", "count": 3})
_PROBE_TOOLS: Tools = (
    {
        "type": "function",
        "function": {
            "name": "find_it",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string"}, "count": {"type": "integer"}},
            },
        },
    },
)


Syntax = TaggedSyntax | NestedSyntax | JsonSyntax
"""A syntax whose calls are read here, and not by the parsers of others."""


def syntax_of(write: Write) -> Syntax | None:
    """The syntax that a template writes calls in, if it is one that is read here; else None."""
    return learn_tagged_syntax(write) or learn_nested_syntax(write) or learn_json_syntax(write)


def syntax_read_by(
    read: Callable[[str], Sequence[ToolCall]], own: Syntax | None, write: Write
) -> Syntax | None:
    """The syntax in tags that a parser of others reads: the template's `own`, or a standard one;
    None if none is.
    """
    for syntax, writes in (*([] if own is None else [(own, write)]), *standard()):
        with suppress(Exception):  # its tokens are missing, or the text is of another form
            if is_call(read(writes([PROBE_CALL])), PROBE_CALL):
                return syntax
    return None


def call_reader(
    tokenizer: Any, template: ChatTemplate, wanted: str, own: Syntax | None
) -> ReadCalls | None:
    """The reader of the calls that a template writes, or of the format that is `wanted`; None if
    nothing quick reads them.

    `own`: the template's syntax, if it is one in tags.

    Raises:
        ConfigError: there is no such format.
    """
    written = template.call(PROBE_CALL)[1]
    if wanted == "canonical" or (
        wanted == "auto" and (not written or reads_canonically(written, PROBE_CALL))
    ):
        return canonical
    if wanted != "auto":
        read = named_reader(tokenizer, wanted)
        syntax = syntax_read_by(lambda text: read(text, _PROBE_TOOLS).calls, own, template.calls)
        return _compare_with_template(read, template) if syntax is None else syntax.read
    if own is not None:
        return own.read
    if getattr(tokenizer, "response_schema", None):
        return _compare_with_template(of_schema(tokenizer.parse_response), template)
    found = registered_reader(tokenizer, template)
    return None if found is None else _compare_with_template(found, template)


def slow_call_reader(tokenizer: Any, template: ChatTemplate) -> ReadCalls | None:
    """The first parser of vLLM that reads the calls that a template writes, and leaves nothing of
    them beside; None if none does. Takes seconds.
    """
    written = _without_stops(template.call(PROBE_CALL)[1], template)
    for reader in vllm_readers(tokenizer):
        read = _compare_with_template(reader, template)
        with suppress(Exception):  # the text is of another form
            if is_call(read(written, _PROBE_TOOLS).calls, PROBE_CALL):
                return read
    return None


def _compare_with_template(read: ReadCalls, template: ChatTemplate) -> ReadCalls:
    """`read`, whose readings are held against what the template would write."""
    return lambda text, tools: accounted(read(text, tools), text, template)


def accounted(found: Reading, text: str, template: ChatTemplate) -> Reading:
    """The reading of a text by another package's parser, if the template would write it so; else a
    reading that says why not.

    Such parsers leave out what they do not expect, and read half of a call. So words, numbers and
    brackets of the text must be those of the answer and of its calls as the template writes them,
    each as often. White space, their order and the ids of calls do not matter. If the template
    writes no calls, nothing can be compared.
    """
    probe = template.calls([PROBE_CALL])
    begun = (
        probe[: probe.find(PROBE_CALL.name)].split("\n")[-1].strip()
        if PROBE_CALL.name in probe
        else ""
    )
    # Where the text begins a call as the template would; -1 if nothing in it looks like one.
    at = text.find(begun) if begun else -1
    why = ""
    if found.malformed:
        return replace(found, content=text, literal=True)
    if not found.calls and at >= 0:
        why = "it is no call as this model's chat template writes them"
    elif not (found.calls or found.reasoning) and (
        odd := _count_tokens(text) - _count_tokens(found.content)
    ):
        why = f"{next(iter(odd))!r} stands where no call has it"
    elif found.calls and at >= 0 and is_quoted(text[:at]):
        why = QUOTED
    elif found.calls and (written := template.calls(found.calls)):
        there, read = _count_tokens(text), _count_tokens(f"{found.content}\n{written}")
        # The template may number calls, and a model's own ids are others: one odd token a call.
        ids = len(found.calls) if _CALL_ID.search(probe) else 0
        if (there - read).total() > ids or (read - there).total() > ids:
            odd = there - read or read - there
            why = f"{next(iter(odd))!r} is missing, or stands where no call has it"
    if why:
        return Reading(
            text, found.reasoning, malformed=(Unread(text[max(at, 0) :], why),), literal=True
        )
    return replace(found, literal=True)


_CALL_ID = re.compile(r"call\d{5}")
_TOKEN = re.compile(r"[^\W\d]\w*|\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|[{}\[\]()<>\"]")
_ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})")


def _count_tokens(text: str) -> Counter[str]:
    """Words, numbers and brackets, in whatever way JSON or Python writes them."""
    plain = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), text.replace("'", '"'))
    words = (word.casefold() for word in _TOKEN.findall(plain))
    return Counter(
        repr(float(word)) if word[0].isdecimal() else {"none": "null"}.get(word, word)
        for word in words
    )


def canonical(text: str, tools: Tools) -> Reading:
    """Calls in the canonical form stay where they are: the environment reads them there."""
    return Reading(text)


def read_tags(text: str) -> Reading:
    """Calls in the canonical form of a model whose own form that is: in tags, or with nothing
    around them.
    """
    found = parse_tool_calls(text)
    if found.errors:
        return Reading(text)  # the environment reads them there, and says what is wrong
    if not found.calls or ("<tool_call>" not in text and found.text):
        return Reading(text, literal=True)
    calls = tuple(replace(call, id=f"call{number:05d}") for number, call in enumerate(found.calls))
    return Reading(found.text, calls=calls, literal=True)


def reads_canonically(text: str, call: ToolCall) -> bool:
    """True if a text holds this call alone, in a form that the environment reads itself."""
    found = parse_tool_calls(text)
    return not found.errors and is_call(found.calls, call)


def named_reader(tokenizer: Any, name: str) -> ReadCalls:
    """The reader of a registered tool format, of `package.module:Name`, or of a parser of vLLM.

    Raises:
        ConfigError: there is none with that name.
    """
    formats = [plugin.name for plugin in plugins.installed("tool_formats")]
    if ":" in name or name in formats:
        reader: ToolFormat = plugins.load("tool_formats", name)(tokenizer)
        return _guard_reader(reader)
    if name in (others := parser_names()):
        return vllm_reader(tokenizer, name)
    known = ", ".join(("auto", "canonical", *formats, *others))
    raise ConfigError(f"model.tool_format: there is no format {name!r}. Formats: {known}")


def known_marks() -> Sequence[Marks]:
    """The marks around reasoning that templates may write: those known here, and those of formats
    of other packages.
    """
    stated = [
        ToolFormatOffers.of(factory).reasoning_marks
        for factory in _registered_formats()
        if factory not in BUILT_IN
    ]
    return (*MARKS, *(Marks(*marks) for marks in stated if marks is not None))


def _registered_formats() -> list[Any]:
    return [factory for _, factory in plugins.usable("tool_formats")]


def registered_reader(tokenizer: Any, template: ChatTemplate) -> ReadCalls | None:
    """The reader of the first registered format that reads the call that a template writes; None if
    none does. Formats of other packages come first.
    """
    written = template.call(PROBE_CALL)[1]
    of_others = [factory for factory in _registered_formats() if factory not in BUILT_IN]
    for factory in (*of_others, *BUILT_IN):
        # Parsers of the library read the tokens at the end of an answer, too.
        text = written if factory in BUILT_IN else _without_stops(written, template)
        with suppress(Exception):  # its tokens are missing, or the text is of another form
            reader: ToolFormat = factory(tokenizer)
            if is_call(reader.read(text, _PROBE_TOOLS).calls, PROBE_CALL):
                return _guard_reader(reader)
    return None


def _guard_reader(reader: ToolFormat) -> ReadCalls:
    """Its `read`, in which an error of another package's code makes the answer unreadable."""

    def read(text: str, tools: Tools) -> Reading:
        try:
            return reader.read(text, tools)
        except Exception as error:  # whatever a plug-in raises of what a model wrote
            return refused_by_parser(Reading(text), error)

    return read


def _without_stops(written: str, template: ChatTemplate) -> str:
    for stop in template.stops:
        written = written.removesuffix(stop)
    return written


def of_schema(parse: Callable[[str], Mapping[str, Any]]) -> ReadCalls:
    """Reads by the response schema of a tokenizer (transformers' `parse_response`)."""

    def read(text: str, tools: Tools) -> Reading:
        try:
            found = parse(text)
        except Exception as error:  # the schema's expressions fit a whole answer or none
            return refused_by_parser(Reading(text), error)
        calls: list[ToolCall] = []
        malformed: list[Unread] = []
        listed = found.get("tool_calls")
        for number, one in enumerate(listed if isinstance(listed, list | tuple) else ()):
            function = one.get("function", one)
            call = call_of(
                str(function.get("name", "")), function.get("arguments"), number, one.get("id")
            )
            if call is None:
                malformed.append(
                    Unread(json.dumps(one, default=str), "its arguments are no JSON object")
                )
            else:
                calls.append(call)
        reasoning = found.get("reasoning_content") or found.get("thinking") or ""
        return Reading(
            str(found.get("content") or ""), str(reasoning), tuple(calls), tuple(malformed)
        )

    return read
