"""A disk that is full or cannot be written ends a run with a sentence, and not with a traceback."""

import errno
import os
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from agentrl.errors import WeightsError
from agentrl.storage import storage_problem
from tests.processes import PATIENCE_SECONDS

ROOT = Path(__file__).parents[1]
LIMIT = 1 << 16


def limited(write: Callable[[Path], object], folder: Path) -> BaseException:
    """What writing a file raises that becomes larger than it may be."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    try:
        write(folder / "file")
    except Exception as error:
        return error
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    raise AssertionError("the file could be written")


def write_database(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE t (x)")
        db.executemany("INSERT INTO t VALUES (?)", [(os.urandom(1000),) for _ in range(4 * LIMIT // 1000)])


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_bytes(bytes(2 * LIMIT)),
        lambda path: torch.save(torch.zeros(LIMIT), path),
        lambda path: save_file({"w": torch.zeros(LIMIT)}, path),
        write_database,
    ],
    ids=["bytes", "torch", "safetensors", "sqlite"],
)
def test_every_writer_of_a_run_fails_in_words(write: Callable[[Path], object], tmp_path: Path) -> None:
    problem = storage_problem(limited(write, tmp_path))
    assert problem is not None
    assert "file would be" in problem or "disk" in problem


def test_the_cause_is_found_in_groups_and_behind_other_errors() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/runs/a/metrics.jsonl")
    wrapped = RuntimeError("the ledger cannot be written")
    wrapped.__cause__ = full
    group = ExceptionGroup("two", [ValueError("x"), wrapped])
    assert storage_problem(group) == "no space is left on the disk (/runs/a/metrics.jsonl)"
    assert storage_problem(WeightsError("damaged")) is None
    assert storage_problem(OSError(errno.ECONNREFUSED, "refused")) is None


@pytest.mark.slow
@pytest.mark.parametrize("size", [100 << 10, 3 << 20])  # the new model, and a checkpoint or its optimizer
def test_a_run_whose_files_become_too_large_says_so_in_a_sentence(tmp_path: Path, size: int) -> None:
    settings = ["steps=1", "recipe.demonstrations=null", "rollout.groups_per_step=2", "rollout.group_size=2"]
    settings += ["evaluation.tasks=0", "trackers=[]", "run_dir=run"]
    code = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))\n"
    code += "from agentrl.cli import main; main()"
    command = [sys.executable, "-c", code, "train", str(ROOT / "examples" / "frozen_lake.yaml"), *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS
    )
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert "the run in run cannot be written:" in ended.stderr
    assert "agentrl train --resume run" in ended.stderr
