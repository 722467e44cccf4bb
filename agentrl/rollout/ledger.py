"""The ledger: every task and every episode has exactly one fate, written ahead to SQLite.

A row is written before the thing it stands for begins, so a run that is killed at any moment leaves either an open row,
which the next launch takes up again, or a fate. A task counts as trained from the moment its batch goes to the trainer;
if the weights of that step are lost because no checkpoint was written after it, `rewind` opens the task again. So a run
that is killed and resumed trains on the same multiset of tasks as one that never was.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

Fate = Literal["trained", "filtered", "stale", "cancelled", "failed"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS tasks (
    number INTEGER PRIMARY KEY,          -- index in the task source
    id TEXT NOT NULL UNIQUE,
    admitted_version INTEGER NOT NULL,
    fate TEXT CHECK (fate IN ('trained', 'filtered', 'stale', 'cancelled', 'failed')),
    step INTEGER,
    why TEXT
);
CREATE TABLE IF NOT EXISTS episodes (
    launch INTEGER NOT NULL,             -- counts the starts of the run: a resumed one plays an episode anew
    id TEXT NOT NULL,
    task INTEGER NOT NULL REFERENCES tasks(number),
    fate TEXT CHECK (fate IN ('trained', 'filtered', 'stale', 'cancelled', 'failed')),
    step INTEGER,
    why TEXT,
    PRIMARY KEY (launch, id)
);
CREATE INDEX IF NOT EXISTS episodes_of_task ON episodes (task, fate);
"""


@dataclass(frozen=True, slots=True)
class Fates:
    """How many of something met each fate; `open` have none yet. All counts sum to `total`."""

    total: int
    open: int
    trained: int
    filtered: int
    stale: int
    cancelled: int
    failed: int

    @property
    def settled(self) -> bool:
        """Whether everything has its fate, and exactly one."""
        return self.open == 0 and self.total == (
            self.trained + self.filtered + self.stale + self.cancelled + self.failed
        )


class Ledger:
    """The fates of one run, in one file. Calls are synchronous and take well under a millisecond."""

    def __init__(self, path: Path | str) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        # With a write-ahead log, a commit survives the death of the process without a disk flush of its own.
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(_SCHEMA)
        self._launch = self._one("SELECT COALESCE(MAX(launch), -1) + 1 FROM episodes")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def rewind(self, step: int) -> list[int]:
        """Take up a run whose weights are those before `step`: open tasks' numbers, in order.

        Tasks trained at `step` or later are open again, for their weights are lost. Episodes that were in flight, or
        belong to a reopened task, are cancelled; their tasks are to be played again.
        """
        with self._db:
            self._db.execute("BEGIN")
            self._db.execute("UPDATE tasks SET fate = NULL, step = NULL WHERE fate = 'trained' AND step >= ?", (step,))
            self._db.execute(
                "UPDATE episodes SET fate = 'cancelled', step = NULL, why = 'the run was stopped before a checkpoint' "
                "WHERE fate IS NULL OR (fate = 'trained' AND step >= ?)",
                (step,),
            )
        return [number for (number,) in self._db.execute("SELECT number FROM tasks WHERE fate IS NULL ORDER BY number")]

    def next_number(self) -> int:
        """The first task index that was never admitted."""
        return self._one("SELECT COALESCE(MAX(number), -1) + 1 FROM tasks")

    def admit(self, number: int, task_id: str, version: int) -> None:
        """A task's group is about to begin under `version`."""
        self._db.execute(
            "INSERT INTO tasks (number, id, admitted_version) VALUES (?, ?, ?) "
            "ON CONFLICT (number) DO UPDATE SET admitted_version = excluded.admitted_version",
            (number, task_id, version),
        )

    def begin(self, number: int, episode_id: str) -> None:
        """An episode of task `number` is about to begin."""
        self._db.execute("INSERT INTO episodes (launch, id, task) VALUES (?, ?, ?)", (self._launch, episode_id, number))

    def end(self, episode_id: str, fate: Fate, why: str) -> None:
        """An episode that will not be trained on met its fate."""
        self._settle("UPDATE episodes SET fate = ?, why = ? WHERE launch = ? AND id = ? AND fate IS NULL",
                     [(fate, why, self._launch, episode_id)])  # fmt: skip

    def end_task(self, number: int, fate: Fate, why: str) -> None:
        """A task, and all of its episodes that are still open, met a fate other than training."""
        with self._db:
            self._db.execute("BEGIN")
            self._settle("UPDATE tasks SET fate = ?, why = ? WHERE number = ? AND fate IS NULL", [(fate, why, number)])
            self._db.execute(
                "UPDATE episodes SET fate = 'cancelled', why = ? WHERE task = ? AND fate IS NULL",
                (f"its task: {why}", number),
            )

    def trained(self, step: int, numbers: Iterable[int]) -> None:
        """The groups of these tasks, with their open episodes, go to the trainer as the batch of `step`."""
        rows = [(step, number) for number in numbers]
        with self._db:
            self._db.execute("BEGIN")
            self._settle("UPDATE tasks SET fate = 'trained', step = ? WHERE number = ? AND fate IS NULL", rows)
            self._db.executemany("UPDATE episodes SET fate = 'trained', step = ? WHERE task = ? AND fate IS NULL", rows)

    def trained_tasks(self) -> list[str]:
        """The ids of the tasks trained on, in order of index."""
        return [row[0] for row in self._db.execute("SELECT id FROM tasks WHERE fate = 'trained' ORDER BY number")]

    def task_fates(self) -> Fates:
        """The fates of all tasks."""
        return self._fates("tasks")

    def episode_fates(self) -> Fates:
        """The fates of all episodes of all launches."""
        return self._fates("episodes")

    def why_failed(self, limit: int = 5) -> list[tuple[str, int]]:
        """The commonest reasons of failed episodes, with their counts."""
        return list(
            self._db.execute(
                "SELECT why, COUNT(*) FROM episodes WHERE fate = 'failed' GROUP BY why ORDER BY 2 DESC LIMIT ?",
                (limit,),
            )
        )

    def _fates(self, table: Literal["tasks", "episodes"]) -> Fates:
        counts = dict(self._db.execute(f"SELECT COALESCE(fate, 'open'), COUNT(*) FROM {table} GROUP BY 1"))
        names = ("open", "trained", "filtered", "stale", "cancelled", "failed")
        return Fates(sum(counts.values()), *(counts.get(name, 0) for name in names))

    def _settle(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        changed = self._db.executemany(statement, rows).rowcount
        if changed != len(rows):
            raise RuntimeError(f"{len(rows) - changed} of {rows!r:.200} have a fate already, or do not exist")

    def _one(self, query: str) -> int:
        return int(self._db.execute(query).fetchone()[0])
