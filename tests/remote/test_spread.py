"""A server over processes: a session keeps to its process, and one that dies costs its own."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.cluster.local import LocalCluster
from agentrl.cluster.worker_registry import WorkerCount
from agentrl.errors import EnvError, LethalTaskError, OutageError
from agentrl.remote.client import RemoteEnv
from agentrl.remote.spread_server import SpreadServer
from tests.processes import PATIENCE_SECONDS
from tests.remote.served import served, spread
from tests.remote.telling import Telling, hanging, telling

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[SpreadServer]:
    with spread(telling, 2) as listening:
        yield listening


def play(url: str, work: Any, sessions: int = 6) -> Any:
    """Some work on environments at one address, which are then closed."""

    async def main() -> Any:
        envs = [RemoteEnv([url]) for _ in range(sessions)]
        try:
            return await work(envs)
        finally:
            for env in envs:
                await env.close()

    return asyncio.run(main())


async def begin(env: RemoteEnv, seed: int = 1, **options: Any) -> int:
    """The process of a new episode."""
    return int((await env.reset(seed=seed, options=options))[0])


def counted(server: SpreadServer) -> WorkerCount:
    assert server.sessions.processes is not None
    return server.sessions.processes()


def has_restarted(server: SpreadServer, restarts: int) -> bool:
    return counted(server) == replace(counted(server), alive=2, restarts=restarts)


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def test_sessions_are_spread_and_each_keeps_to_its_process(server: SpreadServer) -> None:
    async def work(envs: list[RemoteEnv]) -> None:
        pids = [await begin(env, seed) for seed, env in enumerate(envs)]
        assert len(set(pids)) == 2
        assert {pids.count(pid) for pid in pids} == {3}
        assert os.getpid() not in pids
        for _ in range(2):
            for pid, env in zip(pids, envs, strict=True):
                assert (await env.step("go"))[0] == f"{pid} go"

    play(server.url, work)


def test_a_killed_process_costs_its_own_episodes_and_is_started_again(server: SpreadServer) -> None:
    restarts = counted(server).restarts

    async def work(envs: list[RemoteEnv]) -> None:
        pids = [await begin(env, seed) for seed, env in enumerate(envs)]
        os.kill(pids[0], signal.SIGKILL)
        for pid, env in zip(pids, envs, strict=True):
            if pid != pids[0]:
                assert (await env.step("on"))[0] == f"{pid} on"
                continue
            # No reward, and no failure of the environment's: the episode is played again.
            with pytest.raises(OutageError, match="answered 502"):
                await env.step("on")
            await env.close()
        await until(partial(has_restarted, server, restarts + 1))
        again = [await begin(env, seed) for seed, env in enumerate(envs)]
        assert pids[0] not in again
        assert {again.count(pid) for pid in again} == {3}  # the new one has its share
        health = (await asyncio.to_thread(httpx.get, f"{server.url}/health")).json()
        assert health["processes"] == {"serving": 2, "count": 2, "restarts": restarts + 1}

    play(server.url, work)


def test_a_task_that_processes_die_of_is_set_aside_by_the_server(server: SpreadServer) -> None:
    async def work(envs: list[RemoteEnv]) -> None:
        before = counted(server).restarts
        for deaths, failure in enumerate((OutageError, LethalTaskError), start=1):
            await begin(envs[0], 13)
            with pytest.raises(failure):
                await envs[0].step("die")
            await envs[0].close()
            await until(partial(has_restarted, server, before + deaths))
        with pytest.raises(LethalTaskError, match="seed 13"):
            await begin(envs[1], 13)
        await begin(envs[1], 14)

    play(server.url, work)


def test_a_server_over_processes_drains_and_closes_its_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.remote.choice.FULL_SECONDS", 0.0)
    closed = tmp_path / "closed"
    with spread(telling, 1, drain_seconds=PATIENCE_SECONDS) as draining:

        async def work(envs: list[RemoteEnv]) -> None:
            await begin(envs[0], closed=str(closed))
            draining.handle_exit(signal.SIGTERM, None)
            with pytest.raises(EnvError):
                await begin(envs[1])
            assert (await envs[0].step("go"))[1] == 0.5
            assert (await envs[0].step("end"))[2]
            await until(lambda: draining.should_exit)

        play(draining.url, work, 2)
    assert closed.read_text() == "closed"


def test_a_second_signal_ends_a_server_over_processes_with_its_episodes() -> None:
    with spread(telling, 1, drain_seconds=1e6) as ending:

        async def work(envs: list[RemoteEnv]) -> None:
            await begin(envs[0])
            for _ in range(2):
                ending.handle_exit(signal.SIGTERM, None)
            await until(lambda: not ending.started or ending.should_exit)

        play(ending.url, work, 1)


def test_a_signal_while_the_processes_start_ends_the_server() -> None:
    server = SpreadServer(LocalCluster(LocalCluster.Config()), 1, hanging)

    async def main() -> None:
        async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as group:
            group.create_task(server.serve())
            await asyncio.sleep(0.5)
            server.handle_exit(signal.SIGTERM, None)
        assert not server.started

    asyncio.run(main())


def test_an_address_that_comes_back_gets_its_share_of_sessions_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentrl.remote.link.REST_SECONDS", 0.0)

    async def main() -> None:
        with ExitStack() as stays, ExitStack() as goes:
            urls = [stack.enter_context(served(Telling)).url for stack in (stays, goes)]
            envs = [RemoteEnv(urls) for _ in range(6)]

            async def shares() -> list[int]:
                for env in envs:
                    with suppress(OutageError):
                        await begin(env)
                return [[env.server for env in envs].count(url) for url in urls]

            assert await shares() == [3, 3]
            await asyncio.to_thread(goes.close)
            await shares()  # those there find out
            assert await shares() == [6, 0]
            port = int(urls[1].rpartition(":")[2])
            await asyncio.to_thread(goes.enter_context, served(Telling, port=port))
            assert await shares() == [3, 3]
            for env in envs:
                await env.close()

    asyncio.run(main())
