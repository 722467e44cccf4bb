"""Output of which the beginning and the end are kept, so that no flood fills the memory.

This module also runs inside jails, so it uses only the standard library.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KeptOutput:
    """An output without what was cut out of it."""

    content: bytes
    """What was kept."""
    first: int
    """Bytes of it that are the beginning, where something was cut out."""
    cut: int = 0
    """Bytes that were cut out after them."""

    def text(self) -> str:
        """The output as text, with a notice where something was cut out."""
        if not self.cut:
            return self.content.decode(errors="replace")
        head, tail = (
            part.decode(errors="replace")
            for part in (self.content[: self.first], self.content[self.first :])
        )
        return f"{head}\n[... {self.cut} bytes left out ...]\n{tail}"


class CutOutput:
    """Bytes that a command writes, of which at most `most` are kept."""

    def __init__(self, most: int) -> None:
        self._first, self._last = most - most // 2, most // 2
        self._head, self._tail = bytearray(), bytearray()
        self._written = 0

    def add(self, part: bytes) -> None:
        """Keep what is written next."""
        self._written += len(part)
        room = self._first - len(self._head)
        self._head += part[:room]
        if len(part) > room:
            self._tail += part[max(room, 0) :]
            # Trimming moves the whole tail, so it waits until the tail has about doubled.
            if len(self._tail) > 2 * self._last + (1 << 16):
                self._trim()

    def _trim(self) -> None:
        del self._tail[: max(0, len(self._tail) - self._last)]

    @property
    def cut(self) -> int:
        """Bytes that were not kept."""
        self._trim()
        return self._written - len(self._head) - len(self._tail)

    @property
    def parts(self) -> tuple[bytearray, bytearray]:
        """The beginning and the end, without a copy."""
        self._trim()
        return self._head, self._tail

    def kept(self) -> KeptOutput:
        """What was kept."""
        return KeptOutput(b"".join(self.parts), self._first, self.cut)
