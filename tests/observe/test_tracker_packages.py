"""The real packages of trackers, offline, in an environment of their own (build/trackers)."""

import json
import os
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("tracker_program.py")
EXTRAS = ("wandb", "mlflow", "trackio", "comet")
INSTALL_SECONDS, RUN_SECONDS = 600, 300
ROWS = [[0, 0], [1, 1], [2, 2], [10, 10], [11, 11], [12, 12]]
EVALUATED = [[0, 0.5], [10, 0.5]]

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("tracker packages")]


@pytest.fixture(scope="module")
def python() -> Path:
    """An interpreter with the trackers, which finds everything else in the one of these tests."""
    home = ROOT / "build" / "trackers"
    found, uv = home / "bin" / "python", Path(sys.executable).with_name("uv")
    if not (home / "complete").exists():
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        wanted = [one for name in EXTRAS for one in project["optional-dependencies"][name]]
        for command in (
            [sys.executable, "-m", "venv", "--clear", "--without-pip", str(home)],
            [str(uv), "pip", "install", "--quiet", "--python", str(found), *wanted],
        ):
            subprocess.run(command, check=True, timeout=INSTALL_SECONDS)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        packages = home / "lib" / version / "site-packages"
        (packages / "these_tests.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        (home / "complete").touch()
    return found


def kept(python: Path, name: str, folder: Path, **variables: str) -> dict[str, Any]:
    """What the package has kept of a run that was logged with it."""
    own = {"HOME": str(folder), "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(
        [str(python), str(PROGRAM), name, str(folder / "lake")],
        cwd=folder,
        env={"PATH": os.environ["PATH"], **own},
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("KEPT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(lines[0].removeprefix("KEPT "))
    return found


def test_wandb_offline_keeps_both_processes_of_a_run_for_one_sync(python, tmp_path):
    found = kept(python, "wandb", tmp_path, WANDB_MODE="offline")
    assert (found["reward"], found["eval/success"]) == (ROWS, EVALUATED)
    assert (found["exits"], found["tables"]) == ([255, 0], 2)
    (first, *_), (second, *_) = found["runs"]
    assert first == second
    assert found["runs"][0][1:] == ["lakes", "a", "b=c"]


@pytest.mark.parametrize("store", ["sqlite:///{}/mlflow.db", "file:{}/mlruns"])
def test_mlflow_keeps_both_processes_of_a_run_in_one_run_of_its_store(python, tmp_path, store):
    address = store.format(tmp_path)
    found = kept(
        python, "mlflow", tmp_path, MLFLOW_TRACKING_URI=address, MLFLOW_ALLOW_FILE_STORE="true"
    )
    assert (found["reward"], found["eval.success"]) == (ROWS, EVALUATED)
    assert [step for step, _ in found["eval.hard.pass_4"]] == [0, 1, 2, 10, 11, 12]
    assert found["status"] == "FINISHED"
    assert found["tags"] == {"a": "", "b": "c", "ended": "completed: why", "changed.seed": "1"}
    assert found["files"] == ["samples/held_out.json"]


def test_trackio_keeps_both_processes_of_a_run_in_its_own_database(python, tmp_path):
    found = kept(python, "trackio", tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"))
    assert (found["reward"], found["eval/success"]) == (ROWS, EVALUATED)
    assert found["tables"] == 2


def test_comet_offline_keeps_both_processes_of_a_run_for_one_upload(python, tmp_path):
    found = kept(python, "comet", tmp_path, COMET_START_ONLINE="0")
    assert (found["reward"], found["eval/success"]) == (ROWS, EVALUATED)
    assert len(found["keys"]) == 2
    assert len(set(found["keys"])) == 1
    assert found["files"] == ["samples_held_out_000000.csv", "samples_held_out_000010.csv"]
