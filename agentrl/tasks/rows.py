"""Rows of files: JSON lines, Parquet, CSV and Arrow files, folders of these, and datasets of the Hugging Face hub.

Everything here streams: a row is read, checked and forgotten.
"""

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, time
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError

SUFFIXES = (".jsonl", ".parquet", ".csv", ".arrow")
"""The files that can be read. `.arrow` is what `Dataset.save_to_disk` writes."""
_SPLITS = ("train", "test", "validation", "valid", "dev", "eval")


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
"""Where rows come from: one file, or one split of a dataset of the hub."""


def is_data(text: str) -> bool:
    """Whether a text names data, and not a task source: a file, a folder, or a dataset `owner/name` of the hub."""
    return ":" not in text and ("/" in text or Path(text).suffix in SUFFIXES)


def sources(data: str, split: str, subset: str | None = None, revision: str | None = None) -> list[RowSource]:
    """The files of one split of `data`, in order of their names, or the dataset of the hub.

    In a folder these are the files in a folder of the split's name, or else those whose names begin with it. A folder
    without splits has the split "train" only.

    Raises:
        ConfigError: there is nothing that can be read.
    """
    path = Path(data).expanduser()
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise ConfigError(f"{data}: a file of tasks is one of {', '.join(SUFFIXES)}, by its name")
        return [path]
    if path.is_dir():
        return [*_in_folder(path, split)]
    if path.suffix in SUFFIXES or data.startswith((".", "/", "~")) or data.count("/") > 1:
        raise ConfigError(f"there is no file or folder {data!r}")
    return [HubDataset(data, subset, split, revision)]


def _in_folder(folder: Path, split: str) -> list[Path]:
    def files(where: Path) -> list[Path]:
        return sorted(path for path in where.glob("*") if path.suffix in SUFFIXES)

    there = files(folder)
    named = files(folder / split) or [path for path in there if _split_of(path) == split]
    if named:
        return named
    splits = {_split_of(path) for path in there} | {inner.name for inner in folder.glob("*/") if files(inner)}
    if there and split == "train" and splits == {None}:
        return there
    found = ", ".join(sorted(filter(None, splits))) or "no splits"
    raise ConfigError(f"{folder} has no files of the split {split!r}: it has {found}. Files are {', '.join(SUFFIXES)}")


def _split_of(path: Path) -> str | None:
    """The split that a file's name begins with: `train-00000-of-00002.parquet`."""
    first = path.name.split(".")[0].split("-")[0].split("_")[0]
    return first if first in _SPLITS else None


def rows_of(source: RowSource) -> Iterator[tuple[str, Mapping[str, Any] | BadRowError]]:
    """(where it stands, the row or what is wrong with it) of each row of a file that is not JSON lines.

    Raises:
        ConfigError: the source cannot be read at all.
    """
    if isinstance(source, HubDataset):
        yield from _of_hub(source)
    elif source.suffix == ".csv":
        yield from _of_csv(source)
    else:
        yield from _of_arrow(source)


def parse_line(line: bytes) -> Mapping[str, Any]:
    """The row of a line of JSON.

    Raises:
        BadRowError: it is no JSON object.
    """
    try:
        row = json.loads(line, parse_constant=_no_constant)
    except ValueError as error:  # text that is no UTF-8 too
        raise BadRowError(f"it is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise BadRowError(f'it is {type(row).__name__}, not an object: write {{"prompt": ..., "answer": ...}}')
    return row


def as_line(row: Mapping[str, Any]) -> bytes:
    """A row as a line of JSON.

    Raises:
        BadRowError: JSON has no such value.
    """
    try:
        return json.dumps(row, default=_in_json, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise BadRowError(str(error)) from error


def _no_constant(name: str) -> None:
    raise BadRowError(f"{name} is not a number of JSON")


def _in_json(value: Any) -> Any:
    if isinstance(value, date | time):
        return value.isoformat()
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot be in a task: leave the column out with `tasks.columns`")


def _of_csv(path: Path) -> Iterator[tuple[str, Mapping[str, Any] | BadRowError]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        for row in reader:
            where = f"line {reader.line_num}"
            if None in row or None in row.values():
                yield where, BadRowError(f"it has not as many fields as the head, {len(reader.fieldnames or ())}")
            else:
                yield where, row


def _of_arrow(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with path.open("rb") as file:
            parts = pq.ParquetFile(file).iter_batches(4096) if path.suffix == ".parquet" else pa.ipc.open_stream(file)
            for part in parts:
                for row in part.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{path} is no {path.suffix[1:]} file that can be read: {error}") from error


def _of_hub(source: HubDataset) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{source.name!r} is neither a file nor a folder, and datasets of the hub need the package datasets: "
            'pip install "agentrl[data]"'
        ) from error
    try:
        rows = datasets.load_dataset(source.name, source.subset, split=source.split, revision=source.revision)
    except Exception as error:  # of any of a dozen libraries: there is nothing to read, whatever it was
        raise ConfigError(f"the dataset {source} cannot be loaded: {type(error).__name__}: {error}") from error
    for number, row in enumerate(rows, 1):
        yield f"row {number}", row
