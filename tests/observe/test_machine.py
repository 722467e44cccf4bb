"""What is recorded of the machine and of each start of a run."""

import socket
import subprocess
import time
from pathlib import Path

import pytest

from agentrl.observe.launches import FILE, read_launches, record_launch
from agentrl.observe.machine import MachineLog, period, read_machine
from tests.processes import PATIENCE_SECONDS


def test_the_machine_is_sampled_while_the_run_lives(tmp_path: Path) -> None:
    path = tmp_path / "machine.jsonl"
    with MachineLog(tmp_path, every=0.01):
        limit = time.monotonic() + PATIENCE_SECONDS
        while len(states := read_machine(path.read_bytes() if path.exists() else b"")) < 3:
            assert time.monotonic() < limit
            time.sleep(0.01)
    for state in states:
        assert 0 <= state.cpu <= 1
        assert 0 < state.memory < state.memory_total
        assert min(state.disk_read, state.disk_written) >= 0 < state.disk_free
    assert [state.at for state in states] == sorted(state.at for state in states)
    assert abs(states[0].at - path.stat().st_mtime) < PATIENCE_SECONDS


def test_a_short_run_is_sampled_every_second_and_a_long_one_every_ten() -> None:
    assert [period(age) for age in (0.0, 600.0, 1800.0, 6000.0, 1e6)] == [1.0, 1.0, 3.0, 10.0, 10.0]


def test_lines_that_are_no_samples_are_left_out() -> None:
    assert read_machine(b'{"at": 1}\n[]\n{"at": 2, "cpu"') == []


def test_a_folder_that_cannot_be_written_ends_only_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with MachineLog(tmp_path / "gone", every=0.001) as log:
        assert log._thread.join(PATIENCE_SECONDS)
    assert "ends here, as the machine cannot be sampled" in caplog.text


def test_each_start_has_its_host_its_commit_and_whether_files_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        return subprocess.run(
            ["git", *who, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    record_launch(tmp_path, resumed=False)
    git("init", "-q")
    (tmp_path / "env.py").write_text("first")
    git("add", "env.py")
    git("commit", "-qm", "first")
    record_launch(tmp_path, resumed=True)
    (tmp_path / "env.py").write_text("second")
    record_launch(tmp_path, resumed=True)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"at": 5}\n[]\n{"at"')
    found = read_launches((tmp_path / FILE).read_bytes())
    head = git("rev-parse", "HEAD")
    assert [(one["commit"], one["changed"], one["resumed"]) for one in found] == [
        (None, False, False),
        (head, False, True),
        (head, True, True),
    ]
    assert {one["host"] for one in found} == {socket.gethostname()}
