"""Calls of tools read by the parsers of vLLM, where it is installed: some fifty syntaxes.

They are the last resort, because importing them takes seconds.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

from agentrl.conversation.declared import Tools
from agentrl.conversation.reading import (
    ReadCalls,
    Reading,
    Unread,
    as_declared,
    call_of,
    refused_by_parser,
)


def parser_names() -> list[str]:
    """The names of the parsers; none if vLLM is not installed, or has none where they are looked
    for.
    """
    if find_spec("vllm") is None:
        return []
    try:
        from vllm.tool_parsers import ToolParserManager
    except ImportError:
        return []
    return sorted({*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers})


def vllm_reader(tokenizer: Any, name: str) -> ReadCalls:
    """Reads calls by the parser with this name. `tokenizer`: the Hugging Face tokenizer."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    kind = ToolParserManager.get_tool_parser(name)

    def read(text: str, tools: Tools) -> Reading:
        request = ChatCompletionRequest(messages=[], model="", tools=[dict(tool) for tool in tools])
        with _swallowed_errors() as swallowed:
            found = kind(tokenizer, request.tools).extract_tool_calls(text, request)
        if swallowed and not found.tools_called:
            return refused_by_parser(Reading(text), swallowed[0])
        if not found.tools_called:
            return Reading(text)
        calls, malformed = [], []
        for number, one in enumerate(found.tool_calls):
            call = call_of(one.function.name, one.function.arguments, number)
            if call is None:
                told = f"{one.function.name} {one.function.arguments}"
                malformed.append(Unread(told, "its arguments are no JSON object"))
            else:
                calls.append(as_declared(call, tools))
        return Reading(
            (found.content or "").strip(), calls=tuple(calls), malformed=tuple(malformed)
        )

    return read


def vllm_readers(tokenizer: Any) -> Iterator[ReadCalls]:
    """The parsers that can be made for a tokenizer: some need tokens of their own."""
    for name in parser_names():
        with suppress(Exception):  # whatever a parser raises that misses something
            yield vllm_reader(tokenizer, name)


@contextmanager
def _swallowed_errors() -> Iterator[list[BaseException]]:
    """Collect the errors that the parsers swallow in the block. They would log each with its
    traceback.
    """
    swallowed: list[BaseException] = []

    def gather(record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1] is not None:
            swallowed.append(record.exc_info[1])
        return False

    loggers = [
        one
        for name, one in logging.root.manager.loggerDict.items()
        if name.startswith("vllm.tool_parsers") and isinstance(one, logging.Logger)
    ]
    for one in loggers:
        one.addFilter(gather)
    try:
        yield swallowed
    finally:
        for one in loggers:
            one.removeFilter(gather)
