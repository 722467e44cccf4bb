"""What the commands print to."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment


class SafeConsole(Console):
    """A console that no text commands: what models, environments and files say is shown, and never
    obeyed.

    Characters that would move the cursor, name the window, or turn the order of what follows become
    U+FFFD.
    """

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
