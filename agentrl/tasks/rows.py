"""Rows of files: JSON, Parquet, CSV and Arrow files, folders of these, and datasets of the Hugging
Face hub.

Everything here streams: a row is read, checked and forgotten.
"""

import codecs
import csv
import io
import json
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast
from uuid import UUID

from pydantic_core import from_json

from agentrl import plugins
from agentrl.errors import ConfigError, ImageError
from agentrl.package.distribution import install_command
from agentrl.tokens.encoded_image import EncodedImage

if TYPE_CHECKING:
    import pyarrow as pa

_TEXTS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
_PACKED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
SUFFIXES = (*_TEXTS, ".parquet", ".arrow")
"""The files that can be read; texts may be compressed too (`.jsonl.gz`). `.arrow` is what
`Dataset.save_to_disk` writes."""
FILES = f"{', '.join(SUFFIXES)}, and texts compressed as {', '.join(_PACKED)}"
"""The same, for people."""
_NOT_ROWS = ("dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json")
"""Names of the files that the package datasets writes beside rows."""
_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
_OTHER_NAMES_OF_SPLITS = {"training": "train", "testing": "test", "evaluation": "eval"}
_TABLES = (
    "data",
    "rows",
    "examples",
    "instances",
    "items",
    "records",
    "samples",
    "questions",
    "problems",
    "tasks",
    *_SPLITS,
)
"""Under which names files of one object have their rows."""
_LFS_POINTER = b"version https://git-lfs"
_SEPARATOR = re.compile(r"sep=(.)\s*$")
_DELIMITERS = ",;\t|"
_QUOTED = re.compile(r'"[^"]*"?')
_KEY_END = re.compile(rb'"\s*:')
"""What ends each key of an object, and may stand in texts too."""
_SHARD = re.compile(r"-\d+-of-\d+$")
_BETWEEN_WORDS = re.compile(r"[-_ \d]+")
_OTHER_FILES = {
    ".xlsx": ": save the sheet as CSV",
    ".xls": ": save the sheet as CSV",
    ".txt": ": give it the ending of what is in it, such as .tsv for Excel's text with tabs",
    ".pkl": ": a pickle can run any code, so write its rows as JSON lines or Parquet",
}
"""Remedies for other common kinds of files."""
_BATCH_ROWS = 1024
"""Rows of a Parquet file that are read at once."""
_BLOCK_CHARACTERS = 1 << 16
"""Characters of an array that are read at once."""
_GAP = re.compile(r"[\s,]*")
_LONGEST_FIELD = 1 << 30
"""Characters in a field of a CSV file. The csv module's own limit is 131,072."""


class BadRowError(ValueError):
    """A row that cannot be a task. The text says why."""


@dataclass(frozen=True, slots=True)
class HubDataset:
    """A dataset of the hub, or of its local cache: what `datasets.load_dataset` takes."""

    name: str
    subset: str | None
    split: str
    revision: str | None

    def __str__(self) -> str:
        return f"{self.name} (split {self.split})"


RowSource = Path | HubDataset
"""A source of rows: one file, or one split of a dataset of the hub."""


def is_data(text: str) -> bool:
    """True if a text names data, and not a task source: a file, a folder, or a dataset `owner/name`
    of the hub.
    """
    path = Path(text)
    return ":" not in text and (
        "/" in text or kind_of(path) is not None or (bool(path.suffix) and path.is_file())
    )


def kind_of(path: Path) -> str | None:
    """The kind of a file, by the end of its name without that of a compression: one of `SUFFIXES`,
    or None.
    """
    packed = path.suffix.lower() in _PACKED
    kind = (Path(path.stem) if packed else path).suffix.lower()
    return kind if kind in (_TEXTS if packed else SUFFIXES) else None


def sources(
    data: str, split: str, subset: str | None = None, revision: str | None = None
) -> list[RowSource]:
    """The files of one split of `data`, in order of their names, or the dataset of the hub.

    In a folder these are the files in a folder of the split's name, or else those whose names, or
    parts of them between dots, begin or end with it. A folder without splits has the split "train"
    only.

    Raises:
        ConfigError: there is nothing that can be read.
    """
    found = _sources(data, split, subset, revision)
    for source in found:
        if not isinstance(source, Path):
            continue
        with source.open("rb") as file:
            is_pointer = file.read(len(_LFS_POINTER)) == _LFS_POINTER
        if is_pointer:
            raise ConfigError(
                f"{source} is a pointer of Git LFS, whose content was not fetched: run `git lfs"
                " pull`"
            )
    return found


def _sources(data: str, split: str, subset: str | None, revision: str | None) -> list[RowSource]:
    path = Path(data).expanduser()
    try:
        is_file = stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        is_file = False
    except OSError as error:  # the name is too long, which `Path.is_file` hides since Python 3.14
        raise ConfigError(f"there is no file or folder {data!r:.200}: {error.strerror}") from error
    if is_file:
        if kind_of(path) is None:
            other = _OTHER_FILES.get(path.suffix.lower(), "")
            raise ConfigError(f"{data}: a file of tasks is one of {FILES}, by its name{other}")
        return [path]
    if path.is_dir():
        return [*_files_of_split(path, split, subset)]
    if kind_of(path) or data.startswith((".", "/", "~")) or data.count("/") > 1:
        raise ConfigError(f"there is no file or folder {data!r}{_path_advice(data)}")
    return [HubDataset(data, subset, split, revision)]


def _path_advice(data: str) -> str:
    """What to write instead of a pattern, an address, or the name of no file."""
    if "://" in data:
        return ": an address is not read, so fetch it, and name the file"
    pattern = any(sign in data for sign in "*?[")
    if pattern:
        return ": a pattern is not read, so name the folder, whose files are"
    path = Path(data).expanduser()
    there = [one.name for one in path.parent.glob("[!.]*") if one.is_dir() or kind_of(one)]
    close = plugins.nearest(path.name, there)
    return f".{close}" if close else ""


def _files_of_split(folder: Path, split: str, subset: str | None) -> list[Path]:
    """The files of a split; in a copy of a dataset of the hub too, where they lie in `SUBSET/` or
    `data/`.
    """
    if subset is not None and (folder / subset).is_dir():
        folder /= subset
    there = _files(folder)
    inner = {path.name for path in folder.glob("[!.]*/") if _files(path)}
    # A copy of a dataset of the hub has its files in `data/`.
    if not there and split not in inner and (folder / "data").is_dir():
        return _files_of_split(folder / "data", split, None)
    named = _files(folder / split) or [path for path in there if split in _name_parts(path)]
    if named := named or [path for path in there if _split_of(path) == split]:
        return named
    splits = {_split_of(path) for path in there}
    # Files without any split in their names are for training.
    if there and split == "train" and splits == {None}:
        return there
    if not there and inner.isdisjoint(_SPLITS) and inner:
        listed = ", ".join(sorted(inner))
        raise ConfigError(
            f"{folder} has its files in {listed}: name one of these, as {folder / min(inner)}"
        )
    found = ", ".join(sorted({*filter(None, splits), *inner})) or "no splits"
    raise ConfigError(
        f"{folder} has no files of the split {split!r}: it has {found}. Files are {FILES}"
    )


def _files(folder: Path) -> list[Path]:
    """The files of rows right in a folder, without hidden ones and what the package datasets left
    beside its own.
    """
    saved = _saved_files(folder / "state.json")
    return sorted(
        path
        for path in folder.glob("[!.]*")
        if path.is_file()
        and kind_of(path)
        and path.name not in _NOT_ROWS
        and (saved is None or path.name in saved)
    )


def _saved_files(state: Path) -> set[str] | None:
    """The names of a saved dataset's own files; None if no dataset was saved there: other programs
    write files of this name too.
    """
    if not state.is_file():
        return None
    try:
        return {one["filename"] for one in json.loads(state.read_bytes())["_data_files"]}
    except (ValueError, LookupError, TypeError):
        return None


def _name_parts(path: Path) -> list[str]:
    """The parts of a file's name between dots, without what the hub adds: `train_sft` and `parquet`
    of `train_sft-00000-of-00003.parquet`.
    """
    return [_SHARD.sub("", part) for part in path.name.split(".")]


def _split_of(path: Path) -> str | None:
    """The split that a part of a file's name begins or ends with: `train-00000-of-00002.parquet`,
    `gsm8k_test.jsonl`, `math.test.v1.jsonl`.
    """
    for part in _name_parts(path):
        words = [word for word in _BETWEEN_WORDS.split(part.casefold()) if word]
        for word in (*words[:1], *words[-1:]):
            named = _OTHER_NAMES_OF_SPLITS.get(word, word)
            if named in _SPLITS:
                return named
    return None


def rows_of(
    source: RowSource, columns: Collection[str] = ()
) -> Iterator[tuple[str, Mapping[str, Any] | BadRowError]]:
    """(where it stands, the row or what is wrong with it) of each row of a file that is not plain
    JSON lines.

    `columns`: of these only, where a dot goes into a column; by default of all, and where one of
    them is missing.

    Raises:
        ConfigError: the source cannot be read, or not to its end.
    """
    reader = _read_hub(source) if isinstance(source, HubDataset) else _read_file(source, columns)
    for where, row in reader:
        wanted = None if isinstance(row, BadRowError) else _names_with(columns, row)
        if isinstance(row, BadRowError) or wanted is None:
            yield where, row
        else:
            yield where, {name: value for name, value in row.items() if name in wanted}


def _names_with(columns: Collection[str], names: Collection[str]) -> set[str] | None:
    """The names, of those there are, that the columns are in; None for all, if no columns are
    chosen or one is missing.
    """
    found = {column: column if column in names else column.partition(".")[0] for column in columns}
    return {*found.values()} if columns and all(name in names for name in found.values()) else None


def _read_file(
    path: Path, columns: Collection[str]
) -> Iterator[tuple[str, Mapping[str, Any] | BadRowError]]:
    import pyarrow as pa

    where = "its beginning"
    reader: Iterator[tuple[str, Mapping[str, Any] | BadRowError]]
    try:
        match kind_of(path):
            case ".parquet" | ".arrow":
                reader = _read_arrow(path, columns)
            case ".csv" | ".tsv":
                reader = _read_csv(path)
            case _:
                reader = _read_json(path)
        for where, row in reader:
            yield where, row
    except (pa.ArrowException, OSError, csv.Error, ValueError, OverflowError) as error:
        # OverflowError comes of dates that Python does not have.
        raise ConfigError(f"{path} cannot be read further than {where}: {error}") from error


def parse_line(line: bytes) -> Mapping[str, Any]:
    """The row of a line of JSON.

    Raises:
        BadRowError: it is no JSON object.
    """
    try:
        row = from_json(line.removeprefix(codecs.BOM_UTF8), allow_inf_nan=False)
    except ValueError as error:
        # Also of text that is no UTF-8, and of halves of surrogate pairs, which no tokenizer takes.
        raise BadRowError(f"it is not JSON: {_explain_json_error(line, error)}") from error
    return _check_object(row)


def parse_new_line(line: bytes) -> Mapping[str, Any]:
    """The row of a line that is read for the first time.

    Raises:
        BadRowError: it is no JSON object, or names a key twice.
    """
    row = parse_line(line)
    # The fast parser keeps the last of equal keys in silence. The slow one, which refuses them, is
    # needed only where the line has more `":` than the row has keys: a text may look like a key.
    if len(_KEY_END.findall(line)) > _count_keys(row):
        json.loads(line.removeprefix(codecs.BOM_UTF8), object_pairs_hook=_unique_keys)
    return row


def _count_keys(value: Any) -> int:
    if type(value) is dict:
        return len(value) + sum(map(_count_keys, value.values()))
    return sum(map(_count_keys, value)) if type(value) is list else 0


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object with these keys and values.

    Raises:
        BadRowError: a key is there twice. Readers of JSON take the last, in silence.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRowError(f"it has the key {twice!r} twice: leave one of them out")
    return found


def _explain_json_error(line: bytes, error: ValueError) -> str:
    """The reason why a line is not JSON, and the remedy for what programs write often."""
    try:
        json.loads(line, parse_constant=_refuse_constant)
    except BadRowError as constant:
        return str(constant)
    except (ValueError, RecursionError):
        pass
    said = str(error).replace("at line 1 column", "at character")
    comma = line.rstrip().endswith((b"},", b"],"))
    return f"{said}. A line has no comma at its end" if comma else said


def _check_object(row: Any) -> Mapping[str, Any]:
    if not isinstance(row, dict):
        raise BadRowError(
            f'it is a {type(row).__name__}, not an object: write {{"prompt": ..., "answer": ...}}'
        )
    return row


def as_line(row: Mapping[str, Any]) -> bytes:
    """A row as a line of JSON.

    Raises:
        BadRowError: JSON has no such value. Names the column.
    """
    try:
        return _dump_row(row) + b"\n"
    except (TypeError, ValueError):
        for name, value in row.items():
            try:
                _dump_row({name: value})
            except UnicodeEncodeError as error:
                raise BadRowError(
                    f"column {name!a} has text that is not UTF-8: save the file in UTF-8"
                ) from error
            except ValueError as error:
                raise BadRowError(
                    f"column {name!r}: it is NaN or infinite, which is no number of JSON: write"
                    " null instead"
                ) from error
            except TypeError as error:
                raise BadRowError(f"column {name!r}: {error}") from error
        raise


def _dump_row(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, default=_json_default, ensure_ascii=False, allow_nan=False).encode()


def _refuse_constant(name: str) -> None:
    raise BadRowError(f"{name} is not a number of JSON: write null instead")


def _json_default(value: Any) -> Any:
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal | UUID):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    wrong = ""
    try:
        if (picture := _picture(value)) is not None:
            return picture.address
    except ImageError as error:
        wrong = f"as a picture, {error}; "
    raise TypeError(
        f"{type(value).__name__} is no value of JSON: {wrong}name the columns that are needed,"
        " without this one, in tasks.columns"
    )


def _picture(value: Any) -> EncodedImage | None:
    """The picture that a value is: the bytes of a file, or what the package datasets makes of
    them.

    Raises:
        ImageError: the bytes are no picture that is taken.
    """
    if type(value).__module__.startswith("PIL."):
        file = io.BytesIO()
        try:
            value.save(file, "png")
        except (OSError, ValueError) as error:  # in colours that PNG does not have, such as CMYK
            raise ImageError(f"it cannot be written as PNG: {error}") from error
        value = file.getvalue()
    return EncodedImage(value) if isinstance(value, bytes) else None


@contextmanager
def _open_unpacked(path: Path) -> Iterator[io.BufferedReader]:
    import pyarrow as pa

    with pa.input_stream(str(path), compression=_PACKED.get(path.suffix.lower())) as stream:
        yield io.BufferedReader(cast(io.RawIOBase, stream), 1 << 16)


def is_lines(path: Path) -> bool:
    """True if a file has an object on each line in UTF-8, by its name and its first bytes."""
    if path.suffix.lower() not in (".jsonl", ".ndjson"):
        return False
    with path.open("rb") as file:
        first = file.read(1 << 12)
    return _encoding(first) == "utf-8-sig" and not first.removeprefix(
        codecs.BOM_UTF8
    ).lstrip().startswith(b"[")


def _encoding(first: bytes) -> str:
    """The encoding of a text with these first bytes: UTF-8 or UTF-16 (Excel, Windows), with a mark
    or without.
    """
    if first[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "utf-16"
    if first[:1] and b"\0" in first[:2]:  # the first character is one of ASCII
        return "utf-16-be" if first[:1] == b"\0" else "utf-16-le"
    return "utf-8-sig"


@contextmanager
def _text_of(path: Path, newline: str) -> Iterator[io.TextIOWrapper]:
    with (
        _open_unpacked(path) as file,
        io.TextIOWrapper(file, _encoding(file.peek(2)), "surrogateescape", newline) as text,
    ):
        yield text


def _read_json(path: Path) -> Iterator[tuple[str, Mapping[str, Any] | BadRowError]]:
    """The rows of an array of objects, of an object with one list of them, or of JSON lines, by how
    the file begins.
    """
    with _text_of(path, "\n") as file:
        head = _read_head(file)
        if "".join(head).lstrip().startswith("["):
            for number, (line, value) in enumerate(_read_array(_Rejoined(head, file)), 1):
                yield f"row {number} (line {line})", read_or_error(_check_object, value)
            return
        whole = _rows_of_object(head, file) if kind_of(path) == ".json" else None
        for number, row in enumerate(whole or (), 1):
            yield f"row {number}", read_or_error(_check_object, row)
        for number, text in enumerate(() if whole else chain(head, file), 1):
            if text.strip():
                yield (
                    f"line {number}",
                    read_or_error(parse_new_line, text.encode("utf-8", "surrogateescape")),
                )


def _read_head(file: io.TextIOBase) -> list[str]:
    """The lines of a file up to the second one that is not empty."""
    head: list[str] = []
    while sum(map(bool, map(str.strip, head))) < 2 and (line := file.readline()):
        head.append(line)
    return head


class _Rejoined(io.TextIOBase):
    """A text of which the first lines have been read."""

    def __init__(self, head: Sequence[str], rest: io.TextIOBase) -> None:
        self._head, self._rest = "".join(head), rest

    def read(self, size: int | None = -1, /) -> str:
        """The first lines, and later what follows them."""
        head, self._head = self._head, ""
        return head or self._rest.read(size)


def _rows_of_object(head: list[str], rest: io.TextIOBase) -> list[Any] | None:
    """The rows of a file that is one object: those in its only list of objects, or the object. None
    for JSON lines.

    What of the file has been read for it is appended to `head`.

    Raises:
        ValueError: it has several such lists, or columns instead of rows.
    """
    written = [line for line in head if line.strip()]
    if len(written) == 2 and _parse_json(written[0]) is not None:
        return None
    head.append(rest.read())
    value = _parse_json("".join(head))
    if not isinstance(value, dict):
        head[:] = "".join(head).splitlines(keepends=True)
        return None
    tables = [
        name
        for name, inner in value.items()
        if _is_table(inner) and (name in _TABLES or len(value) == 1)
    ]
    if len(tables) > 1:
        raise ValueError(
            f"it is one object with lists under {', '.join(tables)}: write a file for each of them"
        )
    if (
        not tables
        and len(value) > 1
        and all(isinstance(inner, list | dict) for inner in value.values())
    ):
        raise ValueError(
            f"it is one object of columns ({', '.join(value)}): write rows instead, as pandas does"
            ' with to_json(path, orient="records", lines=True)'
        )
    return list(value[tables[0]]) if tables else [value]


def _is_table(value: Any) -> bool:
    """True if this is a list of objects, and no chat."""
    return isinstance(value, list) and all(
        isinstance(one, dict) and not {"role", "from"} & one.keys() for one in value
    )


def _parse_json(text: str) -> Any:
    """The value of a text in JSON; None if it is none.

    Raises:
        BadRowError: it has numbers that JSON does not have, or a key twice.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
    except (json.JSONDecodeError, RecursionError):
        return None


def read_or_error(
    read: Callable[[Any], Mapping[str, Any]], value: Any
) -> Mapping[str, Any] | BadRowError:
    """The row that `read` makes of a value, or the reason why it is none."""
    try:
        return read(value)
    except BadRowError as error:
        return error


def _read_array(file: io.TextIOBase) -> Iterator[tuple[int, Any]]:
    """(line, value) of each value in an array of JSON, of which only a part is held.

    Raises:
        ValueError: a value is no JSON, or the array has no end, or something follows that.
    """
    decode = json.JSONDecoder(
        parse_constant=_refuse_constant, object_pairs_hook=_unique_keys
    ).raw_decode
    text, line, block = file.read(_BLOCK_CHARACTERS), 1, _BLOCK_CHARACTERS
    place = text.index("[") + 1
    while True:
        gap = _GAP.match(text, place)
        assert gap is not None  # it may be empty
        begin = gap.end()
        if text.startswith("]", begin):
            rest = text[begin + 1 :].strip()
            while not rest and (more := file.read(_BLOCK_CHARACTERS)):
                rest = more.strip()
            if rest:
                raise ValueError(
                    f"something follows the end of the array: {rest!r:.40}. Write all rows in one"
                    " array, or each on a line of its own"
                )
            return
        problem = "it ends there"
        try:
            value, end = decode(text, begin)
        except BadRowError:
            raise
        except (ValueError, RecursionError) as error:
            value, end, problem = None, len(text), str(error)
        # A value at the very end of the text may go on: 12 may be the beginning of 123.
        if end < len(text):
            yield line + text.count("\n", place, begin), value
            line, place, block = line + text.count("\n", place, end), end, _BLOCK_CHARACTERS
        elif more := file.read(block):
            # Each try parses the value from its start, so the next block is twice as long: a long
            # value takes few tries.
            text, place, block = text[place:] + more, 0, 2 * block
        else:
            raise ValueError(f"what follows is not JSON, or the array is not closed: {problem}")


def _read_csv(path: Path) -> Iterator[tuple[str, Mapping[str, Any] | BadRowError]]:
    """The rows of a file whose fields are separated by what its head has most of: commas,
    semicolons, tabs or bars. Lines without any field, as Excel writes them, are no rows.
    """
    usual = csv.field_size_limit(_LONGEST_FIELD)
    try:
        with _text_of(path, "") as file:
            first, begin = _first_line(file)
            if said := _SEPARATOR.match(first):  # for Excel
                first, more = _first_line(file)
                begin += more
            delimiter = said[1] if said else _delimiter(first)
            reader = csv.reader(chain([first], file), delimiter=delimiter, strict=True)
            head = [name.strip() for name in next(reader, [])]
            _check_unique([name for name in head if name])
            offset = begin - 1
            begin += reader.line_num
            for fields in reader:
                where, begin = f"line {begin}", reader.line_num + 1 + offset
                if any(fields):
                    yield where, read_or_error(lambda given: _name_fields(head, given), fields)
    finally:
        csv.field_size_limit(usual)


def _first_line(file: io.TextIOBase) -> tuple[str, int]:
    """The next line that is not empty, or "" at the end, and how many have been read for it."""
    read = 1
    while (line := file.readline()) and not line.strip():
        read += 1
    return line, read


def _delimiter(head: str) -> str:
    """What separates the fields of a head: a name in quotes may have something else in it."""
    bare = _QUOTED.sub("", head)
    return max(_DELIMITERS, key=lambda sign: (bare.count(sign), head.count(sign)))


def _name_fields(head: Sequence[str], fields: Sequence[str]) -> Mapping[str, Any]:
    """The fields by their names in the head. Those without a name and a value, which Excel writes
    beside a table, are left out.

    Raises:
        BadRowError: there are more or fewer than names, or several without one.
    """
    if len(fields) != len(head):
        raise BadRowError(f"it has {len(fields)} fields, and the head has {len(head)}")
    unnamed = [field for name, field in zip(head, fields, strict=True) if field and not name]
    if len(unnamed) > 1:
        raise BadRowError(
            f"{unnamed[0]!r:.40} and {unnamed[1]!r:.40} are in columns without a name: name these"
            " in the head"
        )
    return {name: field for name, field in zip(head, fields, strict=True) if name or field}


def _read_arrow(path: Path, columns: Collection[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    number = 0
    with path.open("rb") as file:
        batches = (
            _parquet_batches(file, columns) if kind_of(path) == ".parquet" else _ipc_batches(file)
        )
        for batch in batches:
            _check_unique(batch.schema.names)
            mapped = [field for field in batch.schema if _has_map(field.type)]
            for row in batch.to_pylist():
                number += 1
                row |= {
                    field.name: _maps_to_objects(row[field.name], field.type) for field in mapped
                }
                yield f"row {number}", row


def _has_map(kind: "pa.DataType") -> bool:
    """True if values of a type have a map in them."""
    inner = (kind.field(number).type for number in range(kind.num_fields))
    return type(kind).__name__ == "MapType" or any(map(_has_map, inner))


def _maps_to_objects(value: Any, kind: "pa.DataType") -> Any:
    """A value with its maps as objects: Arrow makes lists of pairs of them.

    Raises:
        ValueError: a map has a key twice.
    """
    import pyarrow as pa

    if value is None or not _has_map(kind):
        return value
    if pa.types.is_map(kind):
        return _unique_keys([(key, _maps_to_objects(one, kind.item_type)) for key, one in value])
    if pa.types.is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        return {one.name: _maps_to_objects(value[one.name], one.type) for one in fields}
    return [_maps_to_objects(one, kind.value_type) for one in value]


def _parquet_batches(file: BinaryIO, columns: Collection[str]) -> "Iterator[pa.RecordBatch]":
    import pyarrow.parquet as pq

    data = pq.ParquetFile(file)
    wanted = _names_with(columns, data.schema_arrow.names)
    yield from data.iter_batches(_BATCH_ROWS, columns=None if wanted is None else [*wanted])


def _ipc_batches(file: BinaryIO) -> "Iterator[pa.RecordBatch]":
    """The parts of a file of Arrow's format for streams, or for files (Feather)."""
    import pyarrow as pa

    magic = file.read(6)
    file.seek(0)
    if magic != b"ARROW1":
        yield from pa.ipc.open_stream(file)
        return
    data = pa.ipc.open_file(file)
    for number in range(data.num_record_batches):
        yield data.get_batch(number)


def _check_unique(names: Sequence[str]) -> Sequence[str]:
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two columns are called {twice[0]!r}")
    return names


def _read_hub(source: HubDataset) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{source.name!r} is neither a file nor a folder, and datasets of the hub need the"
            f" package datasets: {install_command('data')}"
        ) from error
    try:
        rows = datasets.load_dataset(
            source.name, source.subset, split=source.split, revision=source.revision
        )
    except Exception as error:  # of any of a dozen libraries; none of them leaves rows to read
        raise ConfigError(
            f"{source.name!r} is no file or folder here, and as a dataset of the hub it cannot be"
            f" loaded (split {source.split}): {type(error).__name__}: {error}"
        ) from error
    for number, row in enumerate(rows, 1):
        yield f"row {number}", row
