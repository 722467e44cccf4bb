"""Rows of saved episodes: a damaged file is one sentence."""

from pathlib import Path

import pytest

from agentrl.errors import StorageError
from agentrl.tasks.saved_rows import saved_rows


@pytest.mark.parametrize("content", [b"", b"PAR1 and no more", None])
def test_a_damaged_file_of_episodes_is_named_with_what_to_do(
    tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "step_000003.parquet"
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    with pytest.raises(StorageError, match=r"step_000003.parquet cannot be read .*: restore it"):
        list(saved_rows(tmp_path))
