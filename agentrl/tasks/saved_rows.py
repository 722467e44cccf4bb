"""The rows of the episodes that a run or a gateway has saved, as they stand in the files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.errors import StorageError

_COLUMNS = [
    *("id", "agent", "task", "env", "seed", "options", "status", "detail", "success", "score"),
    *("messages", "turns"),
]
"""Earlier versions wrote no `options`."""


def saved_rows(folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a folder's steps, each with its step. Episodes of evaluations, which lie beside
    them, are left out.

    Raises:
        StorageError: a file is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    for file in sorted(folder.glob("step_*.parquet")):
        step = int(file.stem.removeprefix("step_"))
        try:
            with pq.ParquetFile(file) as opened:
                for batch in opened.iter_batches(columns=_COLUMNS):
                    yield from ((step, row) for row in batch.to_pylist())
        except (pa.ArrowException, OSError) as error:
            raise StorageError(
                f"{file} cannot be read ({error}): restore it from a copy, or remove it, and lose"
                " its episodes"
            ) from error
