"""The answers of gpt-oss: messages on channels, all of which are accounted for.

    <|start|>assistant<|channel|>analysis<|message|>TEXT<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME
    <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>TEXT<|return|>

The first header begins in the prompt, and by the library's rules the channel `analysis` is opened
there. Text on that channel is reasoning, a message to a function is a call, whatever ends it, and
all other text is the answer's: on another channel, on none, or outside of messages. The vendor's
parser leaves that out.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from agentrl.conversation.reading import Reading, Unread, call_of
from agentrl.trajectory import ToolCall

_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_MARKS = ("<|start|>", "<|channel|>", "<|message|>", *_ENDS)
_RECIPIENT = re.compile(r"\bto=([^\s<]*)")
_NO_TEXT = re.compile(r"^\s*assistant\b|\bto=\S*|<\|constrain\|>\s*\w*")
"""The part of a header before the channel."""
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


_HEADER = 32
"""More tokens than a header has."""


class _Block(NamedTuple):
    """A message: its header, its text, and what ends it; empty if the next begins, or if nothing
    does.
    """

    header: str
    text: str
    end: str
    last: bool


def read_harmony(tokenizer: Any, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Reading:
    """An answer, taken apart. The first header begins in the prompt, which may name the channel,
    too.
    """
    reasoning, said = list[str](), list[str]()
    calls, unread = list[ToolCall](), list[Unread]()
    cut = False
    for block in _blocks(tokenizer, [*_opened_channel_ids(tokenizer, prompt_ids), *answer_ids]):
        said.append(_NO_TEXT.sub("", block.header.partition("<|channel|>")[0]))
        recipients, channel = _RECIPIENT.findall(block.header), _CHANNEL.search(block.header)
        if recipients:
            call = _call(block, recipients, len(calls))
            if isinstance(call, ToolCall):
                calls.append(call)
            else:
                unread.append(call)
                said[-1:] = [call.text]
        elif channel is not None and channel[1] == "analysis":
            reasoning.append(block.text)
            cut = block.last and not block.end
        else:
            said.append(block.text)
    content = "\n".join(filter(None, (text.strip() for text in said)))
    return Reading(
        content, "".join(reasoning).strip(), tuple(calls), tuple(unread), cut and not content, True
    )


def _opened_channel_ids(tokenizer: Any, prompt_ids: Sequence[int]) -> Sequence[int]:
    """The end of a prompt from where it opens a channel; nothing if the answer does that."""
    start, channel = map(tokenizer.convert_tokens_to_ids, ("<|start|>", "<|channel|>"))
    tail = list(prompt_ids[-_HEADER:])
    header = tail[len(tail) - tail[::-1].index(start) :] if start in tail else []
    return header[header.index(channel) :] if channel in header else []


def _call(block: _Block, recipients: Sequence[str], number: int) -> ToolCall | Unread:
    whole = f"{block.header}<|message|>{block.text}{block.end}".strip()
    if not block.end:
        return Unread(whole, "it does not end with <|call|>")
    if len(recipients) > 1:
        return Unread(whole, "a message has one recipient")
    call = call_of(recipients[0].removeprefix("functions."), block.text.strip() or "{}", number)
    if call is None:
        return Unread(whole, "its arguments are no JSON object")
    return call if call.name else Unread(whole, "to=functions.NAME must name a tool")


def _blocks(tokenizer: Any, answer_ids: Sequence[int]) -> Iterator[_Block]:
    """The messages of an answer; text outside of messages is one without a header."""
    header, text, in_text = "", "", False
    for mark, part in _parts(tokenizer, answer_ids):
        if in_text and mark in ("<|channel|>", "<|message|>"):  # no header begins here
            text += f"{mark}{part}"
        elif mark == "<|message|>":
            in_text, text = True, part
        elif mark in ("", "<|channel|>"):
            header += f"{mark}{part}"
        else:
            if in_text:
                yield _Block(header, text, mark if mark in _ENDS else "", False)
            elif header.strip():
                yield _textless_block(header, False)
            header, in_text = part, False
    if in_text:
        yield _Block(header, text, "", True)
    elif header.strip():
        yield _textless_block(header, True)


def _textless_block(header: str, last: bool) -> _Block:
    """A header that no text follows: of a message that was cut short; or it is no header, but text
    outside of messages.
    """
    begun = _RECIPIENT.search(header) or _CHANNEL.search(header)
    return _Block(header, "", "", last) if begun else _Block("", header, "", last)


def _parts(tokenizer: Any, answer_ids: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Each mark with the text after it; the first text has none."""
    marks = {tokenizer.convert_tokens_to_ids(mark): mark for mark in _MARKS}
    mark, ids = "", list[int]()
    for token in answer_ids:
        if token in marks:
            yield mark, tokenizer.decode(ids, skip_special_tokens=False) if ids else ""
            mark, ids = marks[token], []
        else:
            ids.append(token)
    yield mark, tokenizer.decode(ids, skip_special_tokens=False) if ids else ""
