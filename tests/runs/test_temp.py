"""The temporary files of a run lie in its folder."""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from agentrl.runs.temp import RunTemp

LEAVES = """
import os, signal, sys, tempfile
from pathlib import Path
from agentrl.runs.temp import RunTemp

with RunTemp(Path(sys.argv[1])):
    tempfile.mkdtemp(prefix="left-")
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""


LISTENS = """
import sys
from multiprocessing.connection import Listener
from multiprocessing.util import get_temp_dir
from pathlib import Path
from agentrl.runs.temp import RunTemp

with RunTemp(Path(sys.argv[1])):
    Listener(family="AF_UNIX")
    assert get_temp_dir().startswith("/proc/") or sys.argv[1] in get_temp_dir()
"""


def in_a_process(run: Path, end: str) -> int:
    return subprocess.run([sys.executable, "-c", LEAVES, str(run), end], check=False).returncode


def test_a_process_that_has_used_multiprocessing_ends_silently_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LISTENS, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_temporary_files_of_this_process_and_of_its_children_lie_in_the_run(tmp_path: Path) -> None:
    before = tempfile.gettempdir(), os.environ.get("TMPDIR")
    with RunTemp(tmp_path / "run"):
        own = tmp_path / "run" / "tmp" / str(os.getpid())
        assert Path(tempfile.mkdtemp()).resolve().parent == own
        makes = "import tempfile; print(tempfile.mkdtemp())"
        made = subprocess.run(
            [sys.executable, "-c", makes], capture_output=True, text=True, check=True
        ).stdout
        assert Path(made.strip()).resolve().parent == own
    assert (tempfile.gettempdir(), os.environ.get("TMPDIR")) == before


def test_leftovers_of_a_killed_process_are_removed_at_the_next_start_and_of_others_at_their_end(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    assert in_a_process(run, "killed") == -9
    assert len(list(run.glob("tmp/*/left-*"))) == 1
    with RunTemp(run):
        assert list(run.glob("tmp/*/left-*")) == []
        kept = Path(tempfile.mkdtemp(prefix="kept-")).resolve()
    with RunTemp(run):  # a resumed run in the same process: what it has made is still in use
        assert kept.is_dir()
    other = tmp_path / "other"
    assert in_a_process(other, "ends") == 0
    assert list(other.iterdir()) == []


def test_a_socket_fits_into_the_folder_of_a_run_with_a_long_path(tmp_path: Path) -> None:
    run = tmp_path / ("x" * 120)
    with RunTemp(run), socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.join(tempfile.mkdtemp(), "plasma_store"))
        assert list(run.glob("tmp/*/*/plasma_store"))
