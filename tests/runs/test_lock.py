"""One process at a time trains in the folder of a run."""

import asyncio
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.config import load_config
from agentrl.errors import ConfigError, StorageError
from agentrl.ledger.ledger import read_ledger
from agentrl.protocols import Savable
from agentrl.runs.lock import RunLock
from agentrl.runs.run import Run
from agentrl.trajectory import Task

HOLD = "import sys; from pathlib import Path; from agentrl.runs.lock import RunLock\n" + (
    "with RunLock(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
)


def run_in(folder: Path, *, resume: bool) -> Run:
    config = folder.with_suffix(".yaml")
    config.write_text(f"env: frozen_lake\nrun_dir: {folder}\ntrackers: []\n")
    return Run(load_config(config), Console(file=StringIO()), resume=resume)


def written(folder: Path) -> dict[str, int]:
    """When each file of a run was written, but for those that its threads write every second."""
    files = (path for path in folder.iterdir() if path.name not in ("live.json", "machine.jsonl"))
    return {path.name: path.stat().st_mtime_ns for path in files}


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_process_is_refused_told_who_trains_there_and_changes_nothing(
    tmp_path: Path, resume: bool
) -> None:
    folder = tmp_path / "run"
    with run_in(folder, resume=False) as run:
        run.metrics.append({"step": 0, "reward": 1.0})
        before = written(folder)
        message = (
            f"in use: process {os.getpid()} on .*, since .* UTC, trains"
            if resume
            else "holds a run already"
        )
        with pytest.raises(ConfigError, match=message):
            run_in(folder, resume=resume)
        assert written(folder) == before
        with read_ledger(folder / "ledger.sqlite") as ledger:  # readers need no lock
            assert ledger.task_fates().total == 0
    with run_in(folder, resume=True) as run:
        assert len(run.metrics.rows()) == 1


def test_a_run_stopped_between_two_steps_saves_the_last_and_one_that_was_just_saved_does_not(
    tmp_path: Path,
) -> None:
    class Weights(Savable):
        async def save(self, folder: Path) -> None:
            await asyncio.to_thread(folder.mkdir)

    async def stopped_after(run: Run, step: int) -> None:
        stopping = asyncio.get_running_loop().create_future()

        async def plays() -> None:
            async with run.saved_if_stopped(step, Weights()):
                stopping.set_result(None)
                await asyncio.sleep(3600)

        async with asyncio.TaskGroup() as group:
            playing = group.create_task(plays())
            await stopping
            playing.cancel()
        assert playing.cancelled()

    with run_in(tmp_path / "run", resume=False) as run:
        for step, saved in ((0, []), (3, [3]), (3, [3]), (5, [3, 5])):
            asyncio.run(stopped_after(run, step))
            assert sorted(run.checkpoints.all()) == saved


def test_a_run_whose_start_fails_frees_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError("no disk")

    with monkeypatch.context() as patched:
        patched.setattr("agentrl.runs.run.Ledger", fails)
        with pytest.raises(RuntimeError):
            run_in(tmp_path / "run", resume=False)
    with run_in(tmp_path / "run", resume=False):
        pass


def test_a_killed_process_frees_the_folder(tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=pipe, stdout=pipe, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(ConfigError, match=f"in use: process {holder.pid} on"),
            RunLock(tmp_path),
        ):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with RunLock(tmp_path):
        pass


def test_a_folder_that_cannot_be_written_is_free_when_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(lock: RunLock, holder: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(RunLock, "_write", refuses)
        with pytest.raises(OSError, match="No space left"), RunLock(tmp_path):
            pass
    with RunLock(tmp_path):  # by the same process, as in a notebook
        assert f"process {os.getpid()} on" in (tmp_path / "lock").read_text()
    assert (tmp_path / "lock").read_text() == ""


@pytest.mark.parametrize("over", [0, 1])
def test_a_path_that_is_too_long_for_the_ledger_is_refused_before_anything_is_made(
    tmp_path: Path, over: int
) -> None:
    long = tmp_path / ("ü" * 90) / ("d" * 100)
    rest = 490 + over - len(os.fsencode(long)) - 1
    folder = long / ("f" * rest)
    config = tmp_path / "run.yaml"
    config.write_text(f"env: frozen_lake\nrun_dir: {folder}\ntrackers: []\n")
    loaded, console = load_config(config), Console(file=StringIO())
    if over:
        with pytest.raises(ConfigError, match=r"has 491 bytes .* takes 490 at most: write a short"):
            Run(loaded, console)
        assert not long.exists()
    else:
        with Run(loaded, console) as run:
            run.ledger.sync()


def test_a_run_whose_folder_is_moved_ends_in_a_sentence_and_goes_on_where_it_is(
    tmp_path: Path,
) -> None:
    folder, moved = tmp_path / "run", tmp_path / "moved"

    def work(run: Run) -> None:
        run.metrics.append({"step": 0, "reward": 1.0})
        folder.rename(moved)
        run.status.begin_phase(1, "train")

    message = f"the folder {folder} was moved or deleted"
    with pytest.raises(StorageError, match=message), run_in(folder, resume=False) as run:
        work(run)
    assert not folder.exists()
    with run_in(moved, resume=True) as run:
        assert run.metrics.values("reward") == {0: 1.0}


def test_a_run_whose_process_gets_another_current_folder_says_so_and_goes_on_from_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()

    def work(run: Run) -> None:
        run.metrics.append({"step": 0, "reward": 1.0})
        monkeypatch.chdir("elsewhere")
        run.status.begin_phase(1, "train")

    message = "current folder of this process was changed"
    with pytest.raises(StorageError, match=message), run_in(Path("run"), resume=False) as run:
        work(run)
    monkeypatch.chdir(tmp_path)
    with run_in(Path("run"), resume=True) as run:
        assert run.metrics.values("reward") == {0: 1.0}


@pytest.mark.parametrize(
    ("error", "raised"),
    [(FileNotFoundError(2, "gone"), StorageError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_a_run_whose_folder_is_replaced_writes_no_ending_into_the_other_one(
    tmp_path: Path, error: BaseException, raised: type[BaseException]
) -> None:
    folder = tmp_path / "run"

    def fail() -> None:
        shutil.rmtree(folder)
        folder.mkdir()
        raise error

    with pytest.raises(raised), run_in(folder, resume=False):
        fail()
    assert not {"status.json", "summary.json", "lock"} & {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("also_the_log", [False, True])
def test_a_ledger_that_is_deleted_while_its_run_goes_on_is_written_again_and_the_run_ends(
    tmp_path: Path, also_the_log: bool
) -> None:
    folder = tmp_path / "run"

    def work(run: Run) -> None:
        for number in (0, 1):
            run.ledger.admit(number, Task("frozen_lake", number, {}, f"t/{number}"), 0)
        run.ledger.sync()
        (folder / "ledger.sqlite").unlink()
        if also_the_log:
            (folder / "ledger.sqlite-wal").unlink()
        run.ledger.end_task(0, "cancelled", "a test")
        run.status.begin_phase(1, "train")

    message = r"ledger.sqlite was deleted while its run went on.* written it again: continue"
    with pytest.raises(StorageError, match=message), run_in(folder, resume=False) as run:
        work(run)
    assert "was deleted" in json.loads((folder / "status.json").read_text())["ended"]["why"]
    with run_in(folder, resume=True) as run:
        fates = run.ledger.task_fates()
        assert (fates.cancelled, fates.open) == (1, 1)
        run.ledger.end_task(1, "cancelled", "a test")
        run.ledger.sync()
        assert run.ledger.damage() is None


def test_a_ledger_that_is_replaced_while_its_run_goes_on_is_left_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def work(run: Run) -> None:
        (tmp_path / "other").write_bytes(b"another file")
        (tmp_path / "other").replace(folder / "ledger.sqlite")
        run.ledger.sync()

    message = r"ledger.sqlite was replaced while its run went on.*run_dir=ANOTHER"
    with pytest.raises(StorageError, match=message), run_in(folder, resume=False) as run:
        work(run)
    assert (folder / "ledger.sqlite").read_bytes() == b"another file"


def test_metrics_that_are_deleted_while_their_run_goes_on_are_missed_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with run_in(tmp_path / "run", resume=False) as run:
        run.metrics.append({"step": 0, "reward": 1.0})
        (tmp_path / "run" / "metrics.jsonl").unlink()
        run.metrics.append({"step": 1, "reward": 0.5})
    assert "metrics.jsonl was deleted: the metrics of earlier steps are lost" in caplog.text
    with run_in(tmp_path / "run", resume=True) as run:
        assert run.metrics.values("reward") == {1: 0.5}


def test_what_a_killed_process_has_left_is_mended_when_the_run_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with run_in(folder, resume=False):
        pass
    (folder / "origins.json").unlink()
    for left in (
        ".unfinished-status.json",
        "checkpoints/.unfinished-step_000003/trainer.pt",
        "iterations/1/.unfinished-a",
    ):
        (folder / left).parent.mkdir(parents=True, exist_ok=True)
        (folder / left).write_text("half")
    with run_in(folder, resume=True):
        assert not list(folder.rglob(".unfinished-*"))
        assert json.loads((folder / "origins.json").read_text())["run_dir"]


def test_a_run_that_is_killed_when_it_begins_has_origins_or_no_config(tmp_path: Path) -> None:
    written: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "agentrl.config.history.write_whole", lambda path, text: written.append(path.name)
        )
        with run_in(tmp_path / "run", resume=False):
            pass
    assert written == ["origins.json", "config.yaml", "config.0.yaml"]


def test_fewer_steps_than_the_run_has_made_are_refused_before_anything_is_renamed(
    tmp_path: Path,
) -> None:
    class Weights(Savable):
        async def save(self, folder: Path) -> None:
            await asyncio.to_thread(folder.mkdir)

    folder = tmp_path / "run"
    with run_in(folder, resume=False) as run:
        run.checkpoints = replace(run.checkpoints, keep=3)
        for step in (2, 4, 6):
            asyncio.run(run.checkpoints.save(step, Weights()))
            run.ledger.admit(step, Task("lake", step, {}, str(step)), 0)
    config = load_config(folder / "config.yaml", ["steps=3"])
    for step, done in ((None, 6), (4, 4)):
        with pytest.raises(
            ConfigError, match=rf"steps=3: the run in .* has made {done} steps already: .*--step 3"
        ):
            Run(config, Console(file=StringIO()), resume=True, step=step)
    assert sorted(run.checkpoints.all()) == [2, 4, 6]


@pytest.mark.parametrize("written", ["[]", "null", "{", '{"train": 1}', '"train"'])
def test_a_data_json_that_cannot_be_read_is_one_sentence(tmp_path: Path, written: str) -> None:
    folder = tmp_path / "run"
    with run_in(folder, resume=False):
        pass
    (folder / "data.json").write_text(written)
    with pytest.raises(
        ConfigError, match=r"data.json cannot be read, .*: restore it from a copy, or remove it"
    ):
        run_in(folder, resume=True)


def test_a_checkpoint_that_has_begun_is_finished_when_the_run_is_stopped_meanwhile(
    tmp_path: Path,
) -> None:
    class Slow(Savable):
        def __init__(self) -> None:
            self.saving = asyncio.Event()

        async def save(self, folder: Path) -> None:
            self.saving.set()
            await asyncio.sleep(0.01)
            await asyncio.to_thread(folder.mkdir)

    async def stopped(run: Run) -> None:
        state = Slow()

        async def trains() -> None:
            async with run.writing_checkpoints():
                await run.begin_checkpoint(2, state)

        training = asyncio.get_running_loop().create_task(trains())
        await state.saving.wait()
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training

    with run_in(tmp_path / "run", resume=False) as run:
        asyncio.run(stopped(run))
        assert sorted(run.checkpoints.all()) == [2]
