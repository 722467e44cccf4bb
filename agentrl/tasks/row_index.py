"""`RowIndex`: where each row of a file begins, found once and remembered in the cache folder.

CACHE/datasets/HASH OF PATH AND CHECKS/HASH OF SIZE AND TIME/
  index.json       the file's size, time and digest; the number of rows
  offsets.u64      where each row begins, in bytes
  keys.u64         a hash of what tells each row from others
  rows.jsonl       the rows themselves, where the source is no file of JSON lines
  good-HASH        all rows have passed one more check, such as that of a reward

The rows of a file of JSON lines stay where they are. Those of other sources are copied once,
because in them no row can be found without reading others. The folder can be deleted at any time.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import numpy as np
import numpy.typing as npt
import xxhash

from agentrl.errors import ConfigError
from agentrl.files.caches import cache_folder
from agentrl.files.durable import (
    finish_folder,
    new_unfinished,
    none_unfinished,
    remove_folder,
)
from agentrl.files.file_lock import locked
from agentrl.tasks.rows import (
    BadRowError,
    RowSource,
    as_line,
    is_lines,
    parse_line,
    parse_new_line,
    read_or_error,
    rows_of,
)

U64 = npt.NDArray[np.uint64]
Check = Callable[[Mapping[str, Any]], str]
"""Returns the text that tells a row's task from others. Raises `BadRowError`, if the row cannot be
a task.
"""
_INDEX_VERSION = 4
_MAX_SHOWN_KINDS = 10
"""Kinds of bad rows that an error names."""
_VARYING = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")
"""The differences between messages about rows that are bad for one reason: texts in quotes, and
numbers."""
_BUFFERED_NUMBERS = 1 << 16


@dataclass(frozen=True, slots=True)
class _IndexData:
    """The content of `index.json`. `digest`: XXH3-128 of the rows' bytes."""

    size: int
    mtime_ns: int
    digest: str
    rows: int


@dataclass(frozen=True)
class RowIndex:
    """The rows of one source, of which none is held in memory."""

    source: RowSource
    folder: Path
    digest: str
    size: int
    """The number of rows."""
    _file: tuple[int, int]  # size and time of the file that has the rows

    @cached_property
    def rows_path(self) -> Path:
        """The file of JSON lines that has the rows."""
        copy = self.folder / "rows.jsonl"
        return copy if copy.exists() or not isinstance(self.source, Path) else self.source

    @cached_property
    def offsets(self) -> U64:
        """The start of each row, in bytes."""
        return _map_numbers(self.folder / "offsets.u64", self.size)

    @cached_property
    def keys(self) -> U64:
        """A hash for each row: rows with equal ones are the same task."""
        return _map_numbers(self.folder / "keys.u64", self.size)

    @property
    def pictures(self) -> Path | None:
        """The folder of the files that rows name, if the source is a file."""
        return folder_of(self.source)

    def row(self, number: int) -> Mapping[str, Any]:
        """The row with this number, from 0.

        Raises:
            ConfigError: the file has changed since it was opened.
        """
        try:
            with self.rows_path.open("rb") as file:
                if _size_and_time(self.rows_path) != self._file:
                    raise BadRowError("it has another size or time")
                file.seek(int(self.offsets[number]))
                return parse_line(file.readline())
        except (OSError, BadRowError) as error:
            raise ConfigError(
                f"{self.rows_path} has changed while its tasks were in use ({error}): put it back,"
                " and resume the run"
            ) from error

    def check(self, check: Callable[[int, Mapping[str, Any]], None], checked_as: str) -> None:
        """Check all rows, with their numbers from 1, once more; what was found good is remembered
        under `checked_as`.

        Raises:
            ConfigError: `check` raised it for some rows; names the first of them.
        """
        good = self.folder / f"good-{_hash(checked_as)}"
        if good.exists():
            return
        kind = "line" if self.rows_path == self.source else "row"
        bad = _BadRows(self.source)
        with self.rows_path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    try:
                        check(number, parse_line(line))
                    except ConfigError as error:
                        bad.add(f"{kind} {number}", error)
        bad.refuse(self.size)
        with suppress(OSError):  # the folder may be read-only
            good.touch()

    def where(self, number: int) -> str:
        """The place of a row, for messages: `data.jsonl, line 17`."""
        if self.rows_path != self.source:
            return f"{self.source}, row {number + 1}"
        before, left = 0, int(self.offsets[number])
        with self.rows_path.open("rb") as file:
            while left and (block := file.read(min(left, 1 << 20))):
                before, left = before + block.count(b"\n"), left - len(block)
        return f"{self.source}, line {before + 1}"


def folder_of(source: RowSource) -> Path | None:
    """The folder that a source is in, if it is a file."""
    return source.parent if isinstance(source, Path) else None


def open_index(
    source: RowSource, check: Check, checked_as: str, columns: Collection[str] = ()
) -> RowIndex:
    """The index of a source, made now unless it is remembered.

    `checked_as` names what `check` depends on: rows that were checked in another way are checked
    again. `columns`: what `check` needs of a row that is copied, by default all.

    Raises:
        ConfigError: the source cannot be read, changes while it is read, or has bad rows, of which
            the first are named; or the cache folder cannot be written.
    """
    stamp = _size_and_time(source) if isinstance(source, Path) else (0, 0)
    place = str(source.resolve()) if isinstance(source, Path) else json.dumps(asdict(source))
    of_source = cache_folder() / "datasets" / _hash(place, checked_as)
    final = of_source / _hash(stamp)
    found = _load(source, final)
    if found is None:
        try:
            with _lock_folder(of_source):
                found = _load(source, final) or _make_folder(source, check, columns, final, stamp)
        except OSError as error:
            raise ConfigError(
                f"{source} cannot be indexed in the cache folder {of_source}: {error}."
                " XDG_CACHE_HOME names another one"
            ) from error
    index = RowIndex(source, final, found.digest, found.rows, stamp)
    return replace(index, _file=_size_and_time(index.rows_path))


def _load(source: RowSource, folder: Path) -> _IndexData | None:
    """The content of a remembered index; None if it is missing or incomplete: programs that clean
    caches delete single files.
    """
    try:
        found = _IndexData(**json.loads((folder / "index.json").read_bytes()))
        sizes = {(folder / name).stat().st_size for name in ("offsets.u64", "keys.u64")}
        if sizes != {8 * found.rows}:
            return None
        rows = source if _is_lines(source) else folder / "rows.jsonl"
        last = int(_map_numbers(folder / "offsets.u64", found.rows)[-1]) if found.rows else -1
        return found if last < rows.stat().st_size else None
    except (OSError, ValueError, TypeError):
        return None


def _make_folder(
    source: RowSource, check: Check, columns: Collection[str], final: Path, stamp: tuple[int, int]
) -> _IndexData:
    """Make the folder of an index."""
    for outdated in [path for path in final.parent.glob("[!.]*") if path.is_dir()]:
        remove_folder(outdated)
    with none_unfinished(final):
        folder = new_unfinished(final)
        folder.mkdir(parents=True)
        found = _build(source, check, columns, folder, stamp)
        if isinstance(source, Path) and _size_and_time(source) != stamp:
            raise ConfigError(
                f"{source} has changed while it was read: start again when it is written"
            )
        (folder / "index.json").write_text(json.dumps(asdict(found)))
        finish_folder(final)
    return found


def _build(
    source: RowSource, check: Check, columns: Collection[str], folder: Path, stamp: tuple[int, int]
) -> _IndexData:
    digest = xxhash.xxh3_128()
    rows, bad = 0, _BadRows(source)
    with _Numbers(folder / "offsets.u64") as offsets, _Numbers(folder / "keys.u64") as keys:
        for where, offset, read in _read(source, columns, folder, digest.update):
            try:
                if isinstance(read, BadRowError):
                    raise read
                key = check(read)
            except BadRowError as error:
                bad.add(where, error)
                continue
            offsets.append(offset)
            keys.append(xxhash.xxh3_64_intdigest(key.encode()))
            rows += 1
    bad.refuse(rows + bad.count)
    return _IndexData(*stamp, digest.hexdigest(), rows)


def _read(
    source: RowSource, columns: Collection[str], folder: Path, seen: Callable[[bytes], None]
) -> Iterator[tuple[str, int, Mapping[str, Any] | BadRowError]]:
    """(where, offset in the file of JSON lines, row) of each row. Copies the rows, if they are not
    in such a file.
    """
    if _is_lines(source):
        with source.open("rb") as file:
            offset = 0
            for number, line in enumerate(file, 1):
                seen(line)
                if not line.isspace():
                    yield f"line {number}", offset, read_or_error(parse_new_line, line)
                offset += len(line)
        return
    with (folder / "rows.jsonl").open("wb") as copy:
        for where, row in rows_of(source, columns):
            offset = copy.tell()
            if isinstance(row, BadRowError):
                yield where, offset, row
                continue
            try:
                line = as_line(row)
            except BadRowError as error:
                yield where, offset, error
                continue
            seen(line)
            copy.write(line)
            yield where, offset, parse_line(line)


@dataclass(slots=True)
class _BadRows:
    """The rows of a source that cannot be tasks: how many, and what is wrong with the first of each
    kind.
    """

    source: RowSource
    count: int = 0
    _first: dict[str, str] = field(default_factory=dict)
    _alike: Counter[str] = field(default_factory=Counter)

    def add(self, where: str, error: Exception) -> None:
        self.count += 1
        kind = _VARYING.sub("", str(error))  # without what is this row's own
        if kind in self._first or len(self._first) < _MAX_SHOWN_KINDS:
            self._first.setdefault(kind, f"{self.source}, {where}: {error}")
            self._alike[kind] += 1

    def refuse(self, rows: int) -> None:
        """Raise a `ConfigError` if there are any, of so many rows."""
        if not self.count:
            return
        lines = [
            (
                f"{first} (and {self._alike[kind] - 1:,} more like it)"
                if self._alike[kind] > 1
                else first
            )
            for kind, first in self._first.items()
        ]
        left = self.count - self._alike.total()
        more = [f"and {left:,} more"] if left else []
        # If all are bad for one reason, the fault is in the file or the settings, and not in a row.
        if len(self._first) == 1 and self.count == rows:
            none = (
                f"none of the {rows:,} rows can be a task"
                if rows > 1
                else "the only row cannot be a task"
            )
            raise ConfigError(f"{none}: {next(iter(self._first.values()))}")
        raise ConfigError(
            "\n".join((f"{self.count:,} of {rows:,} rows cannot be tasks:", *lines, *more))
        )


class _Numbers:
    """Appends 64-bit numbers to a file, many at once."""

    def __init__(self, path: Path) -> None:
        self._path, self._waiting = path, list[int]()
        self._file: BinaryIO

    def __enter__(self) -> "_Numbers":
        self._file = self._path.open("wb")
        return self

    def __exit__(self, *exc: object) -> None:
        self._write()
        self._file.close()

    def append(self, number: int) -> None:
        self._waiting.append(number)
        if len(self._waiting) == _BUFFERED_NUMBERS:
            self._write()

    def _write(self) -> None:
        self._file.write(np.array(self._waiting, "<u8").tobytes())
        self._waiting = []


def _is_lines(source: RowSource) -> TypeGuard[Path]:
    """True if a source is a file of JSON lines, whose rows stay where they are."""
    return isinstance(source, Path) and is_lines(source)


def _map_numbers(path: Path, count: int) -> U64:
    if not count:  # an empty file cannot be mapped
        return np.zeros(0, np.uint64)
    return np.memmap(path, "<u8", mode="r", shape=(count,))


def _size_and_time(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _hash(*parts: object) -> str:
    return hashlib.sha256(json.dumps([_INDEX_VERSION, *parts]).encode()).hexdigest()[:16]


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Only one process indexes a source at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "lock"):
        yield
