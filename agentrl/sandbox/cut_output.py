"""Output of which the beginning and the end are kept, so that no flood fills the memory.

This module also runs inside jails, so it uses only the standard library.
"""


class CutOutput:
    """Bytes that a command writes, of which at most `most` are kept."""

    def __init__(self, most: int) -> None:
        self._first, self._last = most - most // 2, most // 2
        self._head, self._tail = bytearray(), bytearray()
        self._written = 0

    @classmethod
    def of(cls, kept: bytes, most: int, cut: int) -> "CutOutput":
        """What another one has kept, and what it has cut out."""
        output = cls(most)
        output.add(kept)
        output._written += cut
        return output

    def add(self, part: bytes) -> None:
        """Keep what is written next."""
        self._written += len(part)
        room = self._first - len(self._head)
        self._head += part[:room]
        if len(part) > room:
            self._tail += part[max(room, 0) :]
            if len(self._tail) > 2 * self._last + (1 << 16):  # seldom, as it moves all of it
                self._trim()

    def _trim(self) -> None:
        del self._tail[: max(0, len(self._tail) - self._last)]

    @property
    def cut(self) -> int:
        """Bytes that were not kept."""
        self._trim()
        return self._written - len(self._head) - len(self._tail)

    def kept(self) -> bytes:
        """What was kept, without a notice."""
        self._trim()
        return bytes(self._head + self._tail)

    def text(self) -> str:
        """What was kept as text, with a notice where something was cut out."""
        cut = self.cut
        head, tail = (part.decode(errors="replace") for part in (self._head, self._tail))
        if not cut:
            return self.kept().decode(errors="replace")
        return f"{head}\n[... {cut} bytes left out ...]\n{tail}"
