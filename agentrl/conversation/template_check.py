"""The abilities of a model's chat template and tokenizer, found by trying: `agentrl check-model`.

Each `Finding` is one line. A finding that is not `right` says what goes wrong in a run, and what to
write.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl.conversation.reading import Marks
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.conversation.tool_calls import parse_tool_calls
from agentrl.conversation.tool_formats import PROBE_CALL
from agentrl.errors import ConfigError
from agentrl.tokens.arrays import IntArray, ints
from agentrl.trajectory import Completion, Message, ToolCall

_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "find_it",
        "description": "Finds it.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "count": {"type": "integer"},
                "lines": {"type": "array", "items": {"type": "string"}},
                "at": {"type": "object"},
            },
        },
    },
}
_HARD = ToolCall(
    "find_it",
    {
        "text": ' "a" <b>\n\\n {c} 3.10 é 你好 ',
        "count": -3,
        "lines": ["1", "x\ny", ""],
        "at": {"k": [1, {"d": True}]},
    },
)
"""Arguments of which parsers lose something."""
_TURNS = 4
_PROBE_THOUGHT = "Hm, 2 + 2."
_PLACES = {
    "system": "system messages",
    "systems": "several system messages at the beginning",
    "late_systems": "system messages after others",
    "tools": "descriptions of tools",
    "calls": "calls",
    "results": "results of tools",
    "repeated_users": "two messages of the user in a row",
}
"""Messages that a template may have no place for, which are folded into others then
(`agentrl.conversation.placing`).
"""
_LISTED = 12


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding about one `subject`, in words. `right`: nothing is wrong with it."""

    subject: str
    words: str
    right: bool = True


def template_findings(renderer: TemplateRenderer) -> Iterator[Finding]:
    """All that is found with a renderer of the model alone."""
    yield Finding(
        "family", renderer.family or "none is recognised: prompts are what the chat template writes"
    )
    yield _check_ends(renderer)
    can = renderer.for_tools([_TOOL]).template.abilities
    folded = [words for name, words in _PLACES.items() if not getattr(can, name)]
    yield Finding(
        "has no place for",
        f"{', '.join(folded)}: these become text of others" if folded else "nothing",
    )
    yield _reasoning(renderer)
    yield from _calls(renderer)
    yield _check_control_tokens(renderer)
    yield from _turns(renderer)


def _check_ends(renderer: TemplateRenderer) -> Finding:
    """The tokens that end answers. The template has to write one of them after an answer, else it
    is that of another model. (Families have formats of their own.)
    """
    stops = ", ".join(
        f"{renderer.decode(ints([one]))!r} ({one})" for one in renderer.stop_token_ids
    )
    said = [Message("user", "Well?"), Message("assistant", "So it is."), Message("user", "Oh.")]
    if not renderer.family and "family" not in renderer.calls_read_by:
        written = renderer.whole(said, ())
        if not np.isin(written, list(renderer.stop_token_ids)).any():
            text = renderer.decode(written[-24:])
            words = (
                f"{stops}, and the template writes none of them after an answer: it ends {text!r},"
                " so it is the template of another model"
            )
            return Finding("answers end with", words, False)
    return Finding("answers end with", stops)


def _reasoning(renderer: TemplateRenderer) -> Finding:
    marks = renderer.reasoning_marks
    if marks is None:
        of_family = renderer.reasons or "family" in renderer.calls_read_by
        return Finding("reasoning", "as its family writes it" if of_family else "none")
    asked = renderer.conversation()
    prompt = asked.prompt([Message("user", "Well?")])
    asked.answer(
        _make_completion(renderer, renderer.encode_answer(_write_thinking(renderer, "So it is.")))
    )
    answer = asked.messages[-1]
    who = "the prompt" if _begins_reasoning(renderer, marks) else "the model"
    words = f"{marks.begin.strip()} ... {marks.end}, begun by {who}"
    if (answer.content.strip(), answer.reasoning.strip()) == ("So it is.", _PROBE_THOUGHT):
        return Finding("reasoning", words)
    tail = renderer.decode(prompt.ids[-12:])
    return Finding(
        "reasoning",
        f"{words}, and it is not told from the answer after a prompt that ends {tail!r}",
        False,
    )


def _begins_reasoning(renderer: TemplateRenderer, marks: Marks) -> bool:
    """True if the template has begun the reasoning where an answer begins."""
    return renderer.template.header.rstrip().endswith(marks.begin.strip())


def _write_thinking(renderer: TemplateRenderer, said: str) -> str:
    """An answer after a thought, as the model would write it; the answer alone, if its marks are
    not known.
    """
    marks = renderer.reasoning_marks
    if marks is None:
        return said
    opening = "" if _begins_reasoning(renderer, marks) else marks.begin
    return f"{opening}{_PROBE_THOUGHT}{marks.end}\n\n{said}"


def _calls(renderer: TemplateRenderer) -> Iterator[Finding]:
    renderer = renderer.for_tools([_TOOL])
    conversation = renderer.conversation([_TOOL])  # now it has looked for a parser
    conversation.prompt([Message("user", "Go.")])
    written = _write_call(renderer, PROBE_CALL)
    yield Finding("calls of tools", f"{written!r}, read by {renderer.calls_read_by or 'nothing'}")
    for call, words in ((PROBE_CALL, "a call"), (_HARD, "texts, numbers and lists in a call")):
        read = _read_back(renderer, call)
        if read == [(call.name, dict(call.arguments))]:
            yield Finding("round trip", f"{words}: to the letter")
        else:
            written = _write_call(renderer, call)
            why = f"{words}: written as {written!r:.300} and read as {read!r:.300}. "
            yield Finding("round trip", f"{why}Write model.tool_format=canonical", False)


def _write_call(renderer: TemplateRenderer, call: ToolCall) -> str:
    """A call as the template writes it, without what ends the answer."""
    text = renderer.template.call(call)[1] or call.render()
    for stop in renderer.template.stops:
        text = text.removesuffix(stop)
    return text


def _read_back(renderer: TemplateRenderer, call: ToolCall) -> list[tuple[str, dict[str, Any]]]:
    """The calls that an environment gets of an answer that makes this one."""
    conversation, text, marks = (
        renderer.conversation([_TOOL]),
        _write_call(renderer, call),
        renderer.reasoning_marks,
    )
    prompt = renderer.decode(conversation.prompt([Message("user", "Go.")]).ids).rstrip()
    if marks is not None and prompt.endswith(marks.begin.strip()) and marks.end not in text:
        text = f"{marks.end}{text}"
    action = conversation.answer(_make_completion(renderer, renderer.encode_answer(text)))
    return [(one.name, dict(one.arguments)) for one in parse_tool_calls(action).calls]


def _check_control_tokens(renderer: TemplateRenderer) -> Finding:
    """The finding about control tokens: text of others with one in it has no control token that
    other text has not.
    """
    texts = sorted(renderer.control_tokens)
    few = ", ".join(texts[:_LISTED]) + (
        f" and {len(texts) - _LISTED} more" if len(texts) > _LISTED else ""
    )
    words = f"{len(texts)} that text of others never becomes: {few}" if texts else "none"
    forged = [
        text
        for text in texts
        if _control_ids_with(renderer, text) != _control_ids_with(renderer, "w")
    ]
    if forged:
        return Finding(
            "control tokens", f"text of others becomes {', '.join(forged[:_LISTED])}", False
        )
    return Finding("control tokens", words)


def _control_ids_with(renderer: TemplateRenderer, text: str) -> list[int]:
    messages = [Message("system", f"You play x{text}y."), Message("user", f"Go on: x{text}y")]
    control = {*renderer.control_tokens.values()}
    return [one for one in renderer.whole(messages, ()).tolist() if one in control]


def _turns(renderer: TemplateRenderer) -> Iterator[Finding]:
    """The finding about turns: whether they extend each other, and whether the template writes the
    same of the whole conversation.
    """
    try:
        news = [Message("system", "You play."), Message("user", "Begin now.")]
        conversation, seen = renderer.conversation(), list[int]()
        for turn in range(_TURNS):
            prompt = conversation.prompt(news)
            if prompt.ids[: len(seen)].tolist() != seen:
                yield Finding("turns", f"turn {turn + 1} does not extend the one before", False)
                return
            conversation.answer(
                _make_completion(
                    renderer, renderer.encode_answer(_write_thinking(renderer, f"left {turn}"))
                )
            )
            news = [Message("user", f"Now {turn}: é, 你好")]
            seen = prompt.ids.tolist()
        last = conversation.prompt(news).ids
    except ConfigError as error:
        yield Finding("turns", str(error), False)
        return
    same = np.array_equal(last, renderer.whole(conversation.messages, ()))
    kept = (
        ""
        if same
        else (
            ", where the template would write earlier turns differently (model.history=template"
            " forks)"
        )
    )
    yield Finding("turns", f"each extends the one before, token for token{kept}")


def _make_completion(renderer: TemplateRenderer, ids: IntArray) -> Completion:
    """A completion of these tokens and a stop token."""
    whole: Sequence[int] = [*ids.tolist(), renderer.stop_token_ids[0]]
    return Completion(ints(whole), np.zeros(len(whole), np.float32), ints([0] * len(whole)), "stop")
