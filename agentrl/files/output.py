"""Standard output and error that may go away: a pipe whose reader has ended, a closed terminal, a
full disk.
"""

import errno
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Any, TextIO

logger = logging.getLogger(__name__)

_MAY_COME_BACK = {errno.ENOSPC, errno.EDQUOT, errno.EAGAIN}
"""Errors after which later text may be written: the disk is full, or a reader is slow."""


class LossyStream:
    """A text stream that drops what cannot be written, where the stream itself would raise."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._failed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write the text, or drop it."""
        try:
            return self._stream.write(text)
        except UnicodeEncodeError as error:  # the stream has fewer characters than UTF-8
            known = text.encode(error.encoding, "backslashreplace").decode(error.encoding)
            return self.write(known)
        except (OSError, ValueError) as error:  # ValueError: it is closed
            self._note_failure(error)
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write the texts, or drop them."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Hand over what was written, or drop it."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._note_failure(error)

    def settle(self) -> None:
        """Drop what is left, so that nothing fails when the process ends."""
        self._failed = True  # later output is dropped
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._drop_all()

    def _note_failure(self, error: OSError | ValueError) -> None:
        if not isinstance(error, OSError) or error.errno not in _MAY_COME_BACK:
            self._drop_all()
        if not self._failed:
            self._failed = True
            why = error.strerror if isinstance(error, OSError) else error
            name = getattr(self._stream, "name", "the output")
            logger.warning("%s cannot be written (%s), and this goes on without it", name, why)

    def _drop_all(self) -> None:
        """From now on, all that is written there goes nowhere, also what libraries and new
        processes write.
        """
        try:
            descriptor = self._stream.fileno()
        except (OSError, ValueError):  # it is closed, or none of the operating system's
            return
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def open_standard_streams() -> None:
    """Open what is closed of the standard streams, as nowhere: else the next file that is opened
    takes its number, and what processes print goes into it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def print_every_character() -> None:
    """Let the standard streams write what their encoding has not (Latin 1, say, or half of a
    surrogate pair in a file's name) by its code, where Python would raise.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def make_output_lossy() -> None:
    """From now on, what this process cannot print is dropped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, LossyStream):
            setattr(sys, name, LossyStream(stream))


@contextmanager
def lossy_output() -> Iterator[None]:
    """In the block, what cannot be printed is dropped."""
    before = sys.stdout, sys.stderr
    make_output_lossy()
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, LossyStream):
                stream.settle()
        sys.stdout, sys.stderr = before
