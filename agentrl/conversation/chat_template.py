"""A model's chat template: what it can express, and what it writes after an answer.

A template renders a whole conversation. A conversation that extends needs only what is new: the
text that the template writes after an answer, from the end of the answer's turn to where the next
answer begins. `ChatTemplate` gets it by rendering a short conversation with a mark for the answer,
followed by the new messages:

    <user>U<end><assistant>MARK<end>  <user>new message<end><assistant>
    |----------- opening ----------|  |------------ added ------------|

The opening is found when the template is loaded, once for answers that a user's message follows and
once for calls that a tool's result follows. What a template does to earlier answers (many strip
their reasoning) does not matter: it never sees them.

Templates refuse different things: `agentrl.conversation.placing` has the rules for sequences of
messages. Besides these:

- no tools: their definitions follow the system message, and how to call them (`describe`);
- no text but in parts: a content is a list of one text.

What is rendered is looked for in the text: a template that leaves out a message is refused.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from agentrl.conversation.control_tokens import bare
from agentrl.conversation.placing import Places, place_messages
from agentrl.errors import ConfigError
from agentrl.tokens.encoded_image import EncodedImage
from agentrl.trajectory import Message, ToolCall

_MARK, _NEW_MARK, _NAME_MARK = "xqAnswerMark", "xqMessageMark", "xq_tool_mark"
_CALL_ID = "call00001"
"""Nine letters and digits, as Mistral's templates require."""
_PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": _NAME_MARK,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}},
            "required": ["text"],
        },
    },
}
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")

Json = dict[str, Any]
Render = Callable[[list[Json], list[Json] | None, bool], str]
"""Renders messages and tools as text, with or without the beginning of an answer at the end."""
Kind = Literal["user", "tool"]
"""The messages that follow an answer: one of the user, or the result of a tool."""


@dataclass(frozen=True, slots=True)
class Abilities(Places):
    """The roles and messages that a template can express. Without `calls`, these stand in the
    answer's content, in the canonical form.
    """

    tools: bool = True
    parts: bool = False
    """Contents are lists of parts."""
    json_arguments: bool = False
    """The arguments of calls are JSON in a text."""
    reasoning_key: str = ""
    """The key of an assistant message that the template reads its reasoning from; empty if it reads
    none.
    """


class _Continuation(NamedTuple):
    """The text up to the end of the answer's turn; and what ends that turn, which is empty if the
    next header does.
    """

    opening: str
    closing: str


class ChatTemplate:
    """A chat template: renders conversations, and what is new in them.

    Raises:
        ConfigError: the template cannot render a user's message, or cannot go on after an answer.
    """

    def __init__(
        self,
        render: Render,
        *,
        stops: Sequence[str] = (),
        specials: Sequence[str] = (),
        own_tools: bool = True,
    ) -> None:
        """`stops`: texts of the tokens that are known to end an answer. `specials`: texts of all
        special tokens.

        Without `own_tools`, tools are described, called and answered in text, though the template
        has a place for them.
        """
        self._render = render
        self._special = re.compile(
            "|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or r"(?!)"
        )
        can = self._find_abilities()
        self._abilities = (
            can if own_tools else replace(can, tools=False, calls=False, results=False)
        )
        self.stops = list(stops)
        """Texts of the tokens that end an answer: the known ones, and those that the template
        writes there.
        """
        self._continuations = self._find_continuations()
        if not self._continuations["user"].closing:
            # The header of the user ends the answer, so the model has written it already, and no
            # message of the system can follow.
            self._abilities = replace(self._abilities, late_systems=False)

    @property
    def abilities(self) -> Abilities:
        """The roles and messages that the template can express."""
        return self._abilities

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of a whole conversation.

        `add_generation_prompt`: up to where the assistant begins to write; else to the end of the
        last message.

        Raises:
            ConfigError: the template refuses it.
        """
        shown = [dict(tool) for tool in tools] if self._abilities.tools else []
        text = self._try_render(
            self.messages_of(messages, tools), shown or None, add_generation_prompt
        )
        if isinstance(text, Exception):
            raise ConfigError(
                f"the chat template refuses a conversation of {_roles(messages)}:"
                f" {type(text).__name__}: {text}. Give another template, in a file that"
                " model.chat_template names"
            ) from text
        # Some templates leave out the text beside calls if another answer follows. Then text and
        # calls are written as two answers.
        if _misses_text_beside_calls(text, messages):
            apart = self._try_render(
                self.messages_of(messages, tools, apart=True), shown or None, add_generation_prompt
            )
            if isinstance(apart, str) and not _misses_text_beside_calls(apart, messages):
                text = apart
            else:  # where two answers cannot follow each other, as in Mistral's templates
                text = self._put_texts_before_calls(text, messages)
        return self._check_written(text, messages)

    def _put_texts_before_calls(self, text: str, messages: Sequence[Message]) -> str:
        """The text of a conversation, with the texts that it leaves out of answers put before their
        calls.

        Raises:
            ConfigError: the calls of such an answer are not there either.
        """
        at = 0
        for place, message in enumerate(messages):
            if message.tool_calls:
                calls = self.call(*message.tool_calls)[1].strip()
                begin = text.find(calls, at) if calls else -1
                said = message.said.strip()
                if said not in text[at:]:
                    if begin < 0:
                        raise left_out(place, messages)
                    text = f"{text[:begin]}{said}{text[begin:]}"
                    begin += len(said)
                at = max(at, begin + len(calls))
        return text

    def added(self, messages: Sequence[Message]) -> str:
        """The text after an answer's end of turn: `messages`, and where the next answer begins.

        Raises:
            ConfigError: the template refuses it, or renders the beginning of a conversation
            differently now.
        """
        new = self.messages_of(messages, (), begins=False)
        kind = self._kind(new[0])
        name = new[0].get("name", "")
        text = self._try_render([*_base(kind, name, self._abilities), *new])
        opening = self._continuations[kind].opening.replace(_NAME_MARK, name)
        # Some templates write today's date, so the opening may have changed since it was found.
        if isinstance(text, str) and not text.startswith(opening):
            self._continuations = self._find_continuations()
            opening = self._continuations[kind].opening.replace(_NAME_MARK, name)
        if isinstance(text, str) and not text.startswith(opening):
            # What follows may change how the answer is rendered: many strip its reasoning when the
            # user speaks.
            opening = self._find_continuation(kind, self._possible_ends(kind), new).opening.replace(
                _NAME_MARK, name
            )
        if not isinstance(text, str) or not text.startswith(opening):
            raise ConfigError(
                "the chat template cannot go on after an answer with messages of"
                f" {_roles(messages)}: {text if isinstance(text, Exception) else opening!r:.500}."
                " Write model.history=template, or give another template in a file that"
                " model.chat_template names"
            )
        return self._check_written(text[len(opening) :], messages)

    def check_later_turns(self) -> None:
        """Check that what follows an answer does not depend on how much came before it, as a number
        of the turn does: `added` renders it after a short conversation.

        Raises:
            ConfigError: it does.
        """
        base = _base("user", "", self._abilities)
        new = _content_in_parts(_new_message("user"), self._abilities)
        second, later = self._try_render([*base, new]), self._try_render([*base, *base, *base, new])
        if isinstance(second, Exception) or isinstance(later, Exception):
            return
        as_second, as_later = second.rpartition(_MARK)[2], later.rpartition(_MARK)[2]
        # Some templates write the time: only a difference that repeats is one of the turn.
        if as_second != as_later and self._try_render([*base, new]) == second:
            raise ConfigError(
                "the chat template writes a message by how many came before it: the second turn"
                f" with {bare(as_second)!r:.200}, and a later one with {bare(as_later)!r:.200}."
                " Write model.history=template, or give another template in a file that"
                " model.chat_template names"
            )

    def _check_written(self, text: str, messages: Sequence[Message]) -> str:
        """The text, checked to hold all that others wrote.

        A template may change a text: trim it, write it as JSON, take a switch such as `/no_think`
        out of it. If one is not found, the same messages with marks for their texts show whether
        the template has a place for them.

        Raises:
            ConfigError: the template leaves a message out.
        """
        lost = not_in(text, messages)
        if lost is not None:
            marked = with_marks(messages)
            shown = self._try_render(self.messages_of(marked, ()))
            if isinstance(shown, Exception) or not_in(shown, marked) is not None:
                raise left_out(lost, messages)
        return text

    def call(self, *calls: ToolCall) -> tuple[str, str]:
        """A prompt and the answer to it that makes calls, with what ends it; empty if the template
        writes no calls.
        """
        base = _base("user", "", self._abilities)[:1]
        answer = _content_in_parts(
            _as_json(Message("assistant", "", tool_calls=calls), self._abilities), self._abilities
        )
        text = self._try_render([*base, answer], None, False)
        if not self._abilities.calls or isinstance(text, Exception):
            return "", ""
        # Some prompts begin the reasoning, which a call without reasoning does not.
        prompts = [
            prompt
            for add in (True, False)
            if isinstance(prompt := self._try_render(base, None, add), str)
        ]
        begun = next((prompt for prompt in prompts if text.startswith(prompt)), "")
        ends = [at + len(stop) for stop in self.stops if (at := text.find(stop, len(begun))) >= 0]
        return begun, text[len(begun) : min(ends, default=len(text))]

    def calls(self, calls: Sequence[ToolCall]) -> str:
        """Calls as they stand after an answer's own text, without what ends the answer; empty if it
        writes none.
        """
        base = _base("user", "", self._abilities)
        one = Message("assistant", _MARK, tool_calls=tuple(calls))
        text = self._try_render(
            [base[0], _content_in_parts(_as_json(one, self._abilities), self._abilities)],
            None,
            False,
        )
        if not self._abilities.calls or isinstance(text, Exception):
            return ""
        written = text.partition(_MARK)[2]
        # Some leave out the answer's text, or write it after calls.
        if any(call.name not in written for call in calls):
            written = self.call(*calls)[1]
        ended = written.rstrip()
        return next(
            (ended.removesuffix(stop) for stop in self.stops if ended.endswith(stop)), written
        )

    @property
    def header(self) -> str:
        """The text that the template writes where an answer begins."""
        user = [_content_in_parts({"role": "user", "content": _MARK}, self._abilities)]
        before, begun = self._try_render(user, None, False), self._try_render(user)
        found = isinstance(before, str) and isinstance(begun, str) and begun.startswith(before)
        return str(begun)[len(str(before)) :] if found else ""

    @property
    def before_answer(self) -> str:
        """A short prompt after which the template writes an answer's text at once; empty if it
        writes something of its own between them.
        """
        base = _base("user", "", self._abilities)
        prompt, answered = self._try_render(base[:1]), self._try_render(base, None, False)
        follows = (
            isinstance(prompt, str)
            and isinstance(answered, str)
            and answered.startswith(f"{prompt}{_MARK}")
        )
        return str(prompt) if follows else ""

    def closing(self, messages: Sequence[Message]) -> str:
        """The end of the turn of an answer that was cut short, before `messages`."""
        return self._continuations[
            self._kind(self.messages_of(messages, (), begins=False)[0])
        ].closing

    def frames(self) -> str:
        """The text that the template writes around messages of the system, the user and tools, and
        before an answer.
        """
        messages = (
            Message("user", ""),
            Message("tool", "", tool_call_id=_CALL_ID, name=_NAME_MARK),
        )
        opening = self._try_render(
            [
                _content_in_parts({"role": role, "content": "U"}, self._abilities)
                for role in ("system", "user")
            ]
        )
        found = [opening] if isinstance(opening, str) else [self.text(messages[:1], ())]
        with suppress(ConfigError):
            found += [self.added([message]) for message in messages]
        return "".join(found)

    def messages_of(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        begins: bool = True,
        apart: bool = False,
    ) -> list[Json]:
        """Messages as this template takes them; `tools` are described if it takes none. `begins`:
        see `place_messages`.

        `apart`: the text of an answer and its calls are two answers.
        """
        can = replace(self._abilities, text_beside_calls=False) if apart else self._abilities
        if tools and not can.tools:
            system = [message.content for message in messages[:1] if message.role == "system"]
            said = "\n\n".join(filter(None, (*system, describe(tools))))
            messages = [Message("system", said), *messages[len(system) :]]
        return [
            _content_in_parts(_as_json(message, can), can, len(message.images))
            for message in place_messages(messages, can, begins=begins)
        ]

    def images_of(self, messages: Sequence[Message], *, begins: bool) -> list[EncodedImage]:
        """The pictures of messages, in the order in which the template writes them."""
        if not any(message.images for message in messages):
            return []
        placed = place_messages(messages, self._abilities, begins=begins)
        return [image for message in placed for image in message.images]

    # Probing: what the template can do is found by rendering short conversations with marks

    def _find_abilities(self) -> Abilities:
        user = {"role": "user", "content": _MARK}
        said, can = self._try_render([user]), self._form_of_content(user)
        if can is None:
            # Some templates need a list of tools even where there are none.
            render = self._render
            self._render = lambda messages, tools, add: render(messages, tools or [], add)
            can = self._form_of_content(user)
        if can is None:
            raise ConfigError(
                "the chat template cannot render a user's message:"
                f" {said if isinstance(said, Exception) else 'it leaves it out'}. Give what it"
                " needs in model.chat_template_kwargs, or another template in a file that"
                " model.chat_template names"
            )
        mark = {"content": _NEW_MARK}
        can = replace(
            can,
            system=self._shows(_NEW_MARK, [{"role": "system", **mark}, user], can),
            tools=self._shows(_NAME_MARK, [user], can, [dict(_PROBE_TOOL)]),
            repeated_users=self._shows(_NEW_MARK, [user, {"role": "user", **mark}], can),
            reasoning_key=next(
                (
                    key
                    for key in _REASONING_KEYS
                    if self._shows(
                        _NEW_MARK,
                        [user, {"role": "assistant", "content": "a", key: _NEW_MARK}],
                        can,
                    )
                ),
                "",
            ),
        )
        for form in (can, replace(can, json_arguments=True), replace(can, calls=False)):
            result = [*_base("tool", _NAME_MARK, form), _new_message("tool")]
            shows_both = self._shows(_MARK, result, form) and self._shows(_NEW_MARK, result, form)
            if shows_both and self._shows_in_order("UCTCT", form):
                return self._probe_places(form)
        return self._probe_places(replace(can, calls=False, results=False))

    def _probe_places(self, can: Abilities) -> Abilities:
        """`can` with the places that the template has for sequences of messages.

        Each probe is a conversation, a letter for each message (`_PROBES`): "USU" asks whether a
        system message may stand between two of the user.
        """
        results = can.calls and can.results

        def places(*conversations: str) -> bool:
            plain = (each for each in conversations if results or not set("CTX") & set(each))
            return all(self._shows_in_order(each, can) for each in plain)

        return replace(
            can,
            systems=places("SSU"),
            late_systems=places("USU", "UASU", "UAS", "SUASU", "UCTS", "UCTSU", "SUASUASU"),
            stray_results=not results or places("UT", "UAT", "UATU", "UATAT"),
            repeated_users=can.repeated_users and places("UU", "UUAUU"),
            repeated_answers=places("UAAU", "UAAUA"),
            users_after_results=places("UCTU", "UCTUAU"),
            text_beside_calls=places("UXT", "UXTXTUXU"),
            any_beginning=(
                places("S", "SAU", "AU") and self._shows_in_order("S", can, described=True)
                if can.system
                else places("AU")
            ),
        )

    def _shows_in_order(self, roles: str, can: Abilities, *, described: bool = False) -> bool:
        """True if the template shows all texts of a conversation in order; the text and the calls
        of one answer may change places.

        `described`: a tool is described, though none is called.
        """
        spoken = [_PROBES[role](f"xq{place}Mark") for place, role in enumerate(roles)]
        tools = [dict(_PROBE_TOOL)] if can.tools and (described or set("CX") & set(roles)) else None
        text = self._try_render(
            [_content_in_parts(_as_json(message, can), can) for message in spoken], tools
        )
        if isinstance(text, Exception):
            return False
        found = [text.find(f"xq{place}Mark") for place in range(len(roles))]
        return min(found) >= 0 and (found == sorted(found) or "X" in roles)

    def _form_of_content(self, user: Json) -> Abilities | None:
        return next(
            (
                can
                for can in (Abilities(), Abilities(parts=True))
                if self._shows(_MARK, [user], can)
            ),
            None,
        )

    def _shows(
        self, mark: str, messages: list[Json], can: Abilities, tools: list[Json] | None = None
    ) -> bool:
        text = self._try_render([_content_in_parts(message, can) for message in messages], tools)
        return isinstance(text, str) and mark in text

    def _try_render(
        self, messages: list[Json], tools: list[Json] | None = None, add: bool = True
    ) -> str | Exception:
        try:
            return self._render(messages, tools, add)
        except Exception as error:  # templates raise what they like
            return error

    def _kind(self, first: Json) -> Kind:
        return "tool" if first["role"] == "tool" else "user"

    def _find_continuations(self) -> dict[Kind, _Continuation]:
        self._continuations = {"user": self._find_continuation("user", self.stops)}
        if self._abilities.results:
            self._continuations["tool"] = self._find_continuation(
                "tool", self._possible_ends("tool")
            )
        return self._continuations

    def _possible_ends(self, kind: Kind) -> Sequence[str]:
        """Texts that may end an answer. A header that ends the user's turn ends calls too."""
        closing = self._continuations["user"].closing if kind == "tool" else ""
        return self.stops if kind == "user" else [closing, *self.stops] if closing else []

    def _find_continuation(
        self, kind: Kind, ends: Sequence[str], new: Sequence[Json] = ()
    ) -> _Continuation:
        """`ends`: texts that may end the answer's turn, the likeliest first; none if the next
        header ends it.

        `new`: what follows the answer, if it is not just a message of this kind.
        """
        base = _base(kind, _NAME_MARK, self._abilities)
        first = {**new[0], "content": _NEW_MARK} if new else _new_message(kind)
        text = self._try_render([*base, _content_in_parts(first, self._abilities), *new[1:]])
        alone = self._try_render(base, None, False)
        if isinstance(text, Exception) or _NEW_MARK not in text or _MARK not in text:
            raise ConfigError(
                f"the chat template cannot go on after an answer with a message of the {kind}:"
                f" {text if isinstance(text, Exception) else 'it leaves out one of them'}. Give"
                " another template, in a file that model.chat_template names"
            )
        # The answer's mark before the new message: a template may repeat it elsewhere.
        answered = text.rfind(_MARK, 0, text.find(_NEW_MARK)) + len(_MARK)
        between = text[answered : text.find(_NEW_MARK)]
        tail = (
            alone[alone.rfind(_MARK) + len(_MARK) :]
            if isinstance(alone, str) and _MARK in alone
            else ""
        )
        closing = (
            self._find_closing(between, tail, ends, at_once=kind == "user")
            if ends or kind == "user"
            else ""
        )
        if closing:
            end = between.find(closing) + len(closing)
            if not any(stop in tail for stop in self.stops):
                self._add_stop(closing)
            return _Continuation(
                text[: answered + end], between[:end] if kind == "user" else closing
            )
        # The header of the next message ends the turn, so the model writes that header to end it.
        end = len(tail) if tail and between.startswith(tail) else 0
        header = self._special.match(between, end)
        if header:
            self._add_stop(header[0])
        return _Continuation(text[: answered + end], "")

    def _find_closing(self, between: str, tail: str, ends: Sequence[str], *, at_once: bool) -> str:
        """The text of the token between answer and new message that ends the turn: it stands there
        even if nothing follows, or else it is a known end before the header of the message.

        `tail`: the text after the answer if nothing follows. `at_once`: the token follows the
        answer immediately; else the end of a call stands before it.
        """
        if not tail.strip():
            # The header of the next message may itself be what ends answers (GLM's `<|user|>`).
            found = next((end for end in ends if end in between), "")
            header = found and self._special.search(between, between.find(found) + len(found))
            return found if header else ""
        known = next((end for end in ends if end in between and end in tail), "")
        if known:
            return known
        if at_once:
            first = self._special.match(between.lstrip())
            return first[0] if first else ""
        # The last one: the first tokens of the tail end the call.
        there = [special for special in self._special.findall(tail) if special in between]
        return there[-1] if there else next((end for end in ends if end in between), "")

    def _add_stop(self, text: str) -> None:
        if text not in self.stops:
            self.stops.append(text)


def describe(tools: Sequence[Mapping[str, Any]]) -> str:
    """The definitions of tools as text, for templates that have no place for them."""
    listed = "\n".join(json.dumps(dict(tool), ensure_ascii=False) for tool in tools)
    return (
        f"# Tools\n\nYou may call these functions:\n<tools>\n{listed}\n</tools>\n\nFor each call,"
        ' write a JSON object with its name and arguments between tags:\n<tool_call>\n{"name":'
        ' <name>, "arguments": <object>}\n</tool_call>'
    )


@lru_cache(maxsize=256)
def _base(kind: Kind, name: str, can: Abilities) -> list[Json]:
    """The short conversation that new messages are rendered after; `name`: that of the tool which
    is called.
    """
    answer = Message("assistant", _MARK)
    if kind == "tool" and can.calls:
        answer = Message("assistant", "", tool_calls=(ToolCall(name, {"text": _MARK}, _CALL_ID),))
    return [
        _content_in_parts(_as_json(message, can), can) for message in (Message("user", "U"), answer)
    ]


def _new_message(kind: Kind) -> Json:
    if kind == "user":
        return {"role": "user", "content": _NEW_MARK}
    return {"role": "tool", "content": _NEW_MARK, "tool_call_id": _CALL_ID, "name": _NAME_MARK}


def _as_json(message: Message, can: Abilities) -> Json:
    one: Json = {"role": message.role, "content": message.said}
    if message.role == "tool":
        one |= {"tool_call_id": message.tool_call_id or _CALL_ID, "name": message.name or "tool"}
    if message.reasoning and can.reasoning_key:
        one[can.reasoning_key] = message.reasoning
    if message.tool_calls and can.calls:
        one["tool_calls"] = [
            {
                "type": "function",
                "id": call.id or _CALL_ID,
                "function": {
                    "name": call.name,
                    "arguments": (
                        json.dumps(dict(call.arguments), ensure_ascii=False)
                        if can.json_arguments
                        else dict(call.arguments)
                    ),
                },
            }
            for call in message.tool_calls
        ]
    elif message.tool_calls:
        one["content"] = "\n".join(
            filter(None, (message.said, *(call.render() for call in message.tool_calls)))
        )
    return one


def _content_in_parts(one: Json, can: Abilities, images: int = 0) -> Json:
    if images:
        text = [{"type": "text", "text": one["content"]}] if one["content"] else []
        return one | {"content": [*({"type": "image"} for _ in range(images)), *text]}
    if can.parts and isinstance(one["content"], str):
        return one | {"content": [{"type": "text", "text": one["content"]}]}
    return one


def not_in(text: str, messages: Sequence[Message]) -> int | None:
    """The position of the first message whose content is missing in the text, as it is or as JSON;
    None if none is. The model's own messages are not looked for.
    """
    for place, message in enumerate(messages):
        content = message.content.strip()
        if message.role == "assistant" or content in text:
            continue
        if not any(
            json.dumps(content, ensure_ascii=ascii_only)[1:-1] in text
            for ascii_only in (False, True)
        ):
            return place
    return None


def _misses_text_beside_calls(text: str, messages: Sequence[Message]) -> bool:
    """True if the text of an answer with calls is missing."""
    return any(message.tool_calls and message.said.strip() not in text for message in messages)


def with_marks(messages: Sequence[Message]) -> list[Message]:
    """The same messages with marks for the contents of others."""
    return [
        message if message.role == "assistant" else replace(message, content=f"xq{place}Mark")
        for place, message in enumerate(messages)
    ]


def left_out(place: int, messages: Sequence[Message]) -> ConfigError:
    """The error that a message has no place."""
    return ConfigError(
        f"the chat template leaves out message {place + 1} ({messages[place].role}) of"
        f" {_roles(messages)}: {bare(messages[place].content)!r:.80}. Give another template, in a"
        " file that model.chat_template names"
    )


def _roles(messages: Sequence[Message]) -> str:
    return ", ".join(message.role for message in messages)


def _call_message(mark: str, text: str = "") -> Message:
    call = ToolCall(_NAME_MARK, {"text": mark}, _CALL_ID)
    return Message("assistant", "\n".join(filter(None, (text, call.render()))), tool_calls=(call,))


_PROBES: Mapping[str, Callable[[str], Message]] = {
    "S": lambda mark: Message("system", mark),
    "U": lambda mark: Message("user", mark),
    "A": lambda mark: Message("assistant", mark),
    "C": _call_message,
    "X": lambda mark: _call_message("a", mark),
    "T": lambda mark: Message("tool", mark, tool_call_id=_CALL_ID, name=_NAME_MARK),
}
"""Messages of conversations that try a template, by the letter of their role; `X` is an answer with
text and a call.
"""
