"""An index of a run's episodes in DuckDB: the columns that a table shows. Texts and tokens stay in
the run's files.
"""

import re
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import Annotated, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from annotated_types import Ge, Le

from agentrl.errors import ConfigError
from agentrl.ledger.ledger import read_ledger
from agentrl.viewer.folders import EVALUATION, RunFolder

_HISTOGRAM_BARS = 24
_MEMORY_LIMIT = "160MB"
_COLUMNS = {
    "id": "VARCHAR",
    "agent": "VARCHAR",
    "task": "VARCHAR",
    "env": "VARCHAR",
    "status": "VARCHAR",
    "detail": "VARCHAR",
    "success": "BOOLEAN",
    "score": "DOUBLE",
    "started": "DOUBLE",
    "seconds": "DOUBLE",
    "num_turns": "INTEGER",
    "num_tokens": "BIGINT",
    "num_forks": "INTEGER",
    "oldest_version": "INTEGER",
    "trained_turns": "INTEGER",
    "parent": "VARCHAR",
    "branch_turn": "INTEGER",
}
_SCHEMA = f"""
SET memory_limit = '{_MEMORY_LIMIT}'; SET threads = 2; SET enable_progress_bar = false;
SET autoinstall_known_extensions = false; SET autoload_known_extensions = false;
CREATE TABLE trajectories (
    kind VARCHAR, step INTEGER, place INTEGER, {", ".join(map(" ".join, _COLUMNS.items()))}
);
CREATE TABLE fates (id VARCHAR, task VARCHAR, env VARCHAR, fate VARCHAR, step INTEGER, why VARCHAR);
"""
_JOIN = """
CREATE OR REPLACE TABLE episodes AS SELECT
    coalesce(t.id, f.id) AS id, coalesce(t.task, f.task) AS task, coalesce(t.env, f.env) AS env,
    coalesce(f.fate, CASE
        WHEN t.kind = 'trajectories' THEN 'trained'
        WHEN NOT starts_with(t.kind, 'eval:') THEN 'open'
        WHEN t.status = 'failed' THEN 'failed' ELSE 'held_out' END) AS fate,
    coalesce(t.step, f.step) AS step,
    coalesce(f.why, CASE
        WHEN starts_with(t.kind, 'eval:') AND t.status = 'failed' THEN t.detail END) AS why,
    CASE WHEN starts_with(t.kind, 'eval:') THEN t.kind[6:] END AS evaluation,
    t.kind, t.place, t.agent, t.status, t.detail, t.success,
    t.score, t.started, t.seconds, t.num_turns, t.num_tokens, t.num_forks, t.trained_turns,
    t.parent, t.branch_turn,
    t.step - t.oldest_version AS staleness,
    CASE WHEN f.fate = 'failed' THEN split_part(f.why, ':', 1) END AS layer
FROM trajectories t FULL JOIN fates f ON t.id = f.id;
"""
_FILES = "read_parquet({}, filename = true, file_row_number = true, hive_partitioning = false)"
"""The rows of files. In DuckDB's default, a folder `env=sokoban` replaces the files' own `env`."""
_STEP_OF_FILE = "CAST(regexp_extract(filename, '_([0-9]+)\\.parquet$', 1) AS INTEGER)"
KINDS = ("trajectories", "untrained")
"""The folders of a run with episodes: of the batches of its steps, and some of the others."""
SORTS = ("id", "step", "env", "fate", "score", "num_turns", "num_tokens", "seconds", "staleness")
"""Columns that a table may be sorted by."""


_NAMED, _DRAWN = 200, 8
"""Tools that are named (a model may make up many), and those whose calls are told by step."""
MOST_ROWS = 1000
"""Most rows of one page of a table."""
_Number = Annotated[int, Ge(-(2**31)), Le(2**31 - 1)]


@dataclass(frozen=True, slots=True)
class EpisodeQuery:
    """A selection of episodes: each field that is not `None` or empty is a condition."""

    kind: str = ""
    """One of `KINDS`."""
    evaluation: str = ""
    """Episodes of the evaluation of this name, and not those played to train."""
    tool: str = ""
    """Episodes that called this tool."""
    refused: bool = False
    """With `tool`: only episodes of which a call of it failed."""
    step: _Number | None = None
    env: str = ""
    fate: str = ""
    task: str = ""
    layer: str = ""
    status: str = ""
    text: str = ""
    """A part of any message."""
    low: float | None = None
    """The least score."""
    high: float | None = None
    """The greatest score."""
    stale: _Number | None = None
    """The least staleness."""
    sort: str = "step"
    descending: bool = True
    offset: Annotated[_Number, Ge(0)] = 0
    limit: Annotated[int, Ge(0), Le(MOST_ROWS)] = 100

    def conditions(self, *, of_score: bool = True) -> tuple[str, list[Any]]:
        """An SQL condition, and its parameters."""
        wanted: list[tuple[str, Any]] = [
            (f"{name} = ?", value)
            for name in ("kind", "step", "env", "fate", "task", "layer", "status")
            if (value := getattr(self, name)) not in (None, "")
        ]
        if of_score:
            wanted += [("score >= ?", self.low)] if self.low is not None else []
            wanted += [("score <= ?", self.high)] if self.high is not None else []
        wanted += [("staleness >= ?", self.stale)] if self.stale is not None else []
        wanted += [("evaluation = ?", self.evaluation)] if self.evaluation else []
        always = "TRUE" if self.evaluation else "evaluation IS NULL"
        return " AND ".join([always, *(condition for condition, _ in wanted)]), [
            value for _, value in wanted
        ]


def check_duckdb() -> None:
    """Check that the index of a run's episodes can be made.

    Raises:
        ConfigError: DuckDB is not installed, although agentrl requires it.
    """
    try:
        import duckdb  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"the tables of a run's episodes need DuckDB, which is missing here ({error}): pip"
            " install duckdb"
        ) from error


class EpisodeIndex:
    """The episodes of one run. Calls may come from several threads; each first reads what is new in
    the files.

    Raises:
        ConfigError: DuckDB is not installed.
    """

    def __init__(self, run: RunFolder) -> None:
        check_duckdb()
        import duckdb

        self._run = run
        self._db = duckdb.connect()
        # By default, DuckDB writes temporary files into the current folder.
        self._db.execute("SET temp_directory = ?", [f"{gettempdir()}/agentrl-view"])
        self._db.execute(_SCHEMA)
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int], tuple[int, int]] = {}
        self._ledger: tuple[tuple[int, int] | None, ...] = ()
        self._joined = False
        self._searched: tuple[Any, ...] | None = None
        self._unreadable: dict[str, str] = {}
        self._unread = (duckdb.Error, pa.ArrowException, OSError)

    def refresh(self) -> None:
        """Read what is new in the files, which the next call would do otherwise."""
        with self._lock:
            self._refresh()

    def page(self, query: EpisodeQuery) -> dict[str, Any]:
        """The rows of a table, how many there are in all, the histogram of their scores, and what
        files could not be read.

        Raises:
            ConfigError: there is no such column to sort by.
        """
        if query.sort not in SORTS:
            raise ConfigError(
                f"episodes cannot be sorted by {query.sort!r}, only by {', '.join(SORTS)}"
            )
        with self._lock:
            self._refresh()
            found = f"{self._text_condition(query)} AND {self._call_condition(query)}"
            where, values = query.conditions()
            where = f"{where} AND {found}"
            order = f"{query.sort} {'DESC' if query.descending else 'ASC'} NULLS LAST, id, agent"
            rows = self._dicts(
                f"SELECT * FROM episodes WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?",
                [*values, query.limit, query.offset],
            )
            (total,) = self._one(f"SELECT count(*) FROM episodes WHERE {where}", values)
            return {
                "rows": rows,
                "total": total,
                "histogram": self._histogram(query, found),
                "unreadable": [f"{name}: {why}" for name, why in self._unreadable.items()],
            }

    def choices(self, evaluation: str = "") -> dict[str, list[Any]]:
        """The values that a filter may ask for, the most frequent first: of the episodes that were
        played to train, or of those of an evaluation. `evaluation`: the evaluations.
        """
        where, values = EpisodeQuery(evaluation=evaluation).conditions()
        with self._lock:
            self._refresh()
            found = {
                name: self._counts(name, where, values)
                for name in ("env", "fate", "layer", "status")
            }
            return {**found, "evaluation": self._counts("evaluation", "TRUE", [])}

    def _counts(self, name: str, where: str, values: Sequence[Any]) -> list[Any]:
        rows = self._db.execute(
            f"SELECT {name}, count(*) FROM episodes WHERE {where} AND {name} IS NOT NULL GROUP BY 1"
            " ORDER BY 2 DESC, 1 LIMIT 50",
            list(values),
        )
        return [list(row) for row in rows.fetchall()]

    def evaluated(self, evaluation: str) -> list[dict[str, Any]]:
        """The results of each task in each evaluation of a name: `success` and `score` are means
        over its `episodes`.
        """
        with self._lock:
            self._refresh()
            return self._dicts(
                "SELECT CASE WHEN evaluation = 'held_out' THEN task ELSE regexp_replace(task,"
                " '/[^/]*$', '') END AS task, min(env) AS env, step, avg(success::INTEGER) FILTER"
                " (fate <> 'failed') AS success, avg(score) FILTER (isfinite(score)) AS score,"
                " count(*) AS episodes, count(*) FILTER (fate = 'failed') AS failed, min(id) AS id"
                " FROM episodes WHERE evaluation = ? GROUP BY 1, 3 ORDER BY 3, 1",
                [evaluation],
            )

    def tools(
        self, first: int | None = None, last: int | None = None, evaluation: str = ""
    ) -> dict[str, Any]:
        """The tools that were called in the episodes of some steps, by name, the most called first:
        `calls`, those that `failed`, seconds (median, 99 % of the calls, all), `episodes`, and
        `by_step` (step, calls, failed, seconds).

        `unknown`: the episodes were recorded by a release that did not keep calls.
        """
        kinds = (f"{EVALUATION}{evaluation}",) if evaluation else KINDS
        files = {
            str(path): step
            for kind in kinds
            for step, path in self._run.files(kind).items()
            if (first is None or step >= first) and (last is None or step <= last)
        }
        with self._lock:
            self._refresh()
            paths = [
                path for path in files if "/".join(Path(path).parts[-2:]) not in self._unreadable
            ]
            rows = self._read_calls(paths)
        whole = [row for row in rows or () if row["file"] is None]
        by_step: dict[tuple[Any, int], list[float]] = defaultdict(lambda: [0, 0, 0.0])
        for row in rows or ():
            if row["file"] is not None:
                sums = by_step[row["name"], files[row["file"]]]
                for place, value in enumerate((row["calls"], row["failed"], row["seconds"])):
                    sums[place] += value
        steps = sorted(set(files.values()))
        tools = []
        for place, row in enumerate(whole[:_NAMED]):
            # Only the tools that are called most are drawn over the steps.
            curve_steps = steps if place < _DRAWN else []
            name = row["name"]
            sums_by_step = [[at, *by_step[name, at]] for at in curve_steps if (name, at) in by_step]
            tools.append({**row, "by_step": sums_by_step})
        return {
            "tools": tools,
            "steps": steps,
            "evaluations": sorted(self._run.evaluations()),
            "unknown": rows is None,
        }

    def _read_calls(self, paths: Sequence[str]) -> list[dict[str, Any]] | None:
        """The calls by name (`file` is None), and by name and file; None if no file tells."""
        try:
            return self._count_calls(paths)
        except self._unread:  # some were written by an earlier release
            telling = [path for path in paths if "calls" in pq.read_schema(path).names]
            return self._count_calls(telling) if telling else None

    def _count_calls(self, paths: Sequence[str]) -> list[dict[str, Any]]:
        if not paths:
            return []
        return self._dicts(
            "WITH called AS (SELECT filename AS file, hash(id, agent) AS episode, unnest(calls) AS"
            f" call FROM {_FILES.format('?')}) SELECT call.name AS name, file, count(*)"
            " AS calls, count(*) FILTER (call.refused) AS failed, sum(call.seconds) AS seconds,"
            " quantile_cont(call.seconds::FLOAT, 0.5) AS median, quantile_cont(call.seconds::FLOAT,"
            " 0.99) AS p99, count(DISTINCT episode) AS episodes FROM called GROUP BY GROUPING SETS"
            " ((call.name), (call.name, file)) ORDER BY calls DESC, name",
            [_as_patterns(paths)],
        )

    def named(self, name: str) -> list[dict[str, Any]]:
        """The rows of an episode: one for each agent, and each part trained on by itself."""
        with self._lock:
            self._refresh()
            return self._dicts("SELECT * FROM episodes WHERE id = ? ORDER BY step, agent", [name])

    def group(self, task: str) -> list[dict[str, Any]]:
        """The rows of a task's episodes."""
        with self._lock:
            self._refresh()
            return self._dicts(
                "SELECT * FROM episodes WHERE task = ? ORDER BY id, agent, step LIMIT 256", [task]
            )

    def fates(self, step: int) -> dict[str, str]:
        """The fate of each episode whose messages were kept with those of a step, by its id."""
        with self._lock:
            self._refresh()
            found = self._db.execute(
                "SELECT id, fate FROM episodes WHERE step = ? AND kind IS NOT NULL AND evaluation"
                " IS NULL",
                [step],
            )
            return dict(found.fetchall())

    def in_play(self, begin: float, end: float) -> list[dict[str, Any]]:
        """The kept rows of episodes that were played between two Unix times."""
        with self._lock:
            self._refresh()
            condition = (
                "kind IS NOT NULL AND evaluation IS NULL AND started < ? AND started + seconds > ?"
            )
            return self._dicts(
                f"SELECT * FROM episodes WHERE {condition} ORDER BY started", [end, begin]
            )

    def failed_layers(self, first: int, last: int) -> list[str]:
        """The layers at fault for episodes that failed in these steps, or when is not known."""
        with self._lock:
            self._refresh()
            condition = "layer IS NOT NULL AND (step IS NULL OR step BETWEEN ? AND ?)"
            found = self._db.execute(
                f"SELECT DISTINCT layer FROM episodes WHERE {condition} ORDER BY 1", [first, last]
            )
            return [layer for (layer,) in found.fetchall()]

    def _refresh(self) -> None:
        evaluations = (f"{EVALUATION}{name}" for name in self._run.evaluations())
        files = {
            (kind, step): path
            for kind in (*KINDS, *evaluations)
            for step, path in self._run.files(kind).items()
        }
        stamps = {key: stamp for key, path in files.items() if (stamp := _stamp(path)) is not None}
        changed = [key for key, stamp in stamps.items() if self._known.get(key) != stamp]
        gone = [key for key in self._known if key not in stamps]
        # A file that has changed is read anew, so its old rows go first.
        for key in [*gone, *(key for key in changed if key in self._known)]:
            self._forget(key)
        self._read_all({key: files[key] for key in changed})
        self._joined = self._joined and not (changed or gone)
        self._known = stamps
        ledger = self._run.path / "ledger.sqlite"
        # SQLite writes to its write-ahead log first, and to the file itself only now and then.
        state = _stamp(ledger), _stamp(ledger.with_name("ledger.sqlite-wal"))
        if state != self._ledger:
            self._read_fates(ledger)
            self._ledger = state
            self._joined = False
        if not self._joined:
            self._db.execute(_JOIN)
            self._joined = True

    def _forget(self, key: tuple[str, int]) -> None:
        self._db.execute("DELETE FROM trajectories WHERE kind = ? AND step = ?", key)
        self._unreadable.pop(_file_name(*key), None)

    def _read_all(self, files: Mapping[tuple[str, int], Path]) -> None:
        """Read files together, which is much faster than one by one. If one of them cannot be read,
        read them one by one, and note those that fail.
        """
        try:
            for group in _by_columns([*files.values()]):
                self._read(group)
        except self._unread:
            for key, path in files.items():
                self._forget(key)
                try:
                    self._read(_by_columns([path])[0])
                except self._unread as error:
                    self._unreadable[_file_name(*key)] = _first_line(error)

    def _read(self, files: tuple[list[str], tuple[str, ...]]) -> None:
        paths, columns = files
        shown = ", ".join(name if name in columns else f"NULL AS {name}" for name in _COLUMNS)
        self._db.execute(
            "INSERT INTO trajectories SELECT CASE WHEN regexp_matches(filename,"
            " '/step_[0-9]{1,9}\\.parquet$') THEN regexp_extract(filename,"
            f" '([a-z]+)/step_[0-9]+\\.parquet$', 1) ELSE '{EVALUATION}' ||"
            f" regexp_extract(filename, '/([^/]+)_[0-9]+\\.parquet$', 1) END, {_STEP_OF_FILE},"
            f" file_row_number, {shown} FROM {_FILES.format('?')}",
            [_as_patterns(paths)],
        )

    def _read_fates(self, path: Path) -> None:
        self._db.execute("DELETE FROM fates")
        self._unreadable.pop(path.name, None)
        if not path.exists():
            return
        try:
            with read_ledger(path) as ledger:
                rows = list(ledger.all_episodes())
        except (ConfigError, sqlite3.Error) as error:
            self._unreadable[path.name] = _first_line(error)
            return
        if rows:
            names = ("id", "task", "env", "fate", "step", "why")
            table = pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))
            self._db.register("read_fates", table)
            self._db.execute("INSERT INTO fates SELECT * FROM read_fates")
            self._db.unregister("read_fates")

    def _text_condition(self, query: EpisodeQuery) -> str:
        """A condition that holds for episodes with the text in their messages or reasons."""
        if not query.text:
            return "TRUE"
        text = query.text.lower()
        self._db.execute("SET VARIABLE wanted = ?", [text])
        asked = text, query.step, query.evaluation, tuple(self._known.items())
        # The next page of the same search, or another order, reads no file again.
        if asked != self._searched:
            self._search(text, self._files(query))
            self._searched = asked
        return (
            "((id, coalesce(agent, ''), step) IN (SELECT id, agent, step FROM found) "
            "OR contains(lower(id), getvariable('wanted')) "
            "OR contains(lower(coalesce(why, '')), getvariable('wanted')))"
        )

    def _files(self, query: EpisodeQuery) -> list[str]:
        """The files with the messages of the episodes that are asked for."""
        kinds = (f"{EVALUATION}{query.evaluation}",) if query.evaluation else KINDS
        found = [
            (kind, number, path) for kind in kinds for number, path in self._run.files(kind).items()
        ]
        return [
            str(path)
            for kind, number, path in found
            if query.step in (None, number) and _file_name(kind, number) not in self._unreadable
        ]

    def _search(self, text: str, files: Sequence[str]) -> None:
        """Put the episodes in whose messages the text is into a table."""
        self._db.execute(
            "CREATE OR REPLACE TEMP TABLE found (id VARCHAR, agent VARCHAR, step INTEGER)"
        )
        of_message = "contains(lower(m.content), $2) OR contains(lower(m.reasoning), $2)"
        condition = f"len(list_filter(messages, lambda m: {of_message})) > 0"
        self._put("found", condition, files, [text])

    def _call_condition(self, query: EpisodeQuery) -> str:
        """A condition that holds for the episodes that called a tool."""
        if not query.tool:
            return "TRUE"
        self._db.execute(
            "CREATE OR REPLACE TEMP TABLE callers (id VARCHAR, agent VARCHAR, step INTEGER)"
        )
        condition = "len(list_filter(calls, lambda c: c.name = $2 AND (c.refused OR NOT $3))) > 0"
        self._put("callers", condition, self._files(query), [query.tool, query.refused])
        return "(id, coalesce(agent, ''), step) IN (SELECT id, agent, step FROM callers)"

    def _put(self, table: str, condition: str, files: Sequence[str], values: Sequence[Any]) -> None:
        """Put the episodes of files for which a condition holds into a table."""
        insert = (
            f"INSERT INTO {table} SELECT id, agent, {_STEP_OF_FILE} "
            f"FROM {_FILES.format('$1')} WHERE {condition}"
        )
        try:
            if files:
                self._db.execute(insert, [_as_patterns(files), *values])
        except self._unread:
            for file in files:
                # It is written again, has just been deleted, or is of an earlier release.
                with suppress(*self._unread):
                    self._db.execute(insert, [_as_patterns([file]), *values])

    def _histogram(self, query: EpisodeQuery, found: str) -> dict[str, Any]:
        """The number of scores in each of some bars of equal width from `low` to `high`."""
        where, values = query.conditions(of_score=False)
        where = f"{where} AND {found} AND isfinite(score)"
        low, high = self._one(f"SELECT min(score), max(score) FROM episodes WHERE {where}", values)
        if low is None:
            return {"low": None, "high": None, "counts": []}
        width = (high - low) / _HISTOGRAM_BARS or 1.0
        counts = dict(
            self._db.execute(
                "SELECT least(floor((score - ?) / ?), ?)::INTEGER, count(*) FROM episodes WHERE"
                f" {where} GROUP BY 1",
                [low, width, _HISTOGRAM_BARS - 1, *values],
            ).fetchall()
        )
        return {
            "low": low,
            "high": high,
            "counts": [counts.get(number, 0) for number in range(_HISTOGRAM_BARS)],
        }

    def _one(self, query: str, values: Sequence[Any]) -> tuple[Any, ...]:
        row = self._db.execute(query, list(values)).fetchone()
        assert row is not None  # a query without GROUP BY has one row
        return tuple(row)

    def _dicts(self, query: str, values: Sequence[Any]) -> list[dict[str, Any]]:
        cursor = self._db.execute(query, list(values))
        names = [column[0] for column in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def _file_name(kind: str, step: int) -> str:
    name = kind.removeprefix(EVALUATION)
    return (
        f"{kind}/step_{step:06d}.parquet"
        if name == kind
        else f"{KINDS[0]}/{name}_{step:06d}.parquet"
    )


def _as_patterns(paths: Sequence[str]) -> list[str]:
    """Paths as DuckDB takes them, which would read the files of `a1` for those of `a[1]`."""
    return [re.sub(r"[*?\[]", r"[\g<0>]", path) for path in paths]


def _stamp(path: Path) -> tuple[int, int] | None:
    """A stamp that changes with a file; `None` if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def _by_columns(files: Sequence[Path]) -> list[tuple[list[str], tuple[str, ...]]]:
    """The files, grouped with their columns: earlier versions wrote fewer columns.

    A run writes its files in order, by one version after another. So if the first and the last one
    have the same columns, all have.
    """
    if not files:
        return []
    ends: dict[Literal["first", "last"], tuple[str, ...]] = {
        "first": tuple(pq.read_schema(files[0]).names),
        "last": tuple(pq.read_schema(files[-1]).names),
    }
    if ends["first"] == ends["last"]:
        return [([str(path) for path in files], ends["first"])]
    return [([str(path)], tuple(pq.read_schema(path).names)) for path in files]
