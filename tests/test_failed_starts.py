"""What cannot be started leaves no open file and no folder: it is tried again, for days."""

import gc
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from agentrl.cluster.parcel import Parcel
from agentrl.hosting import worker_handle
from agentrl.hosting.fork_server import ForkServer
from agentrl.hosting.worker_handle import WorkerHandle
from agentrl.sandbox.jail import Jail
from agentrl.sandbox.settings import SandboxConfig
from agentrl.weights.store import WeightStore

ROOT = Path(__file__).parents[1]
MOST_FILES = 16
"""More than any start opens."""


def open_files() -> dict[str, str]:
    """The files of this process by descriptor."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        if os.path.lexists(link):  # the folder itself was open while it was read
            found[link.name] = os.readlink(link)
    return found


@contextmanager
def room_for(files: int) -> Iterator[None]:
    """This process may open so many files more."""
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken, limit = set(map(int, open_files())), 0
    while files or limit in taken:
        files -= limit not in taken
        limit += 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, old)


def start_worker() -> None:
    WorkerHandle("agentrl.envs.frozen_lake:FrozenLake", None, ()).end()


def start_jail() -> None:
    Jail("process", SandboxConfig()).kill()


def open_store() -> None:
    WeightStore.open(Path(tempfile.gettempdir())).close()


STARTS: Mapping[str, Callable[[], object]] = {
    "fork server": partial(ForkServer, None, ()),
    "worker": start_worker,
    "jail": start_jail,
    "store of weights": open_store,
}


def check_start(start: Callable[[], object], folder: Path) -> None:
    """Start it with room for no file, for one, for two ..."""
    failed = 0
    gc.collect()
    for files in range(MOST_FILES):
        before = open_files()
        try:
            with room_for(files):
                start()
        except OSError:
            failed += 1
        gc.collect()
        assert open_files() == before
        assert not list(folder.iterdir())
    assert 2 <= failed < MOST_FILES


def check_parcel() -> None:
    """Make a parcel that is larger than this process may write files."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = open_files()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, old[1]))
    with pytest.raises(OSError, match="File too large"):
        Parcel.of([np.zeros(1 << 19), np.zeros(1 << 20)])
    resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert open_files() == before


def test_a_start_for_which_files_or_memory_run_out_leaves_nothing(tmp_path: Path) -> None:
    # In a process of its own, in which nothing else opens files meanwhile.
    command = [sys.executable, "-m", "tests.test_failed_starts", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split("\n") == [*STARTS, "parcel", ""]


if __name__ == "__main__":
    tempfile.tempdir = sys.argv[1]
    running = ForkServer(None, ())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_handle, "fork_server_for", lambda *_: running)
        for name, start in STARTS.items():
            check_start(start, Path(sys.argv[1]))
            print(name)
    check_parcel()
    print("parcel")
