"""Why a run ended is kept: in `status.json`, in its summary, and for those who read them."""

import asyncio
import errno
import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentrl.config import load_config
from agentrl.errors import RetriesExhaustedError
from agentrl.observe.ending import Ending
from agentrl.protocols import Savable
from agentrl.runs.run import Run
from agentrl.trajectory import Task
from agentrl.viewer.folders import RunFolder
from agentrl.viewer.report import write_report

ROW = {"reward": 0.5, "success": 0.5, "seconds": 2.0, "staleness/max": 0.0}


class Nothing(Savable):
    async def save(self, folder: Path) -> None:
        await asyncio.to_thread(folder.mkdir)


def run_in(
    folder: Path, *, resume: bool = False, steps: int = 10, said: StringIO | None = None
) -> Run:
    config = folder.with_suffix(".yaml")
    config.write_text(f"env: frozen_lake\nrun_dir: {folder}\nsteps: {steps}\ntrackers: []\n")
    return Run(load_config(config), Console(file=said or StringIO(), width=200), resume=resume)


def ended(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name).read_text())["ended"]
    return found


def run_that_ends(folder: Path, error: BaseException | None, *, saved: bool = True) -> None:
    """Make a run of two steps that has saved the first and then ends, by `error` if any."""
    with run_in(folder) as run:
        run.metrics.append({"step": 0, **ROW})
        if saved:
            asyncio.run(run.save_checkpoint(1, Nothing()))
        run.metrics.append({"step": 1, **ROW})
        if error is not None:
            raise error


FAILED = RetriesExhaustedError("5 tasks failed: the server is away")


@pytest.mark.parametrize(
    ("error", "how", "why"),
    [
        (None, "completed", "all of its work is done"),
        (KeyboardInterrupt("SIGTERM"), "stopped", "stopped by SIGTERM"),
        (KeyboardInterrupt(), "stopped", "stopped by Ctrl-C"),
        (asyncio.CancelledError(), "stopped", "stopped by Ctrl-C"),
        (FAILED, "failed", "5 tasks failed: the server is away"),
        (
            BaseExceptionGroup("several", [FAILED, FAILED]),
            "failed",
            "5 tasks failed: the server is away",
        ),
        (
            OSError(28, "No space left on device", "x.parquet"),
            "failed",
            "no space is left on the disk (x.parquet)",
        ),
        (KeyError("colour"), "failed", "KeyError: 'colour' ("),
        (SystemExit(3), "failed", "SystemExit: 3 ("),
    ],
)
def test_why_a_run_ended_is_kept_with_the_command_to_go_on(
    tmp_path: Path, error: BaseException | None, how: str, why: str
) -> None:
    folder = tmp_path / "my run"
    if error is None:
        run_that_ends(folder, None)
    else:
        with pytest.raises(type(error)):
            run_that_ends(folder, error)
    kept = ended(folder, "status.json")
    assert kept == ended(folder, "summary.json") == RunFolder("run", folder).status()["ended"]
    assert (kept["how"], kept["steps"], kept["checkpoint"]) == (how, 2, 1)
    assert kept["why"].startswith(why)
    assert kept["resume"] == (None if how == "completed" else f"agentrl train --resume '{folder}'")
    assert (kept["error"] is not None) == (how == "failed")
    if how != "completed":
        (note,) = (
            error.__notes__ if not isinstance(error, BaseExceptionGroup) else error.__notes__[-1:]
        )
        assert note == f"`{kept['resume']}` resumes from the checkpoint after 1 step"


def test_a_run_that_begins_again_forgets_how_it_ended_and_one_without_checkpoint_says_so(
    tmp_path: Path,
) -> None:
    with pytest.raises(KeyboardInterrupt) as stopped:
        run_that_ends(tmp_path / "run", KeyboardInterrupt(), saved=False)
    assert "begins again, since no checkpoint was saved" in stopped.value.__notes__[0]
    with run_in(tmp_path / "run", resume=True):
        status = json.loads((tmp_path / "run" / "status.json").read_text())
        assert (status["pid"], status["phase"], "ended" in status) == (os.getpid(), None, False)
        assert RunFolder("run", tmp_path / "run").status()["ended"] is None
    assert ended(tmp_path / "run", "summary.json")["how"] == "completed"


def test_that_an_ending_cannot_be_written_does_not_hide_it(tmp_path: Path) -> None:
    run = run_in(tmp_path / "run")
    with pytest.raises(RetriesExhaustedError), run:
        fails_where_nothing_can_be_written(run)


def fails_where_nothing_can_be_written(run: Run) -> None:
    for path in (run.folder / "status.json", run.folder / "summary.json"):
        path.unlink(missing_ok=True)
        path.mkdir()
    raise FAILED


class TooLarge(Savable):
    """State that no disk has room for: it fails when a part of it is written."""

    async def save(self, folder: Path) -> None:
        await asyncio.to_thread(folder.mkdir)
        await asyncio.to_thread((folder / "model.safetensors").write_bytes, bytes(1 << 20))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_half_a_checkpoint_takes_no_room_from_the_words_why_the_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_in(tmp_path / "run")
    there: list[list[str]] = []
    end = run.status.end

    def ends(ending: Ending) -> None:
        there.append([path.name for path in run.checkpoints.folder.iterdir()])
        end(ending)

    monkeypatch.setattr(run.status, "end", ends)
    with pytest.raises(OSError, match="No space left"), run:
        asyncio.run(run.save_checkpoint(1, TooLarge()))
    assert there == [[]]
    assert ended(tmp_path / "run", "status.json")["why"] == "no space is left on the disk"


def test_a_run_whose_process_is_gone_without_a_word_was_killed(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with run_in(tmp_path / "run") as run:
        asyncio.run(run.save_checkpoint(4, Nothing()))
        status = json.loads((run.folder / "status.json").read_text())
    (tmp_path / "run" / "summary.json").unlink()
    (tmp_path / "run" / "status.json").write_text(json.dumps({**status, "pid": gone.pid}))
    found = RunFolder("run", tmp_path / "run").status()["ended"]
    assert (found["how"], found["checkpoint"]) == ("killed", 4)
    assert f"its process {gone.pid} is gone" in found["why"]
    (tmp_path / "run" / "status.json").write_text(
        json.dumps({**status, "pid": gone.pid, "host": "elsewhere"})
    )
    assert RunFolder("run", tmp_path / "run").status()["ended"] is None


def test_a_report_says_why_the_run_ended(tmp_path: Path) -> None:
    with pytest.raises(RetriesExhaustedError):
        run_that_ends(tmp_path / "run", FAILED)
    write_report(tmp_path / "run", tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert (
        "The run failed: 5 tasks failed: the server is away. To go on: agentrl train --resume"
        in text
    )


@pytest.mark.parametrize("steps", [1, 2])
def test_a_resumed_run_that_is_complete_names_the_way_to_more_steps(
    tmp_path: Path, steps: int
) -> None:
    said = StringIO()
    with run_in(tmp_path / "run", steps=steps) as run:
        run.metrics.append({"step": 0, **ROW})
        run.ledger.admit(0, Task("frozen_lake", 1), 0)
        run.ledger.trained(0, {0: [1.0]})
        asyncio.run(run.save_checkpoint(1, Nothing()))
    with run_in(tmp_path / "run", resume=True, steps=steps, said=said):
        pass
    complete = "all 1 steps are done; `agentrl train --resume" in said.getvalue()
    assert complete == (steps == 1)
    assert ("steps=2` goes on" in " ".join(said.getvalue().split())) == (steps == 1)
