"""Requests for engines, by files in the folder of a run."""

from pathlib import Path

import pytest

from agentrl.runs.engine_requests import (
    FOLDER,
    AskedRun,
    EngineAnswer,
    EngineChange,
    EngineRequest,
    EngineRequests,
    read_changes,
)

TWO = EngineRequest(change="add", count=2)


def test_a_request_is_taken_once_and_its_answer_is_read_once(tmp_path: Path) -> None:
    run, asked = EngineRequests(tmp_path), AskedRun(tmp_path, TWO)
    assert asked.answer() is None
    assert not asked.is_taken
    ((name, request),) = run.take()
    assert request == TWO
    assert asked.is_taken
    assert not run.take()
    run.answer(name, EngineAnswer(text="engine 1 was added", done=True))
    assert asked.answer() == EngineAnswer(text="engine 1 was added", done=True)
    assert not list((tmp_path / FOLDER).iterdir())


def test_requests_that_come_together_are_all_taken_the_oldest_first(tmp_path: Path) -> None:
    wanted = [EngineRequest(change="remove", count=count) for count in (3, 1, 2)]
    for request in wanted:
        AskedRun(tmp_path, request)
    assert [request for _, request in EngineRequests(tmp_path).take()] == wanted


def test_a_request_can_be_taken_back_until_the_run_works_on_it(tmp_path: Path) -> None:
    run, early, late = EngineRequests(tmp_path), AskedRun(tmp_path, TWO), AskedRun(tmp_path, TWO)
    assert early.withdraw()
    assert len(run.take()) == 1
    assert not late.withdraw()


def test_what_was_asked_of_an_earlier_launch_is_forgotten_and_changes_are_kept(
    tmp_path: Path,
) -> None:
    run = EngineRequests(tmp_path)
    change = EngineChange("2026-11-26T14:43:14+00:00", 28, "lost", 2, 0.0, 3, "it is gone")
    run.record(change)
    AskedRun(tmp_path, TWO)
    run.clear()
    assert not run.take()
    assert read_changes(tmp_path) == [change]
    assert str(change) == "engine 2 was lost (it is gone); 3 serve"


def test_a_change_that_a_full_disk_has_cut_off_costs_no_other_one(tmp_path: Path) -> None:
    run = EngineRequests(tmp_path)
    changes = [
        EngineChange("2026-11-26T14:43:14+00:00", step, "added", step, 1.0, 2) for step in range(3)
    ]
    run.record(changes[0])
    run.record(changes[1])
    file = tmp_path / FOLDER / "changes.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    run.record(changes[2])
    assert read_changes(tmp_path) == [changes[0], changes[2]]


def test_a_request_that_cannot_be_read_is_answered_with_the_reason(tmp_path: Path) -> None:
    asked = AskedRun(tmp_path, TWO)
    (path,) = (tmp_path / FOLDER).iterdir()
    path.write_text('{"change": "add", "count": 0}')
    assert not EngineRequests(tmp_path).take()
    answer = asked.answer()
    assert answer is not None
    assert not answer.done
    assert "greater than or equal to 1" in answer.text


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{", b"", b"[]", None])
def test_whatever_lies_in_the_place_of_a_request_ends_no_run(
    tmp_path: Path, content: bytes | None
) -> None:
    asked = AskedRun(tmp_path, TWO)
    (path,) = (tmp_path / FOLDER).iterdir()
    path.unlink()
    if content is None:
        path.mkdir()  # as a file of somebody else, it cannot be read
    else:
        path.write_bytes(content)
    assert not EngineRequests(tmp_path).take()
    answer = asked.answer()
    assert answer is not None
    assert answer.text.startswith("no request: ")
    assert not list((tmp_path / FOLDER).iterdir())


def test_a_request_that_cannot_be_taken_is_said_once_and_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, asked = EngineRequests(tmp_path), AskedRun(tmp_path, TWO)
    (path,) = (tmp_path / FOLDER).iterdir()
    (path.with_suffix(".taken") / "in the way").mkdir(parents=True)
    AskedRun(tmp_path, TWO)
    assert len(run.take()) == 1
    assert not run.take()
    assert asked.withdraw()
    (said,) = [record.message for record in caplog.records]
    assert said.startswith(f"{path} cannot be taken (Is a directory): ")
