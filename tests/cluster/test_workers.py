"""Groups of workers: one contract over threads, processes and Ray's actors."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import psutil
import pytest

from agentrl.cluster.processes import ProcessWorker, start_local
from agentrl.cluster.ray_actors import RayWorker, RayWorkers
from agentrl.cluster.workers import StartWorkers, Worker, start_all
from agentrl.errors import ConfigError, StallError, WorkerDiedError
from tests.cluster.shared_ray import join_shared_ray
from tests.processes import PATIENCE_SECONDS, hit, still_alive
from tests.tiers import only


class Counter:
    """A worker that counts."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.count = 0

    def add(self, by: int) -> tuple[int, int]:
        self.count += by
        return self.rank, self.count

    def fail(self) -> None:
        raise ConfigError("this is wrong")

    def lose_connection(self, killed: int) -> None:
        """What a rank does whose neighbour dies: fails first."""
        if self.rank == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.2)
        raise RuntimeError("connection reset by peer")

    def pid(self) -> int:
        return os.getpid()

    def folder(self) -> str:
        return os.getcwd()

    def look_at(self, array: np.ndarray[Any, Any]) -> tuple[float, bool]:
        """The sum of an array, and whether it lies in memory that is this process's own."""
        return float(array.sum()), bool(array.flags.writeable)


class Broken:
    def __init__(self, rank: int) -> None:
        raise ConfigError(f"rank {rank} cannot be")


pytestmark = pytest.mark.slow  # each process takes a second to begin
LEASE = 2.0


@pytest.fixture(params=["local", "ray"])
def start(request: pytest.FixtureRequest) -> StartWorkers:
    if request.param == "local":
        return partial(start_local, lease=LEASE)
    join_shared_ray()
    return RayWorkers(lease=LEASE)


@pytest.mark.parametrize("count", only([1, 2], 2))
def test_calls_reach_all_workers_and_answers_come_by_rank(start: StartWorkers, count: int) -> None:
    async def main() -> None:
        group = await start("counter", Counter, count)
        try:
            assert await group.all("add", 1) == [(rank, 1) for rank in range(count)]
            assert await group.scatter("add", [(10 * rank,) for rank in range(count)]) == [
                (rank, 1 + 10 * rank) for rank in range(count)
            ]
            assert await group.one("add", 5, rank=count - 1) == (count - 1, 6 + 10 * (count - 1))
        finally:
            await group.stop()
            await group.stop()

    asyncio.run(main())


def test_relative_paths_mean_the_same_to_workers(
    start: StartWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    async def main() -> None:
        group = await start("counter", Counter, 1)
        try:
            assert await group.all("folder") == [str(tmp_path)]
        finally:
            await group.stop()

    asyncio.run(main())


def test_arrays_reach_other_processes_in_shared_memory_which_is_free_after_the_call(
    start: StartWorkers,
) -> None:
    async def main() -> None:
        group = await start("counter", Counter, 2)
        try:
            assert await group.all("look_at", np.ones(10**6, np.int8)) == [(1e6, False)] * 2
            assert await asyncio.to_thread(_open_calls) == 0
        finally:
            await group.stop()

    asyncio.run(main())


@pytest.mark.parametrize("count", only([1, 2], 2))
def test_what_a_worker_raises_comes_through_and_it_lives_on(
    start: StartWorkers, count: int
) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="cannot be"):
            await start("broken", Broken, count)
        group = await start("counter", Counter, count)
        with pytest.raises(ConfigError, match="this is wrong"):
            await group.all("fail")
        assert (await group.one("add", 2)) == (0, 2)
        await group.stop()

    asyncio.run(main())


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_is_killed_or_hangs_is_an_error_and_a_stopped_group_leaves_no_process(
    start: StartWorkers, signal_number: signal.Signals
) -> None:
    async def main() -> list[Any]:
        group = await start("counter", Counter, 2)
        pids = await group.all("pid")
        assert len({os.getpid(), *pids}) == 3
        await asyncio.to_thread(hit, pids[1], signal_number)
        with pytest.raises(WorkerDiedError, match="counter 1 died"):
            await group.all("add", 1)
        assert await group.one("add", 1) == (0, 2)
        await group.stop()
        return pids

    pids = asyncio.run(main())
    assert still_alive(pids, 10) == []


def test_where_a_worker_has_died_nobody_blames_those_who_lost_it(start: StartWorkers) -> None:
    async def main() -> None:
        group = await start("counter", Counter, 2)
        with pytest.raises(RuntimeError, match="connection reset"):
            await group.all("lose_connection", -1)
        with pytest.raises(WorkerDiedError, match="counter 1 died"):
            await group.all("lose_connection", 1)
        await group.stop()

    asyncio.run(main())


def test_workers_that_die_together_as_they_start_are_one_death_and_the_others_are_stopped() -> None:
    class Idle:
        stopped = False

        async def stop(self) -> None:
            self.stopped = True

    other = Idle()

    async def dies(rank: int) -> Worker:
        raise WorkerDiedError("trainer", rank, "its node was lost")

    async def comes() -> Worker:
        return cast(Worker, other)

    with pytest.raises(WorkerDiedError, match="trainer 0 died: its node was lost"):
        asyncio.run(start_all("trainer", [comes(), dies(0), dies(1)]))
    assert other.stopped


def test_a_cancellation_that_comes_with_a_sign_of_life_is_none_the_less() -> None:
    async def main(rounds: int) -> bool:
        sign: Future[None] = Future()
        actor = Mock()
        actor.beat.options.return_value.remote.return_value.future.return_value = sign
        check = asyncio.create_task(RayWorker("env", 0, actor, LEASE, made=True).check())
        await asyncio.sleep(0)
        sign.set_result(None)
        for _ in range(rounds):
            await asyncio.sleep(0)
        cancelled = check.cancel()
        await asyncio.wait({check})
        assert check.cancelled() is cancelled
        return cancelled

    outcomes = [asyncio.run(main(rounds)) for rounds in range(10)]
    assert set(outcomes) == {False, True}


def test_a_worker_is_alive_that_was_stopped_together_with_the_run_and_went_on_with_it() -> None:
    async def main() -> None:
        worker = ProcessWorker("env", 0, LEASE)
        # Its process has the shared one, and goes on writing there.
        worker._beat = beat = SimpleNamespace(value=time.monotonic() - 600)
        asyncio.get_running_loop().call_later(0.5, lambda: setattr(beat, "value", time.monotonic()))
        await worker.check()
        beat.value = time.monotonic() - 600
        with pytest.raises(WorkerDiedError, match=r"no sign of life for 60\d s"):
            await worker.check()
        await worker.stop()

    asyncio.run(main())


def test_a_worker_that_hangs_in_its_start_is_given_up_at_the_deadline() -> None:
    released = threading.Event()

    async def main() -> None:
        with pytest.raises(
            StallError, match=r"critic 0 did not start within 0.05 s \(cluster.start_seconds\)"
        ):
            await start_local("critic", lambda rank: released.wait(60), 1, start_seconds=0.05)

    try:
        asyncio.run(main())
    finally:
        released.set()


def test_a_process_that_hangs_in_its_start_is_given_up_and_killed() -> None:
    async def main() -> None:
        with pytest.raises(StallError, match=r"env 3 did not start within 2 s"):
            await ProcessWorker.start("env", _hang, 3, start_seconds=2.0)

    asyncio.run(main())
    assert [child for child in psutil.Process().children() if "env-3" in child.name()] == []


FORKS_A_WORKER = """
import asyncio
from functools import partial
from agentrl.cluster.processes import ProcessWorker
from agentrl.cluster.workers import Forked

async def main():
    worker = await ProcessWorker.start("idle", Forked(int, ("colorsys",)), 0)
    print(worker.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_a_worker_that_was_forked_dies_with_the_run() -> None:
    driver = subprocess.Popen([sys.executable, "-c", FORKS_A_WORKER], stdout=subprocess.PIPE)
    assert driver.stdout is not None
    pid = int(driver.stdout.readline())
    assert psutil.pid_exists(pid)
    driver.kill()
    driver.communicate()
    assert still_alive([pid], PATIENCE_SECONDS) == []


def _open_calls() -> int:
    """Memory of calls that this process keeps."""
    links = [link.readlink().name for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum(name.startswith("memfd:agentrl-call") for name in links)


def _hang(rank: int) -> None:
    threading.Event().wait()
