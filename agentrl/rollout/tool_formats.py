"""The syntaxes in which models call tools: which one a model's template writes, and what reads it.

The parsers are those of the library `renderers`, of a tokenizer's response schema (transformers) and of vLLM. A parser
is chosen by what it does: the template writes a call, and the parser must read that very call.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from agentrl.errors import ConfigError
from agentrl.rollout.chat_template import ChatTemplate
from agentrl.rollout.family import calls_in
from agentrl.rollout.reading import ReadCalls, Reading, Tools, as_declared, call_of
from agentrl.rollout.tools import parse_tool_calls
from agentrl.rollout.vllm_parsers import find_vllm_reader, parser_names, vllm_reader
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


def call_reader(tokenizer: Any, template: ChatTemplate, wanted: str) -> ReadCalls | None:
    """What reads the calls that a template writes, or the format that is `wanted`; None if nothing quick does.

    Raises:
        ConfigError: there is no such format.
    """
    written = template.call(PROBE_CALL)[1]
    if wanted == "canonical" or (wanted == "auto" and (not written or reads_canonically(written, PROBE_CALL))):
        return canonical
    if wanted == "auto" and getattr(tokenizer, "response_schema", None):
        return of_schema(tokenizer.parse_response)
    return library_reader(tokenizer, written, PROBE_CALL) if wanted == "auto" else named_reader(tokenizer, wanted)


def slow_call_reader(tokenizer: Any, template: ChatTemplate) -> ReadCalls | None:
    """The parser of vLLM that reads the calls that a template writes; None if none does. Takes seconds."""
    written = template.call(PROBE_CALL)[1]
    for stop in template.stops:
        written = written.removesuffix(stop)
    return find_vllm_reader(tokenizer, written, PROBE_CALL, _PROBE_TOOLS)


def canonical(text: str, tools: Tools) -> Reading:
    """Calls in the canonical form stay where they are: the environment reads them there."""
    return Reading(text)


def reads_canonically(text: str, call: ToolCall) -> bool:
    """Whether a text holds this call, and no other, in a form that the environment reads by itself."""
    found = parse_tool_calls(text)
    return not found.errors and [(one.name, dict(one.arguments)) for one in found.calls] == [
        (call.name, call.arguments)
    ]


def named_reader(tokenizer: Any, name: str) -> ReadCalls:
    """Reads calls by a parser of the library `renderers`, or of vLLM.

    Raises:
        ConfigError: there is none with that name.
    """
    from renderers.parsers import TOOL_PARSERS

    if name not in TOOL_PARSERS:
        if name in (others := parser_names()):
            return vllm_reader(tokenizer, name)
        known = ", ".join(("auto", "canonical", *TOOL_PARSERS, *others))
        raise ConfigError(f"model.tool_format: there is no format {name!r}. Formats: {known}")
    parser = TOOL_PARSERS[name](tokenizer)

    def read(text: str, tools: Tools) -> Reading:
        left, found = parser.extract(list(tokenizer.encode(text, add_special_tokens=False)))
        calls, malformed = calls_in(found)
        calls = tuple(as_declared(call, tools) for call in calls)
        said = tokenizer.decode(list(left), skip_special_tokens=False).strip()
        return Reading(said, calls=calls, malformed=malformed)

    return read


def library_reader(tokenizer: Any, written: str, call: ToolCall) -> ReadCalls | None:
    """The parser of the library that reads this call where a template has written it; None if none does."""
    from renderers.parsers import TOOL_PARSERS

    for name in TOOL_PARSERS:
        with suppress(Exception):  # its tokens are missing, or the text is of another form
            read = named_reader(tokenizer, name)
            if [(one.name, dict(one.arguments)) for one in read(written, ()).calls] == [(call.name, call.arguments)]:
                return read
    return None


def of_schema(parse: Callable[[str], Mapping[str, Any]]) -> ReadCalls:
    """Reads by the response schema of a tokenizer (transformers' `parse_response`)."""

    def read(text: str, tools: Tools) -> Reading:
        try:
            found = parse(text)
        except Exception:  # the schema's expressions fit a whole answer or none
            return Reading("", malformed=(text,))
        calls: list[ToolCall] = []
        malformed: list[str] = []
        for number, one in enumerate(_sequence(found.get("tool_calls"))):
            function = one.get("function", one)
            call = call_of(str(function.get("name", "")), function.get("arguments"), number, one.get("id"))
            if call is None:
                malformed.append(json.dumps(one, default=str))
            else:
                calls.append(call)
        reasoning = found.get("reasoning_content") or found.get("thinking") or ""
        return Reading(str(found.get("content") or ""), str(reasoning), tuple(calls), tuple(malformed))

    return read


def _sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()
