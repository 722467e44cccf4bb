"""A client that is gone gives its sessions back soon; one that lost its connection keeps them, and
a full server says so.
"""

import asyncio
import logging
import subprocess
import sys
import threading

import pytest

from agentrl.errors import EnvError, OutageError
from agentrl.flow import wait_reasons
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.live_env import LiveEnv
from agentrl.hosting.pool import EnvPool
from agentrl.remote import choice, link, sessions
from agentrl.remote.client import RemoteEnv
from agentrl.remote.env_worker import worker_limits
from agentrl.remote.openenv.client import OpenEnv
from agentrl.remote.protocol import Refusal, Reset
from agentrl.remote.sessions import ServerLimits, Sessions
from tests.processes import PATIENCE_SECONDS
from tests.remote.served import served
from tests.remote.test_remote import Counting


async def until(condition) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110  it may be about a server in another thread
            await asyncio.sleep(0.01)


def test_the_sessions_of_a_client_without_a_connection_end_after_a_grace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(sessions, "now", lambda: clock[0])

    async def main() -> None:
        limits = ServerLimits(reconnect_seconds=60, idle_seconds=900)
        all_of_them = Sessions(EnvPool({"counting": Counting}, EnvDeadlines()), "counting", limits)

        async def living_after(seconds: float) -> set[str]:
            clock[0] += seconds
            await all_of_them.expire()
            return {name for name, one in opened.items() if one in all_of_them}

        with all_of_them.connected("mine"), all_of_them.connected("other"):
            with all_of_them.connected("mine"):  # a second connection, as while it reconnects
                opened = {
                    name: (await all_of_them.open(name)).session for name in ("mine", "other")
                }
            opened["by HTTP"] = (await all_of_them.open()).session
            assert await living_after(500) == {"mine", "other", "by HTTP"}
        assert await living_after(59) == {"mine", "other", "by HTTP"}
        with all_of_them.connected("mine"):
            assert await living_after(100) == {"mine", "by HTTP"}
            await all_of_them.reset(opened["by HTTP"], Reset(seq=1, seed=1))
        assert await living_after(59) == {"mine", "by HTTP"}
        assert await living_after(2) == {"by HTTP"}
        opened["late"] = (
            await all_of_them.open("mine")
        ).session  # its client had gone before it was open
        assert await living_after(59) == {"late", "by HTTP"}
        assert await living_after(2) == {"by HTTP"}
        assert await living_after(900) == set()
        await all_of_them.end_all()

    asyncio.run(main())


class NotingPool(EnvPool):
    """An `EnvPool` that notes how many instances it has kept."""

    kept = 0

    def keep(self, name: str, env: LiveEnv) -> None:
        super().keep(name, env)
        self.kept += 1


def test_an_environment_that_is_made_too_late_for_its_client_is_the_next_one_s() -> None:
    may_go_on, made = threading.Event(), list[Counting]()

    def make() -> Counting:
        may_go_on.wait()
        made.append(Counting())
        return made[-1]

    async def main() -> None:
        pool = NotingPool({"slow": make}, EnvDeadlines())
        of_server = Sessions(pool, "slow", ServerLimits(call_seconds=0.01))
        with pytest.raises(Refusal, match="making the environment took over"):
            await of_server.open()
        of_server.limits = ServerLimits()
        may_go_on.set()
        await until(lambda: pool.kept)
        assert (await of_server.open()).session in of_server
        assert len(made) == 1
        await of_server.end_all()

    asyncio.run(main())


def test_a_run_s_own_worker_keeps_a_session_whose_engine_is_frozen_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(sessions, "now", lambda: clock[0])

    async def main() -> None:
        host = EnvPool({"counting": Counting}, EnvDeadlines())
        all_of_them = Sessions(host, "counting", worker_limits(ServerLimits(max_sessions=4)))
        with all_of_them.connected("the run"):
            opened = (await all_of_them.open("the run")).session
            clock[0] += 100_000
            await all_of_them.expire()
            assert opened in all_of_them
        clock[0] += 100  # the run is gone
        await all_of_them.expire()
        assert opened not in all_of_them
        await all_of_them.end_all()

    asyncio.run(main())


def test_a_lost_connection_is_opened_again_before_the_next_request() -> None:
    async def main(server) -> None:
        env = RemoteEnv([server.url])
        await env.reset(seed=1, options={})
        line_of = link.link_to(server.url, None)
        for times in range(3):
            assert line_of._line is not None
            line_of._line.abort()
            await until(lambda times=times: line_of.connections == times + 2)
        assert (await env.step("x"))[4] == {"count": 1}, "the session is the same"
        assert len(server.sessions) == 1
        await env.close()
        await until(lambda: line_of._line is not None and not line_of._line.is_open)
        assert line_of.connections == 4, "without a session there is nothing to reconnect for"

    with served(Counting) as server:
        asyncio.run(main(server))


PLAYS = """
import asyncio, sys
from agentrl.remote.client import RemoteEnv

async def main():
    envs = [RemoteEnv([sys.argv[1]]) for _ in range(3)]
    for env in envs:
        await env.reset(seed=1, options={})
    print("playing", flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


def test_a_full_server_of_a_killed_client_has_room_after_its_grace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choice, "FULL_SECONDS", PATIENCE_SECONDS)

    async def main(url: str) -> None:
        env = RemoteEnv([url])
        await env.reset(seed=7, options={})
        await env.close()

    with served(Counting, max_sessions=3, reconnect_seconds=1.0, retry_seconds=0.1) as server:
        killed = subprocess.Popen(
            [sys.executable, "-c", PLAYS, server.url], stdout=subprocess.PIPE, text=True
        )
        try:
            assert killed.stdout is not None
            assert killed.stdout.readline() == "playing\n"
            assert len(server.sessions) == 3
        finally:
            killed.kill()
            killed.communicate()
        asyncio.run(main(server.url))


@pytest.mark.parametrize("kind", [RemoteEnv, OpenEnv])
def test_a_full_server_is_noticed_and_waited_for_outside_of_a_deadline(
    kind, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wait_for(seconds: float) -> None:
        monkeypatch.setattr(choice, "FULL_SECONDS", seconds)

    wait_for(PATIENCE_SECONDS)
    monkeypatch.setattr("agentrl.flow.waiting.LOGGED_AFTER_SECONDS", 0.1)

    async def main(url: str) -> None:
        first, second = kind([url]), kind([url])
        await first.reset(seed=1, options={})

        async def waits() -> None:
            with pytest.raises(OutageError, match="full"):
                await second.reset(seed=2, options={})

        async with asyncio.TaskGroup() as group:
            group.create_task(waits())
            await until(
                lambda: any("1 episode waits" in record.message for record in caplog.records)
            )
            await until(
                lambda: any("full" in str(each) and url in str(each) for each in wait_reasons())
            )
            wait_for(0.0)
        assert not wait_reasons()
        await first.close()
        await second.reset(seed=2, options={})
        await second.close()

    with (
        caplog.at_level(logging.WARNING),
        served(Counting, max_sessions=1, retry_seconds=0.05) as server,
    ):
        asyncio.run(main(server.url))


def test_sessions_that_a_server_has_lost_are_an_outage_and_those_it_has_ended_a_failure() -> None:
    async def main() -> None:
        with served(Counting) as server:
            env = RemoteEnv([server.url])
            await env.reset(seed=1, options={})
            line_of = link.link_to(server.url, None)
            await server_ends(server)
            with pytest.raises(EnvError, match="404") as failed:
                await env.step("x")
            assert not isinstance(failed.value, OutageError)
            await env.reset(seed=1, options={})
            assert line_of._line is not None
            line_of._line.abort()
            await until(lambda: line_of.connections == 2)
            await server_ends(server)
            with pytest.raises(OutageError, match="lost the sessions"):
                await env.step("x")
            await env.close()

    async def server_ends(server) -> None:
        for one in list(server.sessions._sessions.values()):
            one.used = -1e9
        await until(lambda: len(server.sessions) == 0)

    asyncio.run(main())
