"""The console that the commands print to."""

import os
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleDimensions, ConsoleOptions, RenderableType
from rich.segment import Segment

PIPE_COLUMNS = 1000
"""Width of what is no terminal, such as a pipe: no row of a table is folded there, so that `grep`
finds it."""


class SafeConsole(Console):
    """A console that no text commands: what models, environments and files say is shown, and never
    obeyed.

    Characters that would move the cursor, name the window, or turn the order of what follows become
    U+FFFD.
    """

    @property  # type: ignore[misc]  # nobody sets the size of this console
    def size(self) -> ConsoleDimensions:
        """Columns and lines. COLUMNS in the environment decides where it is set."""
        size = super().size
        if self.is_terminal or "COLUMNS" in os.environ:
            return size
        return ConsoleDimensions(PIPE_COLUMNS, size.height)

    def rule(self, title: Any = "", **options: Any) -> None:
        """A line across a terminal with a title in it; in a pipe the title alone."""
        if self.is_terminal:
            super().rule(title, **options)
        else:
            self.print(title, highlight=False)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """As rich does, without such characters; what rich itself says to the terminal is in
        segments of control.
        """
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


def printable(text: str) -> str:
    """The text without characters that would command the terminal."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else "\ufffd"
        for character in text
    )


console = SafeConsole()
