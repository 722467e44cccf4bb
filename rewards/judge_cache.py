"""`VerdictCache`: a judge's earlier verdicts on disk, by the content of the question."""

import logging
import sqlite3
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

from pydantic_core import to_json

from agentrl.errors import ConfigError
from agentrl.files.file_lock import has_record_locks

logger = logging.getLogger(__name__)


class VerdictCache:
    """Verdicts as JSON texts in an SQLite file, which several runs may share. A context manager.

    The file holds the verdicts and only hashes of the questions, so it reveals no question and no
    key. Without a path the cache is in memory. Reads take microseconds and writes do not wait for
    the disk, so both happen on the event loop.

    Raises:
        ConfigError: the file cannot be opened, or is not a cache.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: sqlite3.Connection | None = None

    def __enter__(self) -> Self:
        try:
            path = self._path
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                # Without locks, two runs that write at once would spoil the file.
                if not has_record_locks(path.parent):
                    logger.warning(
                        "the judge's cache is kept in memory, as the file system of %s has no"
                        " locks",
                        path,
                    )
                    path = None
            self._file = sqlite3.connect(path or ":memory:", timeout=5.0, isolation_level=None)
            self._file.execute("PRAGMA journal_mode = WAL")  # readers do not wait for a writer
            # A power cut may lose verdicts, which can be asked again.
            self._file.execute("PRAGMA synchronous = OFF")
            self._file.execute(
                "CREATE TABLE IF NOT EXISTS verdicts (question BLOB PRIMARY KEY, verdict TEXT NOT"
                " NULL)"
            )
        except (OSError, sqlite3.Error) as error:
            self.close()
            raise ConfigError(
                f"the judge's cache {self._path} cannot be used: {error}. Name another file with"
                " `cache`, or null"
            ) from error
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; may be called more than once."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def get(self, question: bytes) -> str | None:
        """The stored verdict on a question, if there is one."""
        row = self._database.execute(
            "SELECT verdict FROM verdicts WHERE question = ?", [question]
        ).fetchone()
        return None if row is None else str(row[0])

    def put(self, question: bytes, verdict: str) -> None:
        """Store a verdict. Of two runs' verdicts on the same question, the later one is kept."""
        self._database.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", [question, verdict])

    @property
    def _database(self) -> sqlite3.Connection:
        if self._file is None:
            raise ConfigError("the judge is not running: use it inside `async with judge:`")
        return self._file


def question_key(*parts: Any) -> bytes:
    """A hash of JSON values: the key of a question."""
    return blake2b(to_json(parts), digest_size=32).digest()
