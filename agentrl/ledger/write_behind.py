"""`WriteBehind`: the event loop queues statements, and a thread applies them to SQLite.

Statements are applied in order and transactions are atomic, so a process that dies loses only a
suffix of the queue.
"""

import sqlite3
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from typing import NoReturn

from agentrl.errors import ConfigError

BATCH = 512
"""Rows in one transaction, which takes about a millisecond."""
BACKLOG = 64 * 1024
"""Rows that may wait; appending more blocks until some are written."""
PERIOD = 0.2
"""Seconds of real time after which a row is written, however few there are."""


class WriteBehind:
    """Executes statements with their rows in order; each row must change exactly one row of its
    table.

    This object alone uses `db`, and closes it; `db` must be open for use by several threads.
    Without a thread of its own (`threaded=False`) it writes in its callers' threads. After a
    failure nothing more is written, and every call raises.
    """

    def __init__(self, db: sqlite3.Connection, *, threaded: bool = True) -> None:
        self._db = db
        self._queue: deque[tuple[str, tuple[object, ...]]] = deque()
        self._writing = threading.Lock()
        self._wake = threading.Event()
        self._written = threading.Event()
        self._closing = False
        self._failure: Exception | None = None
        self._failure_was_raised = False
        self._thread = (
            threading.Thread(target=self._run, name="write-behind", daemon=True)
            if threaded
            else None
        )
        if self._thread is not None:
            self._thread.start()

    def append(self, statement: str, row: tuple[object, ...]) -> None:
        """Queue one row for `statement`. Takes well under a microsecond, unless more than `BACKLOG`
        wait.

        Raises:
            RuntimeError: an earlier row could not be written, or this is closed.
        """
        if self._failure is not None:
            self._fail(self._failure)
        self._queue.append((statement, row))
        if len(self._queue) >= BATCH:
            self._hand_over()

    def flush(self) -> None:
        """Return when all rows appended before are committed.

        Raises:
            RuntimeError: a row could not be written.
        """
        self._write_queued()
        if self._failure is not None:
            self._fail(self._failure)

    def sync(self) -> None:
        """`flush`, and wait until the data is on disk.

        Raises:
            RuntimeError: a row could not be written.
        """
        self.flush()
        with self._writing:
            # Begins by forcing the log to the disk, even while others read.
            self._db.execute("PRAGMA wal_checkpoint")

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """The connection, in a transaction between two batches: for statements of other kinds."""
        with self._writing, self._db:
            self._db.execute("BEGIN IMMEDIATE")
            yield self._db

    def close(self) -> None:
        """Flush and close.

        Raises:
            RuntimeError: a row could not be written, and no call has raised this yet.
        """
        if self._closing:
            return
        self._closing = True
        if self._thread is not None:
            self._wake.set()
            self._thread.join()
        try:
            if not self._failure_was_raised:
                self.flush()
        finally:
            self._failure = self._failure or ValueError("it is closed")
            self._db.close()

    def _hand_over(self) -> None:
        if self._thread is None:
            self._write_batch()
            return
        if not self._wake.is_set():
            self._wake.set()
        while len(self._queue) >= BACKLOG:
            # Writing here would not be faster: the lock is not fair, and the thread could keep it
            # for the whole queue.
            self._written.clear()
            self._written.wait(PERIOD)

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(PERIOD)
            self._wake.clear()
            self._write_queued()

    def _write_queued(self) -> None:
        # Every writer takes the oldest rows first, so after this many batches all rows queued now
        # are committed. The extra batch waits for one that another thread has already taken.
        for _ in range(len(self._queue) // BATCH + 1):
            self._write_batch()

    def _write_batch(self) -> None:
        with self._writing:
            batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
            if batch and self._failure is None:
                try:
                    self._apply(batch)
                except Exception as error:  # the next call raises it: the thread has no caller
                    self._failure = error
        self._written.set()

    def _apply(self, batch: list[tuple[str, tuple[object, ...]]]) -> None:
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            for statement, run in groupby(batch, key=itemgetter(0)):
                rows = [row for _, row in run]
                changed = self._db.executemany(statement, rows).rowcount
                if changed != len(rows):
                    raise ValueError(
                        f"{len(rows) - changed} of {rows!r:.200} have a fate already, or do not"
                        " exist"
                    )

    def _fail(self, error: Exception) -> NoReturn:
        self._failure_was_raised = True
        if "UNIQUE constraint failed: tasks.id" in str(error):
            raise ConfigError(
                "two tasks have the same id: a task source gives each an id of its own"
            ) from error
        raise RuntimeError(f"the ledger cannot be written: {error}") from error
