"""A disk that is full or cannot be written ends a run with a sentence, and not with a traceback."""

import errno
import os
import re
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from agentrl.errors import ConfigError, WeightsError
from agentrl.files.disk_errors import storage_problem
from agentrl.ledger.ledger import Ledger, check_ledger
from agentrl.trajectory import Task
from tests.processes import PATIENCE_SECONDS, can_mount

ROOT = Path(__file__).parents[2]
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
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE t (x)")
        db.executemany(
            "INSERT INTO t VALUES (?)", [(os.urandom(1000),) for _ in range(4 * LIMIT // 1000)]
        )


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
def test_every_writer_of_a_run_fails_in_words(
    write: Callable[[Path], object], tmp_path: Path
) -> None:
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


ON_A_FULL_DISK = """
mount -t tmpfs -o size=1m none disk
"$PYTHON" -c "from agentrl.ledger.ledger import Ledger; Ledger('disk/ledger.sqlite').close()"
touch disk/config.yaml
dd if=/dev/zero of=disk/filler bs=4k 2> /dev/null
"$PYTHON" -c "from agentrl.cli import main; main()" ledger disk || exit 3
exec "$PYTHON" -c "
from agentrl.ledger.ledger import Ledger
from agentrl.files.disk_errors import storage_problem
try:
    Ledger('disk/ledger.sqlite')
except Exception as error:
    print(type(error).__name__, storage_problem(error))
"
"""


@pytest.mark.skipif(not can_mount(), reason="this machine does not let a user mount a disk")
def test_a_ledger_that_a_full_disk_keeps_from_being_opened_is_not_called_damaged(
    tmp_path: Path,
) -> None:
    (tmp_path / "disk").mkdir()
    ended = subprocess.run(
        ["unshare", "-rm", "sh", "-c", ON_A_FULL_DISK],
        cwd=tmp_path,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr  # to read it needs no space
    assert "no space is left on the disk" in ended.stdout
    assert "CheckpointError" not in ended.stdout


@pytest.mark.slow
# The new model, and a checkpoint or its optimizer.
@pytest.mark.long
@pytest.mark.parametrize("size", [100 << 10, pytest.param(3 << 20, marks=pytest.mark.long)])
def test_a_run_whose_files_become_too_large_says_so_in_a_sentence(
    tmp_path: Path, size: int
) -> None:
    settings = [
        "steps=1",
        "recipe.demonstrations=null",
        "rollout.groups_per_step=2",
        "rollout.group_size=2",
    ]
    settings += ["evaluation.tasks=0", "trackers=[]", "run_dir=run"]
    code = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))\n"
    code += "from agentrl.cli import main; main()"
    command = [
        sys.executable,
        "-c",
        code,
        "train",
        str(ROOT / "examples" / "frozen_lake.yaml"),
        *settings,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert "the run in run cannot be read or written:" in ended.stderr
    assert (
        "agentrl train --resume run` begins again" in " ".join(ended.stderr.split())
        or size > 1 << 20
    )


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            lambda run: (run / "metrics.jsonl").write_text('{"step": 0}\n{"ste\n{"step": 1}\n'),
            r"line 2 of .*metrics",
        ),
        (
            lambda run: (run / "metrics.jsonl").write_bytes(b'{"step": 0}\n{"\xff": 1}\n'),
            r"line 2 of .*metrics",
        ),
        (lambda run: (run / "metrics.jsonl").mkdir(), "a folder is where a file should be"),
        (
            lambda run: (run / "checkpoints").touch(),
            "checkpoints is a file, where the run keeps a folder",
        ),
        (lambda run: (run / "config.yaml").write_text("env: [\n"), "is not YAML"),
    ],
    ids=["half a line", "half a character", "folder for file", "file for folder", "config"],
)
def test_what_is_damaged_in_a_run_s_folder_is_named_without_a_traceback(
    agentrl: Callable[..., Any], tmp_path: Path, spoil: Callable[[Path], object], says: str
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(
        "env: frozen_lake\nmodel: tiny\nsteps: 1\ntrackers: []\nrun_dir: run\n"
    )
    spoil(run)
    ended = agentrl("train", "--resume", "run", cwd=tmp_path)
    assert ended.returncode in (1, 2)
    assert re.search(says, " ".join(ended.stderr.split()))


def test_a_folder_that_cannot_be_made_is_an_error_of_the_config(
    agentrl: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    lake = str(ROOT / "examples" / "frozen_lake.yaml")
    for folder in ("file", "file/run"):
        ended = agentrl("train", lake, f"run_dir={folder}", cwd=tmp_path)
        assert ended.returncode == 2
        assert f"the folder {folder} cannot be made" in " ".join(ended.stderr.split())


def test_a_damaged_page_of_the_ledger_is_refused_where_it_is_read(
    agentrl: Callable[..., Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("env: frozen_lake\n")
    with Ledger(run / "ledger.sqlite") as ledger:
        for number in range(500):
            ledger.admit(number, Task("frozen_lake", number, id=str(number)), 0)
    pages = bytearray((run / "ledger.sqlite").read_bytes())
    pages[4096:16384] = b"\x5a" * 12288
    (run / "ledger.sqlite").write_bytes(pages)
    with pytest.raises(ConfigError, match=r"ledger.sqlite is damaged .* restore it from a copy"):
        check_ledger(run / "ledger.sqlite", 1)
    read = agentrl("ledger", "run", cwd=tmp_path)
    assert read.returncode == 1
    assert "the ledger is damaged" in " ".join(read.stderr.split())
