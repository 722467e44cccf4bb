"""Training runs of benchmarks: to their end, once each, and with what they cost."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def run_to_end(folder: Path, config: Path, settings: Sequence[str]) -> Path:
    """Train a config into a folder, unless that has ended; a run that was stopped goes on.

    The folder gets the files `commit`, of the code that trained last, and `cpu_seconds`, of all
    launches. It ends the program if the run fails.
    """
    summary = folder / "summary.json"
    if (
        summary.exists()
        and json.loads(summary.read_text()).get("ended", {"how": "completed"})["how"] == "completed"
    ):
        return folder
    command = [str(Path(sys.executable).with_name("agentrl")), "train", str(config)]
    overrides = [*settings, f"run_dir={folder}", "--resume", "auto"]
    run = subprocess.Popen([*command, *overrides], stdout=sys.stderr)
    try:
        status, seconds = _wait(run)
    except KeyboardInterrupt:
        # the run gets Ctrl-C too, and saves a checkpoint; `subprocess.run` would kill it
        status, seconds = _wait(run)
    spent = folder / "cpu_seconds"  # of all launches, if one was stopped
    earlier = float(spent.read_text()) if spent.exists() else 0.0
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "commit").write_text(commit())
    spent.write_text(f"{earlier + seconds:.0f}")
    if status:
        sys.exit(f"{folder} has not ended (exit status {status}): the same command goes on with it")
    return folder


def _wait(run: subprocess.Popen[bytes]) -> tuple[int, float]:
    """The exit status of a process, and the CPU seconds of it and of those that it started."""
    _, status, used = os.wait4(run.pid, 0)
    run.returncode = os.waitstatus_to_exitcode(status)
    return run.returncode, used.ru_utime + used.ru_stime


def commit() -> str:
    """The commit of the code, with a mark if files differ from it."""
    described = ["git", "describe", "--always", "--dirty=*", "--exclude=*"]
    asked = subprocess.run(
        described, check=False, cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return asked.stdout.strip() or "?"
