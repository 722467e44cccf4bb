"""Calls in tags: how a template writes them is learned from it, and undone to the letter.

Texts in tags have no quotes. Many families write a call as

    <tool_call>            section and begin
    <function=NAME>        ... NAME, then first
    <parameter=KEY>        ... KEY, then middle
    VALUE
    </parameter>           between, if another key follows, else end
    </function>
    </tool_call>           after

each with tags of its own; others write one JSON object after the name. A `TaggedSyntax` is learned
from what the template writes for a few calls. White space between tags does not matter; around a
value, only what the template itself writes there is taken away, once, if it is there. So what the
model wrote reaches the environment unchanged, whatever it looks like. A call is read whole or not
at all: a tag that stands where the syntax has none, also inside a value, makes it unreadable, which
is reported.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from agentrl.conversation.declared import Tools, declared, value_of
from agentrl.conversation.reading import Reading, Unread, Write, are_calls, call_of
from agentrl.conversation.tool_calls import QUOTED, is_quoted
from agentrl.trajectory import ToolCall

Pieces = tuple[str, ...]
"""Tags, or halves of tags, with white space between them."""

_ONE, _TWO, _KEY, _OTHER_KEY, _NUMBER = (
    "xq_tool_one",
    "xq_tool_two",
    "xq_key_one",
    "xq_key_two",
    "xq_number",
)
_VALUE, _OTHER_VALUE = "xqValueOne", "xqValueTwo"
_HARD_TEXT = '  x"q\\ \n{"a":1}  '
"""Characters that only a syntax without quotes writes as they are."""
_DECODER = json.JSONDecoder(strict=False)
"""Not strict: models write unescaped line breaks into strings."""
_NAME = re.compile(r"[^\s<>\"']+")
_SPECIAL = re.compile(r"<\|[^<>]*\|>")
_PROBES = (
    (ToolCall(_ONE, {_KEY: _HARD_TEXT, _OTHER_KEY: "3.10"}),),
    (ToolCall(_ONE, {_KEY: ""}), ToolCall(_TWO, {_KEY: "\n\n", _OTHER_KEY: "null", _NUMBER: 3})),
)
_PROBE_TYPES = {
    _KEY: {"type": "string"},
    _OTHER_KEY: {"type": "string"},
    _NUMBER: {"type": "integer"},
}
_PROBE_TOOLS: Tools = [
    {"name": name, "parameters": {"properties": _PROBE_TYPES}} for name in (_ONE, _TWO)
]


class _UnreadableError(Exception):
    """The reason why a call cannot be read."""


@dataclass(frozen=True)
class TaggedSyntax:
    """The tags around the parts of calls, and the white space that the template writes around a
    value.
    """

    section: Pieces
    begin: Pieces
    first: Pieces
    middle: Pieces
    between: Pieces
    end: Pieces
    none: Pieces
    """The text after the name of a call without arguments."""
    after: Pieces
    lead: str
    trail: str
    headers: tuple[str, ...] = ()
    """The beginnings of a message that holds a call, as regular expressions."""
    as_json: bool = False
    """The arguments are one JSON object, between `first` and `end`."""

    def read(self, text: str, tools: Tools) -> Reading:
        """The calls in an answer's text, and what cannot be read of it."""
        calls, unread, content = list[ToolCall](), list[Unread](), list[str]()
        at, before = 0, ""
        opened = False
        empty = -1  # the number of findings when the last section began: no more, no call in it
        while (mark := self._marks.search(text, at)) is not None:
            content.append(self._header.sub("", text[at : mark.start()]))
            before += content[-1]
            at = mark.start()
            if (section := _match_pieces(self.section, text, at)) is not None:
                opened, empty, at = True, len(calls) + len(unread), section
            elif (closed := _match_pieces(self.after, text, at)) is not None and opened:
                if empty == len(calls) + len(unread):
                    unread.append(Unread(text[:closed], "it holds no call"))
                at, opened = closed, False
            elif _match_pieces(self.begin, text, at) is None:
                end = self._end_of_stray(text, mark)
                unread.append(Unread(text[at:end], f"{mark[0]!r} stands where no call has it"))
                before += text[at:end]
                at = end
            else:
                quotes = is_quoted(before)
                opened = opened or not quotes
                try:
                    call, end = self._call(text, at, len(calls), tools)
                    if quotes:
                        unread.append(Unread(text[at:end], QUOTED))
                    else:
                        calls.append(call)
                except _UnreadableError as error:
                    end = self._end_of_bad(text, at)
                    unread.append(Unread(text[at:end], QUOTED if quotes else str(error)))
                    before += text[at:end]
                at = end
        content.append(text[at:])
        if opened and empty == len(calls) + len(unread):
            unread.append(Unread(text, "it holds no call"))
        said = (
            "\n".join(filter(None, (part.strip() for part in content))) if calls or unread else text
        )
        return Reading(
            text if unread else said, calls=tuple(calls), malformed=tuple(unread), literal=True
        )

    def start(self, text: str) -> int:
        """The position of the first tag; -1 if there is none."""
        found = self._marks.search(text)
        return -1 if found is None else found.start()

    def _call(self, text: str, start: int, number: int, tools: Tools) -> tuple[ToolCall, int]:
        """The call that begins at `start`, and where it ends."""
        at = _match_pieces(self.begin, text, start) or start
        name, at = self._read_name(
            text, at, (self.first, *([] if self.as_json else [self.none])), "name"
        )
        if self.as_json:
            return self._json_call(text, _match_pieces(self.first, text, at) or at, name, number)
        declares, arguments = declared(tools, name), dict[str, object]()
        end = _match_pieces(self.none, text, at)
        if end is None:
            at = _match_pieces(self.first, text, at) or at
            while end is None:
                key, at = self._read_name(text, at, (self.middle,), "parameter")
                at = _match_pieces(self.middle, text, at) or at
                if key in arguments:
                    raise _UnreadableError(f"{key!r} is given twice")
                written, at = self._value(text, at, key)
                arguments[key] = value_of(written, declares.inner(key))
                end = _match_pieces(self.end, text, at)
                if end is None:
                    at = _match_pieces(self.between, text, at) or at
        call = ToolCall(name, arguments, f"call{number:05d}")
        if not call.is_plain:
            raise _UnreadableError(
                "it has an infinite number, half of a surrogate pair, or too deep nesting"
            )
        return call, end

    def _json_call(self, text: str, at: int, name: str, number: int) -> tuple[ToolCall, int]:
        """A call whose arguments begin at `at`, and where it ends."""
        try:
            arguments, at = _DECODER.raw_decode(text, _skip_space(text, at))
        except (ValueError, RecursionError) as error:
            raise _UnreadableError(f"its arguments are no JSON: {error}") from error
        end = _match_pieces(self.end, text, at)
        call = call_of(name, arguments, number)
        if call is None:
            raise _UnreadableError(
                "its arguments are no JSON object, or one with infinite numbers or too deep nesting"
            )
        if end is None:
            raise _UnreadableError(f"{' '.join(self.end)!r} must follow its arguments")
        return call, end

    def _read_name(
        self, text: str, at: int, followed: Sequence[Pieces], what: str
    ) -> tuple[str, int]:
        """A name up to one of the tags that may follow it."""
        name = _NAME.match(text, _skip_space(text, at))
        ends = [] if name is None else [text.find(one[0], name.start()) for one in followed]
        stop = min((end for end in ends if end >= 0), default=-1)
        found = "" if name is None or stop < 0 else text[name.start() : stop].rstrip()
        if not found or _NAME.fullmatch(found) is None:
            raise _UnreadableError(f"the {what} is missing near {text[at : at + 40]!r}")
        if all(_match_pieces(one, text, stop) is None for one in followed):
            wanted = " or ".join(" ".join(one) for one in followed)
            raise _UnreadableError(f"{wanted!r} must follow {found[:64]!r}")
        return found, stop

    def _value(self, text: str, at: int, key: str) -> tuple[str, int]:
        """The value up to the tag that ends it."""
        mark = self._marks.search(text, at)
        if mark is None:
            raise _UnreadableError(f"the value of {key!r} does not end")
        if all(_match_pieces(one, text, mark.start()) is None for one in (self.between, self.end)):
            raise _UnreadableError(
                f"{mark[0]!r} stands in the value of {key!r}, or the tag that ends that is missing"
            )
        written = text[at : mark.start()]
        written = (
            written[len(self.lead) :] if self.lead and written.startswith(self.lead) else written
        )
        return written.removesuffix(self.trail), mark.start()

    def _end_of_stray(self, text: str, mark: re.Match[str]) -> int:
        """The position after a tag that begins no call. The text after an opening tag may be a part
        of what was meant, so it is skipped too.
        """
        if mark[0].startswith("</"):
            return mark.end()
        return self._end_of_bad(text, mark.start()) if mark[0] == self.begin[0] else len(text)

    def _end_of_bad(self, text: str, start: int) -> int:
        """The position after a bad call, where reading continues: past all calls in it."""
        depth, at = 0, start
        ends = re.compile("|".join(map(re.escape, (self.begin[0], self.end[-1]))))
        while (mark := ends.search(text, at)) is not None:
            depth += 1 if mark[0] == self.begin[0] else -1
            at = mark.end()
            if depth <= 0:
                return at
        return len(text)

    @cached_property
    def _header(self) -> re.Pattern[str]:
        return re.compile(rf"\s*(?:{'|'.join(self.headers) or '(?!)'})\s*\Z")

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        parts = (
            self.section,
            self.begin,
            self.first,
            self.middle,
            self.between,
            self.end,
            self.none,
            self.after,
        )
        marks = {piece for part in parts for piece in part if piece.startswith("<")}
        return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))


def learn_tagged_syntax(write: Write) -> TaggedSyntax | None:
    """The syntax in which calls are written; None if it is another than those in tags without
    quotes.
    """
    for learn in (_learn_syntax, _learn_json_syntax):
        with suppress(Exception):  # templates raise what they like, and texts may lack the marks
            syntax = learn(write)
            readings = (syntax.read(write(calls), _PROBE_TOOLS) for calls in _PROBES)
            if all(map(are_calls, readings, _PROBES)):
                return syntax
    return None


def _learn_syntax(write: Write) -> TaggedSyntax:
    """Learn the tags from what is written around known names, keys and values.

    `many` has two calls, whose joint is the end of the first and the beginning of the second. It
    shares its first pieces with what follows a last call; those end a call, the rest of the joint
    begins one, and the rest of what follows the last call ends the section:

        last call:  VALUE </parameter> </function> </tool_call>
        joint:      VALUE </parameter> </function> </tool_call> <tool_call> <function= TWO
    """
    one = write([ToolCall(_ONE, {_KEY: _VALUE, _OTHER_KEY: _OTHER_VALUE})])
    many = write([ToolCall(_ONE, {_KEY: _VALUE}), ToolCall(_TWO, {_KEY: _OTHER_VALUE})])
    before, first, middle, between, end = _split_at_marks(one, _ONE, _KEY, _VALUE, _OTHER_KEY)
    end = end[end.index(_OTHER_VALUE) + len(_OTHER_VALUE) :]
    joint = many[many.index(_VALUE) + len(_VALUE) : many.rindex(_TWO)]
    none = write([ToolCall(_ONE, {})])
    whole, joints, empty = (
        _pieces(end),
        _pieces(joint),
        _pieces(none[none.rindex(_ONE) + len(_ONE) :]),
    )
    shared = _count_shared_pieces(whole, joints)
    begin = joints[shared:]
    if not begin or not joints[:shared]:
        # Without a tag at the end of a call, reading would make no progress after a bad one.
        raise ValueError("the calls are not in tags")
    start = max((at + 1 for at, piece in enumerate(begin) if _SPECIAL.fullmatch(piece)), default=0)
    headers = (before, joint[joint.index(begin[0]) :]) if start and _TWO in joint else ()
    if headers:  # calls stand in messages of their own
        begin = begin[start:]
    return TaggedSyntax(
        section=() if headers else _pieces(before)[: -len(begin)],
        begin=begin,
        first=_pieces(first),
        middle=_pieces(middle),
        between=_pieces(between),
        end=joints[:shared],
        none=empty[: len(empty) - len(whole[shared:])],
        after=whole[shared:],
        lead=middle[len(middle.rstrip()) :],
        trail=between[: len(between) - len(between.lstrip())],
        headers=tuple(_header_pattern(one[: one.rindex(begin[0])]) for one in headers),
    )


def _learn_json_syntax(write: Write) -> TaggedSyntax:
    """Likewise for syntaxes whose arguments are one JSON object."""
    one = write([ToolCall(_ONE, {_KEY: _VALUE})])
    many = write([ToolCall(_ONE, {_KEY: _VALUE}), ToolCall(_TWO, {_KEY: _VALUE})])
    name, opened = one.rindex(_ONE, 0, one.index(_KEY)), one.rindex("{", 0, one.index(_KEY))
    closed = _DECODER.raw_decode(one, opened)[1]
    second = many.rindex(_TWO, 0, many.rindex(_KEY))
    joint = many[_DECODER.raw_decode(many, many.rindex("{", 0, many.index(_KEY)))[1] : second]
    whole, joints = _pieces(one[closed:]), _pieces(joint)
    shared = _count_shared_pieces(whole, joints)
    if not joints[shared].startswith("<") or not whole[:shared]:
        raise ValueError("the calls are not in tags")
    return TaggedSyntax(
        section=_pieces(one[:name])[: -len(joints[shared:])],
        begin=joints[shared:],
        first=_pieces(one[name + len(_ONE) : opened]),
        middle=(),
        between=(),
        end=joints[:shared],
        none=(),
        after=whole[shared:],
        lead="",
        trail="",
        as_json=True,
    )


def _header_pattern(text: str) -> str:
    """A regular expression of a header that names any tool."""
    return re.sub(f"{_ONE}|{_TWO}", r"[^\\s<]+", re.escape(text.strip()))


def _split_at_marks(text: str, *marks: str) -> Iterator[str]:
    """The texts before, between and after the marks."""
    at = text.rindex(marks[0], 0, text.index(marks[1]))  # a header may name the tool, too
    yield text[:at]
    at += len(marks[0])
    for mark in marks[1:]:
        end = text.index(mark, at)
        yield text[at:end]
        at = end + len(mark)
    yield text[at:]


def _pieces(text: str) -> Pieces:
    return tuple(piece for part in re.split(r"(?=<)", text) if (piece := part.strip()))


def _count_shared_pieces(one: Pieces, other: Pieces) -> int:
    """The number of pieces that both begin with."""
    return next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        len(one),
    )


def _match_pieces(pieces: Pieces, text: str, at: int) -> int | None:
    """The end of these pieces, if they begin at `at`; None if they do not stand there."""
    for piece in pieces:
        at = _skip_space(text, at)
        if not text.startswith(piece, at):
            return None
        at += len(piece)
    return at if pieces else None


def _skip_space(text: str, at: int) -> int:
    """The first position from `at` on that is no white space."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _functions(tag: str, blank: str) -> Write:
    def write(calls: Sequence[ToolCall]) -> str:
        written = []
        for call in calls:
            given = [
                f"<parameter={k}>{blank}{v}{blank}</parameter>\n" for k, v in call.arguments.items()
            ]
            written.append(
                f"<{tag}>\n<function={call.name}>\n{''.join(given)}</function>\n</{tag}>"
            )
        return "\n".join(written)

    return write


def _keys_and_values(blank: str) -> Write:
    def write(calls: Sequence[ToolCall]) -> str:
        written = []
        for call in calls:
            given = [
                f"<arg_key>{k}</arg_key>{blank}<arg_value>{v}</arg_value>{blank}"
                for k, v in call.arguments.items()
            ]
            written.append(f"<tool_call>{call.name}{blank}{''.join(given)}</tool_call>")
        return "\n".join(written)

    return write


def _invocation_writer(tag: str, space: str) -> Write:
    def write(calls: Sequence[ToolCall]) -> str:
        written = []
        for call in calls:
            given = [
                f'<{space}parameter name="{k}">{v}</{space}parameter>\n'
                for k, v in call.arguments.items()
            ]
            written.append(
                f'<{space}invoke name="{call.name}">\n{"".join(given)}</{space}invoke>\n'
            )
        return f"<{tag}>\n{''.join(written)}</{tag}>"

    return write


def standard() -> Iterator[tuple[TaggedSyntax, Write]]:
    """Syntaxes of several families, for formats that are chosen by name though the model's template
    writes another.
    """
    for write in (
        _functions("tool_call", "\n"),
        _functions("seed:tool_call", ""),
        _keys_and_values("\n"),
        _keys_and_values(""),
        _invocation_writer("minimax:tool_call", ""),
        _invocation_writer("atem:function_calls", "atem:"),
    ):
        syntax = learn_tagged_syntax(write)
        if syntax is not None:
            yield syntax, write
