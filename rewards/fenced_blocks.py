"""Fenced blocks of Markdown: ``` or ~~~, three or more, also indented, as in a list."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_OPENING = re.compile(r"([ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)?)(?:(`{3,})([^`]*)|(~{3,})(.*))")
_QUOTED = re.compile(r"[^\w.+-]+")


@dataclass(frozen=True, slots=True)
class FencedBlock:
    """A block that is closed. `language` is its first word, in small letters; `indent` the columns
    before its fence.
    """

    language: str
    text: str
    indent: int

    @property
    def code(self) -> str:
        """The text without the indentation of the fence."""
        lines = self.text.splitlines(keepends=True)
        return "".join(
            line[min(self.indent, len(line) - len(line.lstrip(" \t"))) :] for line in lines
        )


def blocks_in(text: str) -> Iterator[FencedBlock]:
    """The closed blocks of a text, in order. A fence ends with one that is as long, of the same
    character.
    """
    opening: re.Match[str] | None = None
    inside: list[str] = []
    for line in text.splitlines(keepends=True):
        if opening is None:
            opening, inside = _OPENING.fullmatch(line.rstrip("\r\n")), []
            continue
        bare, fence = line.strip(), opening[2] or opening[4]
        if len(bare) >= len(fence) and bare == fence[0] * len(bare):
            words = _QUOTED.sub(" ", opening[3] or opening[5] or "").split(maxsplit=1)
            yield FencedBlock(
                words[0].lstrip(".").lower() if words else "", "".join(inside), len(opening[1])
            )
            opening = None
        else:
            inside.append(line)
