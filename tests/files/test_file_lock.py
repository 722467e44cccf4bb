"""Locks on files: by the kernel, and by a file of its own where the file system has none."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.files.file_lock import FileLock, Holder, locked
from agentrl.runs.lock import RunLock
from agentrl.weights.store import WeightStore, sweep

NO_LOCKS = [errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP]
AS_A_RUN = """
import errno, sqlite3, sys, time
from pathlib import Path
from tests.no_locks import take_locks_away
take_locks_away(int(sys.argv[1]))
from agentrl.rewards.judge_cache import VerdictCache
from agentrl.ledger.ledger import Ledger, check_ledger, read_ledger
from agentrl.runs.lock import RunLock
from agentrl.trajectory import Task
folder = Path(sys.argv[2])
with RunLock(folder), Ledger(folder / "ledger.sqlite") as ledger:
    number = ledger.next_number()
    ledger.admit(number, Task("lake", 0, {}, f"task-{number}"), 0)
    ledger.trained(number, {number: [1.0]})
    ledger.sync()
    assert ledger.task_fates().trained == number + 1, ledger.task_fates()
    with read_ledger(folder / "ledger.sqlite") as reader:  # the page of a run that goes on
        assert reader.task_fates().trained == number + 1
    check_ledger(folder / "ledger.sqlite", number + 1)
    with VerdictCache(folder / "verdicts.sqlite") as cache:
        cache.put(b"question", "verdict")
        assert cache.get(b"question") == "verdict"
    print("held", flush=True)
    sys.stdin.read()
"""


def unsupported(descriptor: object, operation: int) -> None:
    raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))


@pytest.fixture(params=NO_LOCKS, ids=errno.errorcode.get)
def no_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: object, operation: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.usefixtures("no_locks")
def test_where_the_file_system_has_no_locks_one_holder_at_a_time_is_named_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    with RunLock(tmp_path):
        with pytest.raises(
            ConfigError, match=f"in use: process {os.getpid()} on .*, since .* UTC, trains"
        ):
            RunLock(tmp_path).__enter__()
        assert not FileLock(tmp_path / "lock").acquire(wait=False)
    with RunLock(tmp_path), locked(tmp_path / "other"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "other"]


@pytest.mark.usefixtures("no_locks")
@pytest.mark.parametrize(
    ("holder", "age", "free"),
    [
        (replace(Holder.this(), started="1"), 0, True),  # the id is another process's by now
        (replace(Holder.this(), machine="another", host="node-7"), 60, False),
        (replace(Holder.this(), machine="another", host="node-7"), 600, True),
        (None, 60, False),  # it may be half written
        (None, 600, True),
    ],
    ids=["dead here", "alive elsewhere", "silent elsewhere", "half written", "left half written"],
)
def test_the_file_of_a_dead_holder_does_not_count(
    tmp_path: Path, holder: Holder | None, age: int, free: bool
) -> None:
    marker = tmp_path / "lock.holder"
    marker.write_text(json.dumps(asdict(holder)) if holder else '{"pid": ')
    os.utime(marker, (marker.stat().st_mtime - age,) * 2)
    lock = FileLock(tmp_path / "lock")
    assert lock.acquire(wait=False) == free
    if not free and holder:
        assert "on node-7, since" in str(lock.holder())
    lock.release()
    assert marker.exists() == (not free)
    assert {path.name for path in tmp_path.iterdir()} <= {"lock", "lock.holder"}


def test_a_process_that_has_locks_spares_what_one_without_them_holds(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fcntl, "flock", unsupported)
        other = FileLock(tmp_path / "lock")
        assert other.acquire(wait=False)
        store = WeightStore.open(tmp_path)
    assert not FileLock(tmp_path / "lock").acquire(wait=False)
    sweep(tmp_path)
    assert store.folder.exists()
    other.release()
    store.close()
    lock = FileLock(tmp_path / "lock")
    assert lock.acquire()
    lock.release()


@pytest.mark.usefixtures("no_locks")
def test_stores_of_weights_know_the_living_from_the_dead_without_locks(tmp_path: Path) -> None:
    store = WeightStore.open(tmp_path)
    dead = tmp_path / "agentrl-weights-dead"
    dead.mkdir()
    (dead / ".holder").write_text(json.dumps(asdict(replace(Holder.this(), started="1"))))
    # As seen from a container that has no locks.
    locked_by_the_kernel = tmp_path / "agentrl-weights-outside"
    locked_by_the_kernel.mkdir()
    sweep(tmp_path)
    assert set(tmp_path.iterdir()) == {store.folder, locked_by_the_kernel}
    assert list(locked_by_the_kernel.iterdir()) == []
    store.close()
    assert list(tmp_path.iterdir()) == [locked_by_the_kernel]


def test_a_run_keeps_its_ledger_where_the_kernel_has_no_locks_and_a_killed_one_is_resumed(
    tmp_path: Path,
) -> None:
    for error in (errno.ENOSYS, errno.ENOLCK):
        command = [sys.executable, "-c", AS_A_RUN, str(error), str(tmp_path)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as run:
            assert run.stdout is not None
            assert run.stdout.readline() == "held\n"
            other = FileLock(tmp_path / "lock")
            assert not other._acquire_by_marker(wait=False)
            assert str(other.holder()).startswith(f"process {run.pid} on")
            run.send_signal(signal.SIGKILL)
