"""What a thread makes belongs to somebody, whenever its caller is cancelled."""

import asyncio
import threading
from pathlib import Path

import pytest

from agentrl.flow import made_in_thread


def cancelled_while_made(folder: Path, *, fails: bool = False) -> list[Path]:
    """Cancel the caller while a thread makes a folder. Returns what was undone."""
    begun, may_go_on, undone = threading.Event(), threading.Event(), list[Path]()

    def make() -> Path:
        begun.set()
        may_go_on.wait()
        if fails:
            raise OSError("it cannot be made")
        folder.mkdir()
        return folder

    def undo(made: Path) -> None:
        made.rmdir()
        undone.append(made)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            caller = group.create_task(made_in_thread(make, undo))
            await asyncio.to_thread(begun.wait)
            caller.cancel()
            await asyncio.wait({caller})
            assert caller.cancelled()  # it does not wait for the thread
            may_go_on.set()

    asyncio.run(main())
    return undone


def test_what_is_made_after_its_caller_was_cancelled_is_undone(tmp_path: Path) -> None:
    assert cancelled_while_made(tmp_path / "made") == [tmp_path / "made"]
    assert not (tmp_path / "made").exists()


def test_what_fails_after_its_caller_was_cancelled_is_not_undone(tmp_path: Path) -> None:
    assert cancelled_while_made(tmp_path / "made", fails=True) == []


def test_what_is_made_in_time_is_the_callers(tmp_path: Path) -> None:
    def refuse(made: object) -> None:
        raise AssertionError(made)

    def fail() -> None:
        raise OSError("it cannot be made")

    assert asyncio.run(made_in_thread(lambda: 7, refuse)) == 7
    with pytest.raises(OSError, match="cannot be made"):
        asyncio.run(made_in_thread(fail, refuse))
