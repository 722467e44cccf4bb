"""The ledger: records exactly one fate of every task and every episode, in SQLite.

The event loop only appends operations to a queue. The ledger's thread applies them strictly in
order, in transactions of a few hundred, within a fraction of a second; `flush` waits until the
queue is empty.

A run that is killed at any moment and resumed trains on the same multiset of tasks as an
uninterrupted run. Because operations are applied in order, a killed process loses only a *suffix*
of them: the file is in the state of some earlier moment. If one of these operations is lost:

- `admit`: `next_number` has not passed the task's number, so the resumed run admits the same task
  under it again;
- `begin` or `end`: the episode was in flight, and its task is open in the file or missing from it;
  either way the episode is played again;
- `end_task`: the task stays open, is played again and gets its fate then;
- `trained`: the weights of that step are lost too, because a checkpoint is written only after
  `sync`. So the file holds every step of the newest checkpoint in full. `rewind` reopens the tasks
  that later steps trained on.
- `masked`, `segment` and `reused`: the same.

What is in the batch of a step is "trained" as soon as the batch is taken, and "masked" once it is
known that none of its tokens carries a loss there.

A task has one fate, however often it is used: a trained task keeps the step that trained on it
first, and counts later uses (replay, further epochs). An episode that was trained on in parts has a
record of each part, its segments.

An operation is "in the file" once the operating system has it: it survives a crash of the process,
but not of the machine. A machine crash also loses only a suffix, and `sync` ensures that this
begins after the newest checkpoint.
"""

import json
import os
import re
import shutil
import sqlite3
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Self, get_args

from agentrl.errors import ConfigError, StorageError
from agentrl.files.disk_errors import storage_problem
from agentrl.files.durable import new_unfinished
from agentrl.files.file_lock import has_record_locks
from agentrl.ledger.write_behind import WriteBehind
from agentrl.settings.base import check_plain
from agentrl.trajectory import Task

Outcome = tuple[int, Task, tuple[float, ...]]
"""Number, task and the members' rewards of a group that was played."""

Fate = Literal["trained", "masked", "filtered", "stale", "cancelled", "failed"]
"""`masked`: it was in the batch of a step, and none of its tokens carried a loss."""

_IN_A_BATCH = "fate = 'trained' OR fate = 'masked'"
# Not `fate IN (...)`: SQLite would rebuild that list for each row, which costs as much as
# everything else together.
_IS_A_FATE = " OR ".join(f"fate = '{fate}'" for fate in get_args(Fate))
_LOG_HEADER = 32
"""Bytes. They have two numbers that change when SQLite begins its log anew
(https://sqlite.org/walformat.html).
"""
_FORMAT = 4
"""The `PRAGMA user_version` of a ledger. Raise it when the schema changes."""
_UNMASKED = 3
"""The format before there was the fate `masked`: it is read as it is, and rewritten before more is
written to it.
"""
_TABLES = f"""
CREATE TABLE tasks (
    number INTEGER PRIMARY KEY,          -- index in the task source
    id TEXT NOT NULL UNIQUE,
    env TEXT NOT NULL,
    seed TEXT NOT NULL,                  -- an integer of any size
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
    launch INTEGER NOT NULL,  -- number of the run's start: a resumed run may play an episode again
    fate TEXT CHECK ({_IS_A_FATE}),
    step INTEGER,
    why TEXT,
    PRIMARY KEY (task, member, attempt, launch)
) WITHOUT ROWID;
"""
_TRIGGER = """
-- Open episodes get their task's fate, except that those of a failed task are cancelled: they did
-- not fail themselves.
CREATE TRIGGER settle_episodes AFTER UPDATE OF fate ON tasks WHEN NEW.fate IS NOT NULL BEGIN
    UPDATE episodes SET
        fate = CASE WHEN NEW.fate = 'failed' THEN 'cancelled' ELSE NEW.fate END,
        step = NEW.step,
        why = CASE
            WHEN NEW.fate IN ('failed', 'cancelled') THEN 'its task: ' || NEW.why
            ELSE NEW.why
        END
    WHERE task = NEW.number AND fate IS NULL;
END;
"""
_SCHEMA = f"""
BEGIN IMMEDIATE;
{_TABLES}
CREATE TABLE segments (    -- turns of an episode that were trained on while it went on
    task INTEGER NOT NULL,
    member INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    launch INTEGER NOT NULL,
    agent TEXT NOT NULL,
    first INTEGER NOT NULL,              -- number of the first turn
    turns INTEGER NOT NULL,
    step INTEGER NOT NULL,
    PRIMARY KEY (task, member, attempt, launch, agent, first)
) WITHOUT ROWID;
CREATE TABLE reuses (      -- of trained tasks, after their step
    task INTEGER NOT NULL,
    step INTEGER NOT NULL,
    count INTEGER NOT NULL,
    PRIMARY KEY (task, step)
) WITHOUT ROWID;
{_TRIGGER}
PRAGMA user_version = {_FORMAT};
COMMIT;
"""
_ADD_MASKED = f"""
BEGIN IMMEDIATE;
DROP TRIGGER settle_episodes;
ALTER TABLE tasks RENAME TO unmasked_tasks;
ALTER TABLE episodes RENAME TO unmasked_episodes;
{_TABLES}
INSERT INTO tasks SELECT * FROM unmasked_tasks;
INSERT INTO episodes SELECT * FROM unmasked_episodes;
DROP TABLE unmasked_tasks;
DROP TABLE unmasked_episodes;
{_TRIGGER}
PRAGMA user_version = {_FORMAT};
COMMIT;
"""
"""Rewrites the tables of a ledger without the fate `masked`: SQLite cannot change what a column may
hold.
"""

_BUSY_TIMEOUT = "PRAGMA busy_timeout=5000"
"""Milliseconds to wait for another connection that writes."""

_UNUSED_SCHEMA = """
CREATE TABLE IF NOT EXISTS unused (    -- answers of trained episodes that are in no training sample
    task INTEGER NOT NULL,
    member INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    launch INTEGER NOT NULL,
    why TEXT NOT NULL,
    answers INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    PRIMARY KEY (task, member, attempt, launch, why)
) WITHOUT ROWID;
"""
"""A table that ledgers of this format get when they are opened to write, since older ones lack it.
"""
_BRANCHES_SCHEMA = """
CREATE TABLE IF NOT EXISTS branches (    -- episodes that have left another one of their task
    task INTEGER NOT NULL,
    member INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    launch INTEGER NOT NULL,
    parent TEXT NOT NULL,    -- the id of the other episode
    turn INTEGER NOT NULL,   -- the first turn of its own
    PRIMARY KEY (task, member, attempt, launch)
) WITHOUT ROWID;
"""
"""As `_UNUSED_SCHEMA`."""

# The operations. Each row applied must change exactly one row of its table.
_ADMIT = (
    "INSERT INTO tasks (number, id, env, seed, options, admitted_version) VALUES (?, ?, ?, ?, ?, ?)"
    " ON CONFLICT (number) DO UPDATE SET admitted_version = excluded.admitted_version WHERE fate IS"
    " NULL"
)
_BEGIN = "INSERT INTO episodes (task, member, attempt, launch) VALUES (?, ?, ?, ?)"
_END = (
    "UPDATE episodes SET fate = ?, why = ? "
    "WHERE task = ? AND member = ? AND attempt = ? AND launch = ? AND fate IS NULL"
)
_END_TASK = "UPDATE tasks SET fate = ?, why = ? WHERE number = ? AND fate IS NULL"
_TRAINED = (
    "UPDATE tasks SET fate = 'trained', step = ?, rewards = ? WHERE number = ? AND fate IS NULL"
)
_FILTERED = (
    "UPDATE tasks SET fate = 'filtered', step = ?, why = ?, rewards = ? WHERE number = ? AND fate"
    " IS NULL"
)
_HAS_SEGMENTS = (
    "EXISTS (SELECT 1 FROM segments AS s WHERE s.task = episodes.task AND s.member ="
    " episodes.member AND s.attempt = episodes.attempt AND s.launch = episodes.launch)"
)
_MASKED = (
    f"UPDATE episodes SET fate = CASE WHEN {_HAS_SEGMENTS} THEN 'trained' ELSE 'masked' END, why ="
    " ? WHERE task = (SELECT number FROM tasks WHERE id = ?) AND member = ? AND attempt = ? AND"
    " launch = ? AND fate = 'trained' AND step = ?"
)
_HAS_TRAINED = "EXISTS (SELECT 1 FROM episodes WHERE task = tasks.number AND fate = 'trained')"
_MASKED_TASK = (
    f"UPDATE tasks SET fate = CASE WHEN {_HAS_TRAINED} THEN 'trained' ELSE 'masked' END, why = CASE"
    f" WHEN {_HAS_TRAINED} THEN NULL ELSE ? END WHERE id = ? AND fate = 'trained' AND step = ?"
)
_MASKED_SEGMENT = (
    "DELETE FROM segments WHERE task = (SELECT number FROM tasks WHERE id = ?) AND member = ? AND"
    " attempt = ? AND launch = ? AND agent = ? AND step = ?"
)
_SEGMENT = (
    "INSERT INTO segments (task, member, attempt, launch, agent, first, turns, step) VALUES (?, ?,"
    " ?, ?, ?, ?, ?, ?)"
)
_UNUSED = (
    "INSERT INTO unused (task, member, attempt, launch, why, answers, tokens) VALUES (?, ?, ?, ?,"
    " ?, ?, ?)"
)
_BRANCHED = (
    "INSERT INTO branches (task, member, attempt, launch, parent, turn) VALUES (?, ?, ?, ?, ?, ?)"
)
_REUSED = (
    "INSERT INTO reuses (task, step, count) SELECT number, ?, 1 FROM tasks WHERE id = ? AND fate ="
    " 'trained' ON CONFLICT (task, step) DO UPDATE SET count = count + 1"
)
_TASK_COLUMNS = (
    "number, id, env, seed, options, admitted_version, fate, step, why, rewards, COALESCE(fate ="
    " 'trained', 0) + (SELECT COALESCE(SUM(count), 0) FROM reuses WHERE task = number)"
)
_TALLY = {
    "tasks": (
        "SELECT COALESCE(fate, 'open'), COALESCE({why}, ''), COUNT(*), MIN(id) FROM tasks GROUP BY"
        " 1, 2 ORDER BY 3 DESC"
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
    """Numbers of tasks or episodes by fate, which sum to `total`; `open` ones have none yet."""

    total: int
    open: int
    trained: int
    masked: int
    filtered: int
    stale: int
    cancelled: int
    failed: int

    @property
    def settled(self) -> bool:
        """True if all have exactly one fate."""
        return self.open == 0 and self.total == sum(getattr(self, fate) for fate in get_args(Fate))


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """The ledger's record of a task. `fate` is None while it is open; being in a batch and
    filtering set `rewards`.

    `step` is that of the batch, the first if there were several, and `uses` how often it was
    trained on altogether.
    """

    number: int
    task: Task
    admitted_version: int
    fate: Fate | None
    step: int | None
    why: str | None
    rewards: tuple[float, ...]
    uses: int


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """The ledger's record of an episode in one launch of the run; each launch may have played it
    once.
    """

    member: int
    attempt: int
    launch: int
    fate: Fate | None
    step: int | None
    why: str | None


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """Consecutive turns of an episode, from the turn `first` on, that were trained on at `step`,
    before it ended.
    """

    member: int
    attempt: int
    launch: int
    agent: str
    first: int
    turns: int
    step: int


@dataclass(frozen=True, slots=True)
class Tally:
    """`count` tasks or episodes with this `fate` (and the reason `why`, if counted by reason), and
    the id of one.
    """

    fate: Fate | Literal["open"]
    why: str
    count: int
    example: str


class LedgerReader:
    """Reads a ledger, also while a run writes it. A context manager. `on_close` is called when it
    is closed.
    """

    def __init__(self, db: sqlite3.Connection, on_close: Callable[[], None] = lambda: None) -> None:
        self._db, self._on_close = db, on_close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._db.close()
        self._on_close()

    def next_number(self) -> int:
        """The first task index that was never admitted."""
        return int(self._rows("SELECT COALESCE(MAX(number), -1) + 1 FROM tasks").fetchone()[0])

    def outcomes(self, before: int | None = None) -> Iterator[Outcome]:
        """The outcomes of tasks that were in a batch or filtered: by step, then filtered ones
        first, then by number. `before`: only those of earlier steps.
        """
        for record in self._played():
            if before is None or (record.step is not None and record.step < before):
                yield record.number, record.task, record.rewards

    def filtered_since(self, step: int) -> Mapping[int, Sequence[Outcome]]:
        """The outcomes of tasks that were filtered for the batches of `step` and later, by step."""
        by_step: dict[int, list[Outcome]] = {}
        for record in self._played():
            if record.fate == "filtered" and record.step is not None and record.step >= step:
                outcome = record.number, record.task, record.rewards
                by_step.setdefault(record.step, []).append(outcome)
        return by_step

    def _played(self) -> Iterator[TaskRecord]:
        query = (
            f"SELECT {_TASK_COLUMNS} FROM tasks WHERE {_IN_A_BATCH} OR (fate = 'filtered' AND step"
            " IS NOT NULL) ORDER BY step, fate <> 'filtered', number"
        )
        return map(_task_record, self._rows(query))

    def fates_by_env(self) -> Iterator[tuple[int, str, Fate | None]]:
        """(number, environment, fate) of all tasks, by number."""
        yield from self._rows("SELECT number, env, fate FROM tasks ORDER BY number")

    def trained_steps(self, before: int) -> int:
        """The number of steps before `before` that have tasks in their batches."""
        query = f"SELECT COUNT(DISTINCT step) FROM tasks WHERE ({_IN_A_BATCH}) AND step < ?"
        return int(self._rows(query, before).fetchone()[0])

    def task_fates(self) -> Fates:
        """The fates of all tasks."""
        return self._fates("tasks")

    def episode_fates(self) -> Fates:
        """The fates of all episodes of all launches."""
        return self._fates("episodes")

    def branches(self, task: int) -> Mapping[tuple[int, int, int], tuple[str, int]]:
        """The episodes of a task that have left another one: by member, attempt and launch, the
        other's id and the first turn of their own.
        """
        if not self._rows("SELECT 1 FROM sqlite_master WHERE name = 'branches'").fetchone():
            return {}
        query = "SELECT member, attempt, launch, parent, turn FROM branches WHERE task = ?"
        return {
            (member, attempt, launch): (parent, turn)
            for member, attempt, launch, parent, turn in self._rows(query, task)
        }

    def unused_answers(self) -> Mapping[str, tuple[int, int]]:
        """Answers and tokens, by reason, that were sampled in episodes that ended and are in none
        of their turns.
        """
        if not self._rows("SELECT 1 FROM sqlite_master WHERE name = 'unused'").fetchone():
            return {}  # it was written before there was such a table
        rows = self._rows("SELECT why, SUM(answers), SUM(tokens) FROM unused GROUP BY 1 ORDER BY 1")
        return {why: (int(answers), int(tokens)) for why, answers, tokens in rows}

    def task(self, number: int) -> TaskRecord | None:
        """The record of the task with this index."""
        return self._task("number = ?", number)

    def task_named(self, task_id: str) -> TaskRecord | None:
        """The record of the task with this id."""
        return self._task("id = ?", task_id)

    def neighbours(self, task_id: str) -> list[str]:
        """The ids of tasks just before and after `task_id` in alphabetical order."""
        before = self._rows("SELECT id FROM tasks WHERE id < ? ORDER BY id DESC LIMIT 2", task_id)
        after = self._rows("SELECT id FROM tasks WHERE id > ? ORDER BY id LIMIT 2", task_id)
        return [near for (near,) in [*list(before)[::-1], *after]]

    def episodes(self, number: int) -> list[EpisodeRecord]:
        """The episodes of the task with this index, by member, attempt and launch."""
        query = (
            "SELECT member, attempt, launch, fate, step, why FROM episodes WHERE task = ? ORDER BY"
            " 1, 2, 3"
        )
        return [EpisodeRecord(*row) for row in self._rows(query, number)]

    def segments(self, number: int) -> list[SegmentRecord]:
        """The segments of the task with this index, by member, attempt, launch, agent and turn."""
        columns = "member, attempt, launch, agent, first, turns, step"
        query = f"SELECT {columns} FROM segments WHERE task = ? ORDER BY 1, 2, 3, 4, 5"
        return [SegmentRecord(*row) for row in self._rows(query, number)]

    def tallies(self, kind: Literal["tasks", "episodes"]) -> list[Tally]:
        """The number of tasks or episodes of each fate, and an example; the commonest first."""
        return [Tally(*row) for row in self._rows(_TALLY[kind].format(why="''"))]

    def reasons(self, kind: Literal["tasks", "episodes"], limit: int) -> list[Tally]:
        """The most common reasons for fates other than training."""
        rows = self._rows(_TALLY[kind].format(why="why"))
        return list(
            islice((Tally(*row) for row in rows if row[0] not in ("open", "trained")), limit)
        )

    def all_episodes(self) -> Iterator[tuple[str, str, str, str, int | None, str | None]]:
        """Every episode in its latest launch: its id, its task's id, environment, fate ("open" if
        none), step, why.
        """
        query = (
            "SELECT id || '/' || member || '/' || attempt, id, env, COALESCE(e.fate, 'open'),"
            " e.step, e.why FROM (SELECT *, MAX(launch) FROM episodes GROUP BY task, member,"
            " attempt) AS e JOIN tasks ON number = task"
        )
        return iter(self._rows(query))

    def open_episodes(self, limit: int) -> list[str]:
        """The ids of episodes without a fate, by task."""
        query = (
            "SELECT id || '/' || member || '/' || attempt FROM (SELECT * FROM episodes WHERE fate"
            " IS NULL LIMIT ?) "
        )
        return [name for (name,) in self._rows(query + "AS e JOIN tasks ON number = e.task", limit)]

    def damage(self) -> str | None:
        """The damage of the file's pages and indices, or None."""
        try:
            (found,) = self._rows("PRAGMA quick_check(1)").fetchone()
        except sqlite3.DatabaseError as error:
            return str(error)
        return None if found == "ok" else " ".join(str(found).split())

    def _task(self, where: str, value: int | str) -> TaskRecord | None:
        row = self._rows(f"SELECT {_TASK_COLUMNS} FROM tasks WHERE {where}", value).fetchone()
        return _task_record(row) if row is not None else None

    def _fates(self, table: Literal["tasks", "episodes"]) -> Fates:
        counts = dict(
            self._rows(f"SELECT COALESCE(fate, 'open'), COUNT(*) FROM {table} GROUP BY 1")
        )
        names = ("open", *get_args(Fate))
        return Fates(sum(counts.values()), *(counts.get(name, 0) for name in names))

    def _rows(self, query: str, *parameters: int | str) -> sqlite3.Cursor:
        return self._db.execute(query, parameters)


class Ledger(LedgerReader):
    """The fates of one run, in one file (or in ":memory:", without a thread). Writing methods only
    queue and return.

    Reading flushes first. An operation fails if its task or episode has a fate already or does not
    exist. Then neither its batch nor anything after it is written, and the next call raises a
    RuntimeError.

    Raises:
        ConfigError: the file is not a ledger of this version.
    """

    def __init__(self, path: Path | str) -> None:
        in_memory = str(path) == ":memory:"
        with ExitStack() as unless_opened:
            db = _connect(path, "rwc")
            self._writer = WriteBehind(db, threaded=not in_memory)
            unless_opened.callback(self._writer.close)
            self._path = Path(path)
            self._file = None if in_memory else self._path.stat()
            if in_memory:  # there is no file to finish, so callers need not close it
                weakref.finalize(self, db.close)
            # A second connection would not see what the first has written, in memory and on file
            # systems without locks.
            locking_mode = db.execute("PRAGMA locking_mode").fetchone()[0]
            self._one_connection = in_memory or locking_mode == "exclusive"
            super().__init__(db if self._one_connection else _connect(path, "ro"))
            unless_opened.callback(super().close)
            self._append = self._writer.append
            self._launch: int = self._db.execute(
                "SELECT COALESCE(MAX(launch), -1) + 1 FROM episodes"
            ).fetchone()[0]
            unless_opened.pop_all()

    def close(self) -> None:
        """Write what is queued and close the file.

        Raises:
            RuntimeError: an operation could not be applied, and no call has raised this yet.
        """
        if not self._one_connection:
            # first: the last connection to close merges the log into the file; a reader's cannot
            super().close()
        self._writer.close()

    def flush(self) -> None:
        """Return when all earlier operations are in the file. It blocks, so a real event loop calls
        it in a thread.

        Raises:
            RuntimeError: an operation could not be applied.
        """
        self._writer.flush()

    def sync(self) -> None:
        """`flush`, and wait until the data is on disk, so that it survives a crash of the machine
        too.

        Raises:
            RuntimeError: an operation could not be applied.
            StorageError: the file was deleted or replaced (`check_place`).
        """
        self._writer.sync()
        self.check_place()

    def check_place(self) -> None:
        """Check that the file is still the one that was opened.

        SQLite goes on writing to a deleted file, and all of it is lost when the file is closed. So
        this writes a missing file again, with all operations so far.

        Raises:
            StorageError: the file was deleted (raised once) or replaced.
        """
        if self._file is None:
            return
        try:
            found = self._path.stat()
        except FileNotFoundError:
            self._write_again()
            raise StorageError(
                f"{self._path} was deleted while its run went on, which ends with this. The run has"
                " written it again: continue with `agentrl train --resume`"
            ) from None
        if not os.path.samestat(found, self._file):
            raise StorageError(
                f"{self._path} was replaced while its run went on, which ends with this. What the"
                " run has recorded since is lost: start a new run with run_dir=ANOTHER"
            )

    def _write_again(self) -> None:
        copy = new_unfinished(self._path)
        self._rows("VACUUM INTO ?", str(copy))
        with closing(sqlite3.connect(copy)) as db:
            db.execute("PRAGMA journal_mode=WAL")
        # SQLite would take the log of the deleted file for a part of the new one.
        for left in ("-wal", "-shm"):
            Path(f"{self._path}{left}").unlink(missing_ok=True)
        copy.rename(self._path)
        self._file = self._path.stat()

    def admit(self, number: int, task: Task, version: int) -> None:
        """Record that a task's group is about to begin under `version`.

        Raises:
            ConfigError: the task's options would not be the same when read back.
        """
        try:
            check_plain(task.options)
            options = json.dumps(dict(task.options))
        except ValueError as error:
            raise ConfigError(f"the options of task {task.id} cannot be stored: {error}") from error
        self._append(_ADMIT, (number, task.id, task.env, str(task.seed), options, version))

    def begin(self, number: int, member: int, attempt: int) -> None:
        """Record that an episode of task `number` is about to begin."""
        self._append(_BEGIN, (number, member, attempt, self._launch))

    def branched(self, number: int, member: int, attempt: int, parent: str, turn: int) -> None:
        """Record that an episode that is about to begin leaves the episode `parent` of its task at
        a turn.
        """
        self._append(_BRANCHED, (number, member, attempt, self._launch, parent, turn))

    def end(self, number: int, member: int, attempt: int, fate: Fate, why: str) -> None:
        """Record the fate of an episode that will not be trained on."""
        self._append(_END, (fate, _storable(why), number, member, attempt, self._launch))

    def end_task(self, number: int, fate: Fate, why: str) -> None:
        """Record a task's fate other than training.

        Its open episodes share the fate, except that those of a failed task are cancelled.
        """
        self._append(_END_TASK, (fate, _storable(why), number))

    def filtered(self, step: int, number: int, why: str, rewards: Sequence[float]) -> None:
        """Record that a group played for the batch of `step` taught nothing. Its open episodes
        share the fate.
        """
        self._append(
            _FILTERED,
            (step, _storable(why), json.dumps([float(reward) for reward in rewards]), number),
        )

    def trained(self, step: int, outcomes: Mapping[int, Sequence[float]]) -> None:
        """Record that these tasks' groups, with their open episodes, go to the trainer as the batch
        of `step`.

        `outcomes` has the members' rewards by the task's number.
        """
        for number, rewards in outcomes.items():
            self._append(
                _TRAINED, (step, json.dumps([float(reward) for reward in rewards]), number)
            )

    def masked(
        self, step: int, episodes: Mapping[str, str], segments: Iterable[tuple[str, str]] = ()
    ) -> None:
        """Record what is in the batch of `step` and carries no loss there.

        `episodes`: why, by id. One of which a segment was trained on before stays trained; a task
        is masked with the last of its episodes. `segments`: id and agent of those of episodes that
        go on.
        """
        for name, agent in segments:
            task, member, attempt = _place(name)
            self._append(_MASKED_SEGMENT, (task, member, attempt, self._launch, agent, step))
        reasons: dict[str, dict[str, None]] = {}
        for name, why in episodes.items():
            task, member, attempt = _place(name)
            self._append(_MASKED, (_storable(why), task, member, attempt, self._launch, step))
            reasons.setdefault(task, {})[why] = None
        for task, whys in reasons.items():
            self._append(_MASKED_TASK, (_storable("; ".join(whys)), task, step))

    def segment(
        self,
        step: int,
        number: int,
        member: int,
        attempt: int,
        *,
        agent: str,
        first: int,
        turns: int,
    ) -> None:
        """Record that turns of an episode that goes on, from the turn `first` on, are in the batch
        of `step`.
        """
        self._append(_SEGMENT, (number, member, attempt, self._launch, agent, first, turns, step))

    def unused(
        self, number: int, member: int, attempt: int, dropped: Mapping[str, tuple[int, int]]
    ) -> None:
        """Record what was sampled in an episode and is in none of its turns: by reason, answers and
        tokens.
        """
        for why, (answers, tokens) in dropped.items():
            self._append(_UNUSED, (number, member, attempt, self._launch, why, answers, tokens))

    def reused(self, step: int, task_ids: Sequence[str]) -> None:
        """Record that these tasks, which have been trained on already, are used once more at
        `step`.
        """
        for task_id in task_ids:
            self._append(_REUSED, (step, task_id))

    def rewind(self, step: int) -> list[tuple[int, Task]]:
        """Resume a run with the weights from before `step`: returns the open tasks as they were
        admitted, by number.

        Tasks in the batches of `step` or later are reopened, because their weights are lost.
        Episodes in flight, and those of reopened tasks, are cancelled; their tasks must be played
        again. Segments and uses of lost steps are forgotten.
        """
        self.flush()
        with self._writer.transaction() as db:
            db.execute(
                "UPDATE tasks SET fate = NULL, step = NULL, why = NULL, rewards = NULL "
                f"WHERE ({_IN_A_BATCH}) AND step >= ?",
                (step,),
            )
            db.execute(
                "UPDATE episodes SET fate = 'cancelled', step = NULL, why = 'the run was stopped"
                f" before a checkpoint' WHERE fate IS NULL OR (({_IN_A_BATCH}) AND step >= ?)",
                (step,),
            )
            db.execute("DELETE FROM segments WHERE step >= ?", (step,))
            db.execute("DELETE FROM reuses WHERE step >= ?", (step,))
        rows = self._rows(f"SELECT {_TASK_COLUMNS} FROM tasks WHERE fate IS NULL ORDER BY number")
        return [(record.number, record.task) for record in map(_task_record, rows)]

    def _rows(self, query: str, *parameters: int | str) -> sqlite3.Cursor:
        self.flush()
        return super()._rows(query, *parameters)


def read_ledger(path: Path) -> LedgerReader:
    """Open a ledger for reading only. Nothing is written into its folder, which may be read-only.

    SQLite reads a write-ahead log only together with an index file, which a live run keeps. If the
    run was killed, or may be alive on another machine, a copy is read instead: it shows the state
    at the time of opening.

    Raises:
        ConfigError: the file does not exist, or is not a ledger of this version.
    """
    if not path.exists():
        raise ConfigError(f"there is no ledger {path}")
    if not _log_of(path):
        return LedgerReader(_connect(path, "immutable"))
    if _is_in_use(path):
        return LedgerReader(_connect(path, "ro"))
    folder = tempfile.TemporaryDirectory(prefix="agentrl-ledger-")
    try:
        copy = _copy_consistently(path, Path(folder.name))
        return LedgerReader(_connect(copy, "ro", named=path), folder.cleanup)
    except BaseException:
        folder.cleanup()
        raise


def _copy_consistently(path: Path, into: Path) -> Path:
    """Copy a ledger that may be written meanwhile, with its log.

    SQLite moves pages from the log into the file, so the file is copied first: what changes in it
    meanwhile is still in the log that is copied next. Unless the log was begun anew in between,
    which changes its header; then both are copied again.
    """
    copy = into / path.name
    while True:
        log = _log_of(path)
        shutil.copyfile(path, copy)
        if not log:
            return copy
        with suppress(FileNotFoundError):  # its last writer has just closed it
            shutil.copyfile(f"{path}-wal", f"{copy}-wal")
            if _log_of(copy) == log:
                return copy
        Path(f"{copy}-wal").unlink(missing_ok=True)


def _is_in_use(path: Path) -> bool:
    """True if a process of this machine is known to have a ledger open: SQLite locks its file."""
    try:
        locks = Path("/proc/locks").read_text()
    except OSError:  # not Linux
        return False
    return re.search(rf":{path.stat().st_ino} ", locks) is not None and Path(f"{path}-shm").exists()


def _log_of(path: Path) -> bytes:
    """The header of a ledger's write-ahead log; empty if there is no log."""
    try:
        with Path(f"{path}-wal").open("rb") as log:
            return log.read(_LOG_HEADER)
    except FileNotFoundError:
        return b""


def check_ledger(path: Path, steps: int) -> None:
    """Check that a ledger has the tasks of all steps that a checkpoint includes.

    Raises:
        ConfigError: the file is missing or damaged, is not a ledger, or lacks some of these steps.
    """
    way_out = (
        "Without it the run would train tasks twice: restore it from a copy, or start a new run"
        " with run_dir=ANOTHER"
    )
    if not path.exists() or path.stat().st_size == 0:
        raise ConfigError(
            f"{path} is missing or empty, and the run has a checkpoint after {steps} steps."
            f" {way_out}"
        )
    with read_ledger(path) as ledger:
        if (damage := ledger.damage()) is not None:
            raise ConfigError(f"{path} is damaged ({damage}). {way_out}")
        recorded = ledger.trained_steps(steps)
    if recorded != steps:
        raise ConfigError(
            f"{path} has the tasks of {recorded} steps, and the run has a checkpoint after {steps}"
            f" steps. {way_out}"
        )


def _connect(
    path: Path | str, mode: Literal["ro", "immutable", "rwc"], named: Path | None = None
) -> sqlite3.Connection:
    """`immutable`: nobody writes the file, so it is read without locks. `named`: its path in
    errors, if another.
    """
    how = "mode=ro&immutable=1" if mode == "immutable" else f"mode={mode}"
    name = ":memory:" if str(path) == ":memory:" else f"{Path(path).absolute().as_uri()}?{how}"
    db = sqlite3.connect(name, timeout=0, uri=True, isolation_level=None, check_same_thread=False)
    try:
        try:
            written_as = db.execute("PRAGMA user_version").fetchone()[0]
        except sqlite3.OperationalError:
            if not has_record_locks(Path(path).parent):
                # The run's own lock keeps other writers out. Without shared memory, the log is one
                # connection's alone.
                db.close()
                db = sqlite3.connect(
                    f"{name}&vfs=unix-none", uri=True, isolation_level=None, check_same_thread=False
                )
                db.execute("PRAGMA locking_mode=EXCLUSIVE")
            db.execute(_BUSY_TIMEOUT)
            written_as = db.execute("PRAGMA user_version").fetchone()[0]
        db.execute(_BUSY_TIMEOUT)
        if mode == "rwc" and not db.execute("SELECT 1 FROM sqlite_master").fetchone():
            # With a write-ahead log, readers never wait, and a commit survives the process without
            # a disk flush.
            db.execute("PRAGMA journal_mode=WAL")
            db.executescript(_SCHEMA)
        elif written_as == _UNMASKED and mode == "rwc":
            db.executescript(_ADD_MASKED)
        elif written_as not in (_UNMASKED, _FORMAT):
            raise ConfigError("it was written by another version of agentrl")
        if mode == "rwc":
            db.executescript(_UNUSED_SCHEMA)
            db.executescript(_BRANCHES_SCHEMA)
        db.execute("PRAGMA synchronous=NORMAL")
    except (sqlite3.DatabaseError, ConfigError) as error:
        db.close()
        if isinstance(error, sqlite3.OperationalError) and storage_problem(error) is not None:
            raise  # of the disk, which says nothing about the ledger
        raise ConfigError(f"{named or path} is no ledger that can be read: {error}") from error
    return db


def _task_record(row: tuple[Any, ...]) -> TaskRecord:
    number, task_id, env, seed, options, version, fate, step, why, rewards, uses = row
    task = Task(env, int(seed), json.loads(options), task_id)
    return TaskRecord(
        number, task, version, fate, step, why, tuple(json.loads(rewards or "[]")), uses
    )


def _place(episode: str) -> tuple[str, int, int]:
    """The task, member and attempt that the id of an episode names."""
    task, member, attempt = episode.rsplit("/", 2)
    return task, int(member), int(attempt)


def _storable(why: str) -> str:
    """A reason that can be stored: it may quote environments and models, and so hold megabytes, or
    lone surrogates, which UTF-8 cannot encode.
    """
    return why[:2000].encode("utf-8", "replace").decode()
