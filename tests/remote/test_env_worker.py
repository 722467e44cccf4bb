"""Environments on workers: a dead or hung worker costs its episodes, and another takes its place."""

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest

from agentrl.cluster.processes import ProcessWorker
from agentrl.cluster.ray_actors import RayWorkers
from agentrl.cluster.roster import Crew, roster
from agentrl.cluster.workers import StartWorker
from agentrl.errors import ConfigError, EnvError, WorkerDiedError
from agentrl.protocols import ResetResult, StepResult
from agentrl.remote.env_worker import EnvWorker, env_workers
from agentrl.remote.sessions import ServerLimits
from tests.cluster.shared_ray import join_shared_ray
from tests.processes import PATIENCE_SECONDS, hit, still_alive, wait_for_signal

pytestmark = pytest.mark.slow
LEASE = 2.0


class Telling:
    """Says which process it lives in."""

    isolation = "inline"

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetResult:
        return str(os.getpid()), {}

    def step(self, action: str) -> StepResult:
        return f"{os.getpid()} {action}", 0.0, False, False, {}

    def close(self) -> None:
        pass


def telling() -> Callable[[], Telling]:
    return Telling


def missing() -> Callable[[], Telling]:
    raise ConfigError("there is no such environment")


def breaking() -> Callable[[], Telling]:
    os._exit(1)


def worker_of(make: Callable[[], Callable[[], Telling]]) -> Callable[[str, int], EnvWorker]:
    return partial(EnvWorker, make, ServerLimits(), "127.0.0.1")


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.long)])
def start(request: pytest.FixtureRequest) -> StartWorker:
    if request.param == "local":
        return partial(ProcessWorker.start, lease=LEASE)
    join_shared_ray()
    return RayWorkers(lease=LEASE).one


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_dies_or_hangs_costs_its_episode_and_another_takes_its_place(
    start: StartWorker, signal_number: signal.Signals
) -> None:
    async def main() -> set[int]:
        async with env_workers(start, 1, worker_of(telling)) as make:
            first, second = make(), make()
            before = int((await first.reset(seed=1, options={}))[0])
            assert (await first.step("go"))[0] == f"{before} go"
            await asyncio.to_thread(hit, before, signal_number)
            with pytest.raises((EnvError, TimeoutError)):
                async with asyncio.timeout(LEASE):
                    await first.step("on")
            async with asyncio.timeout(PATIENCE_SECONDS):
                after = int((await second.reset(seed=1, options={}))[0])
            assert after not in (before, os.getpid())
            assert (await second.step("go"))[0] == f"{after} go"
            assert Crew("env", 1, 1, restarts=1) in roster()
            return {before, after}

    pids = asyncio.run(main())
    assert still_alive(pids, 10) == []


def test_an_episode_does_not_wait_for_a_worker_on_a_machine_that_has_vanished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its connections stay open, and nobody can kill it: here it is stopped, and not killed."""
    left: list[int] = []
    monkeypatch.setattr(ProcessWorker, "stop", _forgotten)

    async def main() -> None:
        async with env_workers(partial(ProcessWorker.start, lease=LEASE), 1, worker_of(telling)) as make:
            env = make()
            left.append(int((await env.reset(seed=1, options={}))[0]))
            await asyncio.to_thread(hit, left[0], signal.SIGSTOP)
            async with asyncio.timeout(PATIENCE_SECONDS):
                with pytest.raises(EnvError):
                    await env.step("on")
            async with asyncio.timeout(PATIENCE_SECONDS):
                left.append(int((await env.reset(seed=1, options={}))[0]))
            assert (await env.step("go"))[0] == f"{left[1]} go"
            await env.close()

    try:
        asyncio.run(main())
    finally:
        for pid in left:
            os.kill(pid, signal.SIGKILL)


async def _forgotten(worker: ProcessWorker) -> None:
    """Instead of killing it."""
    worker._executor.shutdown(wait=False)


def test_workers_that_are_killed_again_and_again_end_nothing_while_episodes_begin_on_them() -> None:
    async def main() -> None:
        async with env_workers(ProcessWorker.start, 1, worker_of(telling)) as make:
            for _ in range(4):
                async with asyncio.timeout(PATIENCE_SECONDS):
                    pid = int((await make().reset(seed=1, options={}))[0])
                os.kill(pid, signal.SIGKILL)
                await asyncio.to_thread(wait_for_signal, pid)

    asyncio.run(main())


def test_an_environment_that_is_not_there_is_said_before_anything_starts() -> None:
    async def main() -> None:
        async with env_workers(ProcessWorker.start, 1, worker_of(missing)):
            pytest.fail("it began")

    with pytest.raises(ConfigError, match="no such environment"):
        asyncio.run(main())


def test_workers_that_die_as_soon_as_they_live_end_the_run() -> None:
    async def main() -> None:
        async with env_workers(ProcessWorker.start, 1, worker_of(breaking)):
            pytest.fail("it began")

    with pytest.raises(WorkerDiedError, match="env 0 died"):
        asyncio.run(main())
