"""Rules on workers: the contract of a `RulePool`, and what becomes of a worker that dies."""

import asyncio
import os
import signal
from contextlib import suppress
from functools import partial

import psutil
import pytest

from agentrl.cluster.processes import ProcessWorker
from agentrl.cluster.ray_actors import RayWorkers
from agentrl.cluster.worker_registry import registered_workers
from agentrl.cluster.workers import Make, StartWorker, Worker
from agentrl.errors import RewardError, RuleLimitError, WorkerDiedError
from agentrl.flow import Flow
from agentrl.scoring.config import RulePoolConfig
from agentrl.scoring.rule_workers import RuleWorkers
from tests.cluster.shared_ray import join_shared_ray
from tests.processes import PATIENCE_SECONDS, still_alive

pytestmark = pytest.mark.slow
LEASE = 10.0  # a busy machine starves a process for seconds


def double(number: int) -> int:
    return 2 * number


def parent(number: int) -> int:
    """The worker's process: the one above the forkserver of its pool."""
    return psutil.Process(os.getppid()).ppid()


def hang(number: int) -> None:
    while True:
        pass


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.long)])
def start(request: pytest.FixtureRequest) -> StartWorker:
    if request.param == "local":
        return partial(ProcessWorker.start, lease=LEASE)
    join_shared_ray()
    return RayWorkers(lease=LEASE).one


def test_rules_on_workers_hang_and_die_for_themselves_only(start: StartWorker) -> None:
    async def main() -> list[int]:
        config = RulePoolConfig(cpu_seconds=1.0, deadline=PATIENCE_SECONDS)
        async with RuleWorkers(start, 2, config, [__name__]) as pool:
            async with Flow("test") as flow:
                doubled = [
                    flow.start(pool.run(double, number), name=str(number)) for number in range(20)
                ]
            assert [task.result() for task in doubled] == [2 * number for number in range(20)]
            with pytest.raises(RuleLimitError, match=r"hang computed for more than 1 s"):
                await pool.run(hang, 0)
            pids = [worker.pid for worker in pool._workers.values()]
            assert await pool.run(parent, 1, cached=False) in pids
            os.kill(pids[0], signal.SIGKILL)
            os.kill(pids[1], signal.SIGSTOP)
            async with asyncio.timeout(PATIENCE_SECONDS):
                assert not {await ask(pool) for _ in range(4)} & set(pids)
            assert pool.worker_count() in registered_workers()
            assert pool.worker_count().restarts >= 1  # the other may be replaced later
            return pids

    async def ask(pool: RuleWorkers) -> int:
        """As often as it takes, as the budget of a reward does."""
        while True:
            try:
                pid: int = await pool.run(parent, 0, cached=False)
            except RewardError:
                continue
            else:
                return pid

    pids = asyncio.run(main())
    assert still_alive(pids, 10) == []


@pytest.mark.long
def test_a_worker_whose_successors_die_as_they_start_is_replaced_all_the_same(
    start: StartWorker,
) -> None:
    starts: list[int] = []

    async def start_on_a_lost_machine(role: str, make: Make, rank: int) -> Worker:
        starts.append(rank)
        if len(starts) in (2, 3):
            raise WorkerDiedError(role, rank, "its machine is gone")
        return await start(role, make, rank)

    async def main() -> None:
        async with RuleWorkers(start_on_a_lost_machine, 1, RulePoolConfig(), [__name__]) as pool:
            assert await pool.run(double, 1) == 2
            os.kill(pool._workers[0].pid, signal.SIGKILL)
            with suppress(RewardError):  # unless its death was noticed before
                await pool.run(double, 2)
            assert await pool.run(double, 3) == 6

    asyncio.run(main())
    assert len(starts) == 4
