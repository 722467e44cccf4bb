"""Control groups: where one can be made, what its files say, and that none is left."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl.sandbox import cgroup
from agentrl.sandbox.order import Order
from agentrl.sandbox.pool import ProgramSandbox
from agentrl.sandbox.settings import SandboxConfig, SandboxLimits
from tests.processes import PATIENCE_SECONDS

ORDER = Order("", b"", **SandboxLimits(cpu=1, memory=64 << 20, disk=1 << 20).model_dump())


@pytest.fixture
def unified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like version 2 of the interface, with the group of this process in it."""
    own = tmp_path / "user.slice" / "own"
    own.mkdir(parents=True)
    (tmp_path / "user.slice" / "cgroup.subtree_control").write_text("cpu memory pids\n")
    monkeypatch.setattr(cgroup, "_mounts", lambda: iter([(str(tmp_path), "/", "cgroup2", {"rw"})]))
    monkeypatch.setattr(cgroup, "_own_groups", lambda: iter([("", "/user.slice/own")]))
    return tmp_path / "user.slice"


def test_with_version_2_the_group_is_made_where_memory_can_be_limited(unified: Path) -> None:
    assert list(cgroup._base_folders()) == [
        (str(unified),)
    ]  # beside its own group, which has processes
    (unified / "own" / "cgroup.subtree_control").write_text("memory\n")
    assert list(cgroup._base_folders()) == [(str(unified / "own"),), (str(unified),)]


def test_a_group_that_lacks_a_file_is_none(unified: Path) -> None:
    assert cgroup.make("agentrl-jail-x") == ()
    assert not (unified / "agentrl-jail-x").exists()


def test_what_version_2_says_is_understood(tmp_path: Path) -> None:
    says = {
        "cgroup.procs": "",
        "memory.max": "max\n",
        "memory.current": "1000\n",
        "memory.stat": "anon 600\nfile 400\nkernel 100\n",
        "memory.events": "low 0\nhigh 0\noom 7\noom_kill 1\noom_group_kill 0\n",
        "cpu.stat": "usage_usec 5000000\nuser_usec 4000000\n",
    }
    for name, text in says.items():
        (tmp_path / name).write_text(text)

    def change(name: str, text: str) -> str:
        before = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text)
        hit = group.limit_hit()
        (tmp_path / name).write_text(before)
        return hit

    with cgroup.ControlGroup([str(tmp_path)]) as group:
        assert group
        group.begin(ORDER)
        assert int((tmp_path / "memory.max").read_text()) > ORDER.memory + ORDER.disk
        group.join()
        assert (tmp_path / "cgroup.procs").read_text() == "0"
        assert group.limit_hit() == ""
        assert change("cpu.stat", "usage_usec 6000000\n") == "cpu"
        assert change("cpu.stat", "usage_usec 5900000\n") == ""
        assert change("memory.events", "oom 8\noom_kill 2\n") == "memory"
        assert change("memory.current", f"{ORDER.memory + 401}\n") == "memory"
        # The rest is files, which count as disk.
        assert change("memory.current", f"{ORDER.memory + 399}\n") == ""


def test_without_a_group_nothing_is_counted() -> None:
    with cgroup.ControlGroup(()) as group:
        assert not group
        group.begin(ORDER)
        group.join()
        assert group.limit_hit() == ""


@pytest.mark.parametrize(
    "backend", ["namespaces", pytest.param("landlock", marks=pytest.mark.slow)]
)
def test_no_group_is_left_by_a_sandbox_that_ends_in_a_run_or_whose_driver_is_killed(
    backend: str,
) -> None:
    config = SandboxConfig(backend=backend, size=1)  # type: ignore[arg-type]

    async def main() -> tuple[str, ...]:
        async with ProgramSandbox(config) as sandbox:
            await sandbox.run("print(1)")
            (jail,) = sandbox._jails
            assert all(map(os.path.isdir, jail._group))
            return jail._group

    mine = asyncio.run(main())
    if not mine:
        pytest.skip("this machine does not let its user make a control group")
    assert not any(map(os.path.exists, mine))
    code = f"""
import asyncio
from agentrl.sandbox.pool import ProgramSandbox
from agentrl.sandbox.settings import SandboxConfig
async def main():
    async with ProgramSandbox(SandboxConfig(backend={backend!r}, size=1)) as sandbox:
        print(*next(iter(sandbox._jails))._group, sep="\\n", end="\\n\\n", flush=True)
        await sandbox.run("import time; time.sleep(1000)")
asyncio.run(main())
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        groups = list(iter(lambda: driver.stdout.readline().strip(), ""))  # type: ignore[union-attr]
        assert all(map(os.path.isdir, groups))
        driver.kill()

    until = time.monotonic() + PATIENCE_SECONDS
    while any(map(os.path.isdir, groups)):
        assert time.monotonic() < until
        time.sleep(0.01)
