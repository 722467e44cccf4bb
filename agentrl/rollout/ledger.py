"""The ledger: every task and every episode has exactly one fate, written ahead to SQLite.

The loop only appends operations to a queue. A thread of the ledger's own applies them, strictly in order, in
transactions of some hundred, with a delay of a fraction of a second; `flush` waits until nothing is queued.

Why a run that is killed at any moment and resumed trains on the same multiset of tasks as one that never was. Because
order is kept, the killed process loses a *suffix* of its operations and nothing else: the file is what it was at some
earlier moment. Of what may be lost,

- an `admit` is repeated: the number is past `next_number`, so the resumed run admits the same task under it again;
- a `begin` or `end` belongs to an episode that was in flight, and whose task is open in the file or not in it: it is
  played again either way;
- an `end_task` leaves its task open, which is played again and meets its fate then;
- a `trained` was of a step whose weights are lost too: a checkpoint is written only after `sync`, so each step that
  the newest one holds is in the file whole. `rewind` opens again what later steps trained.

"On the file" means handed to the operating system: it survives the death of the process, not that of the machine.
There too SQLite loses a suffix only, and `sync` sees to it that none reaches behind the newest checkpoint.
"""

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Self, get_args

from agentrl.errors import ConfigError
from agentrl.rollout.write_behind import WriteBehind
from agentrl.trajectory import Task

Fate = Literal["trained", "filtered", "stale", "cancelled", "failed"]

# Not `fate IN (...)`: SQLite would build that list again for each row, at the cost of everything else together.
_IS_A_FATE = " OR ".join(f"fate = '{fate}'" for fate in get_args(Fate))
_FORMAT = 2
"""What `PRAGMA user_version` of a ledger says. Raise it when the schema changes."""
_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE tasks (
    number INTEGER PRIMARY KEY,          -- index in the task source
    id TEXT NOT NULL UNIQUE,
    env TEXT NOT NULL,
    seed TEXT NOT NULL,                  -- of any size
    options TEXT NOT NULL,               -- JSON
    admitted_version INTEGER NOT NULL,
    fate TEXT CHECK ({_IS_A_FATE}),
    step INTEGER,
    why TEXT,
    rewards TEXT                         -- JSON, one for each member
);
CREATE TABLE episodes (    -- TASKID/member/attempt
    task INTEGER NOT NULL,
    member INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    launch INTEGER NOT NULL,             -- counts the starts of the run: a resumed one plays an episode again
    fate TEXT CHECK ({_IS_A_FATE}),
    step INTEGER,
    why TEXT,
    PRIMARY KEY (task, member, attempt, launch)
) WITHOUT ROWID;
-- A task's fate is that of its open episodes; those of a task that failed or was cancelled did not fail themselves.
CREATE TRIGGER settle_episodes AFTER UPDATE OF fate ON tasks WHEN NEW.fate IS NOT NULL BEGIN
    UPDATE episodes SET
        fate = CASE WHEN NEW.fate = 'failed' THEN 'cancelled' ELSE NEW.fate END,
        step = NEW.step,
        why = CASE WHEN NEW.fate IN ('failed', 'cancelled') THEN 'its task: ' || NEW.why ELSE NEW.why END
    WHERE task = NEW.number AND fate IS NULL;
END;
PRAGMA user_version = {_FORMAT};
COMMIT;
"""

# The operations. Each row of each must change exactly one row of its table.
_ADMIT = (
    "INSERT INTO tasks (number, id, env, seed, options, admitted_version) VALUES (?, ?, ?, ?, ?, ?) "
    "ON CONFLICT (number) DO UPDATE SET admitted_version = excluded.admitted_version WHERE fate IS NULL"
)
_BEGIN = "INSERT INTO episodes (task, member, attempt, launch) VALUES (?, ?, ?, ?)"
_END = (
    "UPDATE episodes SET fate = ?, why = ? "
    "WHERE task = ? AND member = ? AND attempt = ? AND launch = ? AND fate IS NULL"
)
_END_TASK = "UPDATE tasks SET fate = ?, why = ? WHERE number = ? AND fate IS NULL"
_TRAINED = "UPDATE tasks SET fate = 'trained', step = ?, rewards = ? WHERE number = ? AND fate IS NULL"

_FILTERED = "UPDATE tasks SET fate = 'filtered', step = ?, why = ?, rewards = ? WHERE number = ? AND fate IS NULL"
_TASK_COLUMNS = "number, id, env, seed, options, admitted_version, fate, step, why, rewards"
_TALLY = {
    "tasks": (
        "SELECT COALESCE(fate, 'open'), COALESCE({why}, ''), COUNT(*), MIN(id) FROM tasks GROUP BY 1, 2 ORDER BY 3 DESC"
    ),
    "episodes": (
        "SELECT e.fate, e.why, e.count, id || '/' || member || '/' || attempt FROM ("
        "  SELECT COALESCE(fate, 'open') AS fate, COALESCE({why}, '') AS why, COUNT(*) AS count,"
        "  MIN(task) AS task, member, attempt FROM episodes GROUP BY 1, 2"
        ") AS e JOIN tasks ON number = e.task ORDER BY 3 DESC"
    ),
}


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


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """What the ledger knows of a task. `fate` is None while it is open; `rewards` come with training or filtering."""

    number: int
    task: Task
    admitted_version: int
    fate: Fate | None
    step: int | None
    why: str | None
    rewards: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """What the ledger knows of an episode, which each launch of the run may have played once."""

    member: int
    attempt: int
    launch: int
    fate: Fate | None
    step: int | None
    why: str | None


@dataclass(frozen=True, slots=True)
class Tally:
    """`count` tasks or episodes that met `fate` (for the reason `why`, where that was asked for), and the id of one."""

    fate: Fate | Literal["open"]
    why: str
    count: int
    example: str


class LedgerReader:
    """A ledger to read, also while a run writes it. A context manager."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def next_number(self) -> int:
        """The first task index that was never admitted."""
        return int(self._rows("SELECT COALESCE(MAX(number), -1) + 1 FROM tasks").fetchone()[0])

    def outcomes(self) -> Iterator[tuple[int, Task, tuple[float, ...]]]:
        """Number, task and rewards of the tasks trained on or filtered, by step, filtered ones first, by number."""
        query = (
            f"SELECT {_TASK_COLUMNS} FROM tasks WHERE fate = 'trained' OR (fate = 'filtered' AND step IS NOT NULL) "
            "ORDER BY step, fate = 'trained', number"
        )
        for record in map(_task_record, self._rows(query)):
            yield record.number, record.task, record.rewards

    def task_fates(self) -> Fates:
        """The fates of all tasks."""
        return self._fates("tasks")

    def episode_fates(self) -> Fates:
        """The fates of all episodes of all launches."""
        return self._fates("episodes")

    def task(self, number: int) -> TaskRecord | None:
        """What is known of the task of this index."""
        return self._task("number = ?", number)

    def task_named(self, task_id: str) -> TaskRecord | None:
        """What is known of the task of this id."""
        return self._task("id = ?", task_id)

    def neighbours(self, task_id: str) -> list[str]:
        """The ids of tasks just before and after `task_id` in order of the alphabet."""
        before = self._rows("SELECT id FROM tasks WHERE id < ? ORDER BY id DESC LIMIT 2", task_id)
        after = self._rows("SELECT id FROM tasks WHERE id > ? ORDER BY id LIMIT 2", task_id)
        return [near for (near,) in [*list(before)[::-1], *after]]

    def episodes(self, number: int) -> list[EpisodeRecord]:
        """The episodes of the task of this index, by member, attempt and launch."""
        query = "SELECT member, attempt, launch, fate, step, why FROM episodes WHERE task = ? ORDER BY 1, 2, 3"
        return [EpisodeRecord(*row) for row in self._rows(query, number)]

    def tallies(self, kind: Literal["tasks", "episodes"]) -> list[Tally]:
        """How many tasks or episodes met each fate, with an example; the commonest first."""
        return [Tally(*row) for row in self._rows(_TALLY[kind].format(why="''"))]

    def reasons(self, kind: Literal["tasks", "episodes"], limit: int) -> list[Tally]:
        """The commonest reasons why tasks or episodes met another fate than training."""
        rows = self._rows(_TALLY[kind].format(why="why"))
        return list(islice((Tally(*row) for row in rows if row[0] not in ("open", "trained")), limit))

    def open_episodes(self, limit: int) -> list[str]:
        """The ids of episodes without a fate, by task."""
        query = "SELECT id || '/' || member || '/' || attempt FROM (SELECT * FROM episodes WHERE fate IS NULL LIMIT ?) "
        return [name for (name,) in self._rows(query + "AS e JOIN tasks ON number = e.task", limit)]

    def _task(self, where: str, value: int | str) -> TaskRecord | None:
        row = self._rows(f"SELECT {_TASK_COLUMNS} FROM tasks WHERE {where}", value).fetchone()
        return _task_record(row) if row is not None else None

    def _fates(self, table: Literal["tasks", "episodes"]) -> Fates:
        counts = dict(self._rows(f"SELECT COALESCE(fate, 'open'), COUNT(*) FROM {table} GROUP BY 1"))
        names = ("open", "trained", "filtered", "stale", "cancelled", "failed")
        return Fates(sum(counts.values()), *(counts.get(name, 0) for name in names))

    def _rows(self, query: str, *parameters: int | str) -> sqlite3.Cursor:
        return self._db.execute(query, parameters)


class Ledger(LedgerReader):
    """The fates of one run, in one file (or in ":memory:", without a thread). What writes only queues, and returns.

    Reading flushes first. When an operation cannot be applied, because what it is about has a fate already or does
    not exist, nothing from its batch on is written, and the next call says so by a RuntimeError.

    Raises:
        ConfigError: the file is no ledger of this version.
    """

    def __init__(self, path: Path | str) -> None:
        self._in_memory = str(path) == ":memory:"
        db = _connect(path, "rwc")
        self._writer = WriteBehind(db, threaded=not self._in_memory)
        super().__init__(db if self._in_memory else _connect(path, "ro"))
        self._append = self._writer.append
        self._launch: int = self._db.execute("SELECT COALESCE(MAX(launch), -1) + 1 FROM episodes").fetchone()[0]

    def close(self) -> None:
        """Write what is queued and close the file.

        Raises:
            RuntimeError: an operation could not be applied, and no call has said so yet.
        """
        if not self._in_memory:
            super().close()  # first: the last one to close the file takes the log into it, and may not be a reader
        self._writer.close()

    def flush(self) -> None:
        """Return when all that was called before is on the file. It takes its time: a real loop calls it in a thread.

        Raises:
            RuntimeError: an operation could not be applied.
        """
        self._writer.flush()

    def sync(self) -> None:
        """`flush`, and wait until the disk holds it, so that it outlives the machine too.

        Raises:
            RuntimeError: an operation could not be applied.
        """
        self._writer.sync()

    def admit(self, number: int, task: Task, version: int) -> None:
        """A task's group is about to begin under `version`.

        Raises:
            ConfigError: its options would not be the same when they are read back.
        """
        try:
            options = json.dumps(dict(task.options))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the options of task {task.id} are not JSON: {error}") from error
        if json.loads(options) != task.options:
            raise ConfigError(
                f"the options of task {task.id} change when they are kept as JSON (write lists for tuples, and text "
                f"for the keys of mappings): {task.options!r:.200}"
            )
        self._append(_ADMIT, (number, task.id, task.env, str(task.seed), options, version))

    def begin(self, number: int, member: int, attempt: int) -> None:
        """An episode of task `number` is about to begin."""
        self._append(_BEGIN, (number, member, attempt, self._launch))

    def end(self, number: int, member: int, attempt: int, fate: Fate, why: str) -> None:
        """An episode that will not be trained on met its fate."""
        self._append(_END, (fate, _storable(why), number, member, attempt, self._launch))

    def end_task(self, number: int, fate: Fate, why: str) -> None:
        """A task met a fate other than training.

        Its episodes that are still open share it; those of one that failed are cancelled.
        """
        self._append(_END_TASK, (fate, _storable(why), number))

    def filtered(self, step: int, number: int, why: str, rewards: Sequence[float]) -> None:
        """A task's group was played for the batch of `step`, and taught nothing. Its open episodes share the fate."""
        self._append(_FILTERED, (step, _storable(why), json.dumps([float(reward) for reward in rewards]), number))

    def trained(self, step: int, outcomes: Mapping[int, Sequence[float]]) -> None:
        """The groups of these tasks, with their open episodes, go to the trainer as the batch of `step`.

        `outcomes` are the rewards of the members, by the task's number.
        """
        for number, rewards in outcomes.items():
            self._append(_TRAINED, (step, json.dumps([float(reward) for reward in rewards]), number))

    def rewind(self, step: int) -> list[tuple[int, Task]]:
        """Take up a run whose weights are those before `step`: the open tasks as they were admitted, by number.

        Tasks trained at `step` or later are open again, for their weights are lost. Episodes that were in flight, or
        belong to a reopened task, are cancelled; their tasks are to be played again.
        """
        self.flush()
        with self._writer.transaction() as db:
            db.execute(
                "UPDATE tasks SET fate = NULL, step = NULL, rewards = NULL WHERE fate = 'trained' AND step >= ?",
                (step,),
            )
            db.execute(
                "UPDATE episodes SET fate = 'cancelled', step = NULL, why = 'the run was stopped before a checkpoint' "
                "WHERE fate IS NULL OR (fate = 'trained' AND step >= ?)",
                (step,),
            )
        rows = self._rows(f"SELECT {_TASK_COLUMNS} FROM tasks WHERE fate IS NULL ORDER BY number")
        return [(record.number, record.task) for record in map(_task_record, rows)]

    def _rows(self, query: str, *parameters: int | str) -> sqlite3.Cursor:
        self.flush()
        return super()._rows(query, *parameters)


def read_ledger(path: Path) -> LedgerReader:
    """Open a ledger for reading only.

    Raises:
        ConfigError: it is not there, or no ledger of this version.
    """
    if not path.exists():
        raise ConfigError(f"there is no ledger {path}")
    return LedgerReader(_connect(path, "ro"))


def _connect(path: Path | str, mode: Literal["ro", "rwc"]) -> sqlite3.Connection:
    name = ":memory:" if str(path) == ":memory:" else f"{Path(path).absolute().as_uri()}?mode={mode}"
    db = sqlite3.connect(name, uri=True, isolation_level=None, check_same_thread=False)
    try:
        written_as = db.execute("PRAGMA user_version").fetchone()[0]
        if mode == "rwc" and not db.execute("SELECT 1 FROM sqlite_master").fetchone():
            # With a write-ahead log, readers never wait, and a commit outlives the process without a disk flush.
            db.execute("PRAGMA journal_mode=WAL")
            db.executescript(_SCHEMA)
        elif written_as != _FORMAT:
            raise ConfigError("it was written by another version of agentrl")
        db.execute("PRAGMA synchronous=NORMAL")
    except (sqlite3.DatabaseError, ConfigError) as error:
        db.close()
        raise ConfigError(f"{path} is no ledger that can be read: {error}") from error
    return db


def _task_record(row: tuple[Any, ...]) -> TaskRecord:
    number, task_id, env, seed, options, version, fate, step, why, rewards = row
    task = Task(env, int(seed), json.loads(options), task_id)
    return TaskRecord(number, task, version, fate, step, why, tuple(json.loads(rewards or "[]")))


def _storable(why: str) -> str:
    """Reasons quote environments and models, who may say anything: half characters, or megabytes."""
    return why[:2000].encode("utf-8", "replace").decode()
