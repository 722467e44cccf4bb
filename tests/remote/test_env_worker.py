"""Environments on workers: a dead or hung worker costs its episodes, and is replaced."""

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentrl.cluster.processes import ProcessWorker
from agentrl.cluster.ray_actors import RayWorkers
from agentrl.cluster.worker_registry import WorkerCount, registered_workers
from agentrl.cluster.workers import StartWorker, Worker
from agentrl.errors import ConfigError, EnvError, LethalTaskError, OutageError, WorkerDiedError
from agentrl.flow import Flow, run_virtual
from agentrl.protocols import Env, ResetResult, StepResult
from agentrl.remote.choice import UnreachableError
from agentrl.remote.env_worker import EnvWorker, _Pool, env_workers
from agentrl.remote.sessions import ServerLimits
from tests.cluster.shared_ray import join_shared_ray
from tests.processes import PATIENCE_SECONDS, hit, still_alive, wait_for_signal
from tests.sandbox.away import Docked, docked

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


def worker_of(
    make: Callable[[], Callable[[], Telling | Docked]],
) -> Callable[[str, int], EnvWorker]:
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
            assert WorkerCount("env", 1, 1, restarts=1) in registered_workers()
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
        async with env_workers(
            partial(ProcessWorker.start, lease=LEASE), 1, worker_of(telling)
        ) as make:
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


def test_a_replaced_worker_waits_for_sandboxes_that_are_away(
    tmp_path: Path,
) -> None:
    engine = tmp_path / "engine"
    options = {"file": str(engine)}

    async def main() -> None:
        async with env_workers(ProcessWorker.start, 1, worker_of(docked)) as make:
            with pytest.raises(ConfigError, match="could not reach the engine"):
                await make().reset(seed=1, options=options)
            engine.touch()
            pid = int((await make().reset(seed=1, options=options))[0])
            engine.unlink()
            os.kill(pid, signal.SIGKILL)
            await asyncio.to_thread(wait_for_signal, pid)
            with pytest.raises(OutageError, match="could not reach the engine"):
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await make().reset(seed=1, options=options)
            engine.touch()
            assert int((await make().reset(seed=1, options=options))[0]) != pid

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


class Lethal(Telling):
    """Takes its process down: in the reset of seed 13, and in the steps of seed 14."""

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetResult:
        self.seed = seed
        if seed == 13:
            os._exit(1)
        return "begun", {}

    def step(self, action: str) -> StepResult:
        if self.seed == 14:
            os._exit(1)
        return "over", 1.0, True, False, {}


def lethal() -> Callable[[], Lethal]:
    return Lethal


def test_a_task_that_workers_die_of_is_set_aside_and_others_go_on() -> None:
    async def main() -> None:
        async with env_workers(ProcessWorker.start, 1, worker_of(lethal)) as make:
            for _ in range(2):
                with pytest.raises(
                    LethalTaskError, match="died 2 times while they worked on the task of seed 13"
                ):
                    await begin(make(), 13)
            for failure in (UnreachableError, LethalTaskError):
                env = await begin(make(), 14)
                with pytest.raises(failure):
                    await env.step("on")
            with pytest.raises(LethalTaskError, match="seed 14"):
                await begin(make(), 14)
            env = await begin(make(), 15)
            assert (await env.step("on"))[1] == 1.0
            assert WorkerCount("env", 1, 1, restarts=4, set_aside=2) in registered_workers()

    async def begin(env: Env, seed: int) -> Env:
        """Begin an episode, as soon as a worker lives."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                with suppress(UnreachableError):
                    await env.reset(seed=seed, options={})
                    return env

    asyncio.run(main())


class Dying:
    """A worker whose server ends at once, or never."""

    def __init__(self, url: str, lives: bool) -> None:
        self.url = url
        self.lives = lives

    async def call(self, method: str, *args: Any) -> Any:
        if method == "open":
            return self.url
        await asyncio.sleep(1e9 if self.lives else 1)
        raise WorkerDiedError("env", 1, "killed")

    async def check(self) -> None:
        """It says itself when it is dead."""

    async def stop(self) -> None:
        """There is nothing to stop."""


def test_a_worker_that_dies_again_and_again_beside_one_that_works_is_given_up() -> None:
    starts: list[int] = []

    async def start(role: str, make: Any, rank: int) -> Worker:
        starts.append(rank)
        return Dying(f"http://127.0.0.1:{rank + 1}", lives=rank == 0)

    async def main() -> None:
        pool = _Pool(start, worker_of(telling), "token", 2, restarts=3)
        async with Flow("pool") as flow:
            for rank in range(2):
                flow.start(pool.keep(rank), name=str(rank))
            while True:
                await asyncio.sleep(0.1)
                pool.works("http://127.0.0.1:1")

    said = (
        "env 1 died: killed; it was restarted 3 times in a row without an episode begun in between"
    )
    with pytest.raises(WorkerDiedError, match=said):
        run_virtual(main)
    assert starts == [0, 1, 1, 1, 1]
