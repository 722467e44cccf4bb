"""`VerdictCache`: what a judge said before, by the content of what it was asked, on disk."""

import sqlite3
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

from pydantic_core import to_json

from agentrl.errors import ConfigError


class VerdictCache:
    """Verdicts as JSON texts in an SQLite file, which several runs may share. A context manager.

    It holds hashes of the questions and the answers, so nothing of a question or of a key can be read from it. With no
    path it lives in memory. A read takes microseconds and a write waits for no disk, so both happen on the event loop.

    Raises:
        ConfigError: the file cannot be opened, or is something else.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: sqlite3.Connection | None = None

    def __enter__(self) -> Self:
        try:
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(self._path or ":memory:", timeout=5.0, isolation_level=None)
            self._file.execute("PRAGMA journal_mode = WAL")
            self._file.execute("PRAGMA synchronous = OFF")  # a power cut may cost verdicts, which can be asked again
            self._file.execute("CREATE TABLE IF NOT EXISTS verdicts (question BLOB PRIMARY KEY, verdict TEXT NOT NULL)")
        except (OSError, sqlite3.Error) as error:
            self.close()
            raise ConfigError(
                f"the judge's cache {self._path} cannot be used: {error}. Name another file with `cache`, or null"
            ) from error
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; more than once is no harm."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def get(self, question: bytes) -> str | None:
        """The verdict on a question, if it was ever given."""
        row = self._open.execute("SELECT verdict FROM verdicts WHERE question = ?", [question]).fetchone()
        return None if row is None else str(row[0])

    def put(self, question: bytes, verdict: str) -> None:
        """Keep a verdict. Of two on the same question, which two runs may get at once, the later stays."""
        self._open.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", [question, verdict])

    @property
    def _open(self) -> sqlite3.Connection:
        if self._file is None:
            raise ConfigError("the judge is not running: use it inside `async with judge:`")
        return self._file


def question_key(*parts: Any) -> bytes:
    """A hash of JSON values, which stands for them all."""
    return blake2b(to_json(parts), digest_size=32).digest()
