"""The rows of the episodes that a run or a gateway has saved, as they stand in the files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

_COLUMNS = [
    *("id", "agent", "task", "env", "seed", "options", "status", "detail", "success", "score"),
    *("messages", "turns"),
]
"""Earlier versions wrote no `options`."""


def saved_rows(folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a folder's steps, each with its step. Episodes of evaluations, which lie beside
    them, are left out.
    """
    import pyarrow.parquet as pq

    for file in sorted(folder.glob("step_*.parquet")):
        step = int(file.stem.removeprefix("step_"))
        with pq.ParquetFile(file) as opened:
            for batch in opened.iter_batches(columns=_COLUMNS):
                yield from ((step, row) for row in batch.to_pylist())
