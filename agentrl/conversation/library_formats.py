"""Tool formats that the parsers of the library `renderers` read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.conversation.declared import Tools
from agentrl.conversation.reading import Reading, Unread, as_declared, call_of
from agentrl.trajectory import ToolCall


@dataclass(frozen=True, slots=True)
class LibraryFormat:
    """The tool format of a parser of the library, which reads tokens; made for a tokenizer."""

    parser: str
    """The parser's name in the library."""

    def __call__(self, tokenizer: Any) -> "LibraryReader":
        """Make the reader for a Hugging Face tokenizer.

        Raises:
            Exception: the tokenizer lacks tokens of the format; whatever the parser raises then.
        """
        from renderers.parsers import TOOL_PARSERS

        return LibraryReader(tokenizer, TOOL_PARSERS[self.parser](tokenizer))


@dataclass(frozen=True, slots=True)
class LibraryReader:
    """A parser of the library with the tokenizer that it was made for."""

    tokenizer: Any
    """The Hugging Face tokenizer."""
    parser: Any
    """The parser, with a method `extract` of token ids."""

    def read(self, text: str, tools: Tools) -> Reading:
        """Read the calls of an answer."""
        token_ids = list(self.tokenizer.encode(text, add_special_tokens=False))
        left_ids, parsed = self.parser.extract(token_ids)
        calls, malformed = calls_in(parsed)
        typed = tuple(as_declared(call, tools) for call in calls)
        content = self.tokenizer.decode(list(left_ids), skip_special_tokens=False).strip()
        return Reading(content, calls=typed, malformed=malformed)


QWEN3 = LibraryFormat("qwen3")
QWEN35 = LibraryFormat("qwen3.5")
GLM = LibraryFormat("glm")
DEEPSEEK_V3 = LibraryFormat("deepseek-v3")
BUILT_IN = (QWEN3, QWEN35, GLM, DEEPSEEK_V3)
"""The formats in the order in which they are tried."""


def calls_in(found: Sequence[Any]) -> tuple[tuple[ToolCall, ...], tuple[Unread, ...]]:
    """The calls among what a parser has found, and those that cannot be read."""
    calls, malformed = [], []
    for number, one in enumerate(found):
        call = call_of(one.name, one.arguments, number, one.id) if one.name else None
        # The library calls arguments that are texts between tags "invalid JSON"; they are fine.
        if call is not None and str(one.status) in ("ok", "unknown_tool", "invalid_json"):
            calls.append(call)
        else:
            malformed.append(Unread(one.raw, str(one.status).replace("_", " ")))
    return tuple(calls), tuple(malformed)
