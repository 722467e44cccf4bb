"""Environments over HTTP: `agentrl serve` and `RemoteEnv`, with real servers and sockets."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from agentrl import plugins
from agentrl.envs.base import TextEnv
from agentrl.envs.calculator import Calculator
from agentrl.envs.frozen_lake import ACTIONS, FrozenLake
from agentrl.envs.guess_number import GuessNumber
from agentrl.errors import ConfigError, DeadlineError, EnvError
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.live_env import LiveEnv
from agentrl.hosting.pool import EnvPool
from agentrl.hosting.process_env import ProcessEnv
from agentrl.net.http_client import http_client
from agentrl.protocols import Env, StepResult
from agentrl.remote.client import RemoteEnv, remote
from agentrl.remote.served_socket import ServedSocket
from agentrl.remote.server import EnvServer
from tests.remote.served import served

ROOT = Path(__file__).parents[2]


class Counting(TextEnv):
    """Says how many steps there were. `sleep S` takes S seconds, `raise` raises; `exit` ends the
    process, `end` the episode.
    """

    isolation = "thread"

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        self.count = 0
        return f"seed {seed}"

    def step(self, action: str) -> StepResult:
        self.count += 1
        if action.startswith("sleep"):
            time.sleep(float(action.split()[1]))
        if action == "raise":
            raise RuntimeError("broken game")
        if action == "exit":
            os._exit(3)
        return f"{action} {self.count}", 0.5, action == "end", False, {"count": self.count}


_SERVE = (
    "import sys; sys.argv = ['agentrl', 'serve', 'file:tests/remote/test_remote.py:Counting',"
    " '--port', '0']; from agentrl.cli import main; main()"
)


@contextmanager
def in_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command that serves, in a process of its own, and the address that it says."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip().rpartition(" ")[2]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def counting() -> Iterator[EnvServer]:
    with served(Counting) as server:
        yield server


class Plain:
    """A client that speaks HTTP as curl would."""

    def __init__(self, url: str, http: httpx.AsyncClient) -> None:
        self.url, self.http = url, http

    async def __call__(
        self, method: str, path: str, body: Any = None, **more: Any
    ) -> tuple[int, Any]:
        answer = await self.http.request(method, self.url + path, json=body, **more)
        self.headers = answer.headers
        return answer.status_code, answer.json()

    async def open(self) -> str:
        status, body = await self("POST", "/sessions")
        assert status == 200
        return f"/sessions/{body['session']}"


def plainly(url: str, work: Any) -> Any:
    async def main() -> Any:
        async with http_client() as http:
            return await work(Plain(url, http))

    return asyncio.run(main())


async def play(env: Env, words: tuple[str, ...], episodes: int, seed: int) -> list[Any]:
    """Everything that can be seen of some episodes of a scripted player, on one instance."""
    live = LiveEnv(env, EnvDeadlines())
    rng = random.Random(seed)
    seen: list[Any] = []
    for episode in range(episodes):
        seen.append(await live.reset(seed + episode, {}))
        seen += [live.system_prompt, [dict(tool) for tool in live.tools]]
        for _ in range(12):
            seen.append(await live.step(rng.choice(words)))
            if seen[-1][2] or seen[-1][3]:
                break
    await live.close()
    return seen


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (FrozenLake, (*ACTIONS, "nonsense \u2603")),
        (GuessNumber, tuple("12345")),
        (
            Calculator,
            (
                "7",
                '<tool_call>{"name": "calculate", "arguments": {"expression": "1+1"}}</tool_call>',
            ),
        ),
    ],
)
def test_the_same_scripted_episodes_are_identical_locally_and_remotely(factory, words):
    async def both(url: str) -> None:
        async with asyncio.TaskGroup() as group:
            remotely = [
                group.create_task(play(RemoteEnv([url]), words, 3, seed))
                for seed in range(0, 80, 10)
            ]
        for seed, task in zip(range(0, 80, 10), remotely, strict=True):
            assert task.result() == await play(factory(), words, 3, seed)

    with served(factory) as server:
        asyncio.run(both(server.url))


def test_a_step_that_is_sent_again_gives_the_first_answer_and_happens_once(counting):
    async def work(ask: Plain) -> None:
        at = await ask.open()
        began = await ask("POST", f"{at}/reset", {"seq": 1, "seed": 5})
        assert began == await ask("POST", f"{at}/reset", {"seq": 1, "seed": 5})
        first = await ask("POST", f"{at}/step", {"seq": 2, "action": "a"})
        assert first == await ask("POST", f"{at}/step", {"seq": 2, "action": "a"})
        assert first[1]["observation"] == "a 1"
        assert (await ask("POST", f"{at}/step", {"seq": 3, "action": "a"}))[1][
            "observation"
        ] == "a 2"
        # The retry may overtake the end of the first.
        async with asyncio.TaskGroup() as group:
            body = {"seq": 4, "action": "sleep 0.1"}
            twice = [group.create_task(ask("POST", f"{at}/step", body)) for _ in range(2)]
        assert [task.result()[1]["observation"] for task in twice] == ["sleep 0.1 3"] * 2

    plainly(counting.url, work)


def test_a_number_that_is_skipped_or_old_or_has_other_content_is_a_conflict(counting):
    async def work(ask: Plain) -> None:
        at = await ask.open()
        assert (await ask("POST", f"{at}/step", {"seq": 1, "action": "a"}))[
            0
        ] == 409  # before reset
        assert (await ask("POST", f"{at}/reset", {"seq": 1, "seed": 5}))[0] == 200
        assert (await ask("POST", f"{at}/step", {"seq": 3, "action": "a"}))[0] == 409  # skipped
        assert (await ask("POST", f"{at}/step", {"seq": 2, "action": "a"}))[0] == 200
        assert (await ask("POST", f"{at}/step", {"seq": 2, "action": "b"}))[
            0
        ] == 409  # the last, changed
        assert (await ask("POST", f"{at}/step", {"seq": 1, "action": "a"}))[0] == 409  # old
        assert (await ask("POST", f"{at}/step", {"seq": 3, "action": "end"}))[1]["terminated"]
        assert (await ask("POST", f"{at}/step", {"seq": 4, "action": "a"}))[
            0
        ] == 409  # after the end
        assert (await ask("POST", f"{at}/reset", {"seq": 4, "seed": 6}))[
            0
        ] == 200  # and all of it costs nothing

    plainly(counting.url, work)


def test_hostile_requests_get_the_documented_status_and_harm_nobody():
    async def work(ask: Plain) -> None:
        at = await ask.open()
        assert (await ask("POST", f"{at}/reset", {"seq": 1, "seed": 5}))[0] == 200
        json_type = {"Content-Type": "application/json"}
        for data in (
            b"{not json",
            b"[]",
            b"\xff\xfe",
            b'{"seq": 2}',
            b'{"seq": "x", "action": "a"}',
            b"9" * 500,
            b'{"seq": 2, "action": "\\ud83d"}',  # which the WebSocket refuses too
        ):
            assert (await ask("POST", f"{at}/step", content=data, headers=json_type))[0] == 422
        assert (await ask("POST", f"{at}/step", {"seq": 2, "action": "a" * 5000}))[0] == 413

        async def without_length():
            for _ in range(60):
                yield b"x" * 1000

        assert (await ask("POST", f"{at}/step", content=without_length()))[0] == 413
        for stolen in ("/sessions/guess", "/sessions/" + "a" * 32):
            assert (await ask("POST", f"{stolen}/step", {"seq": 1, "action": "a"}))[0] == 404
            assert (await ask("DELETE", stolen))[0] == 404
        assert (await ask("POST", f"{at}/step", {"seq": 2, "action": "a"}))[
            0
        ] == 200  # unharmed by all of it
        assert (await ask("POST", f"{at}/step", {"seq": 3, "action": "raise"}))[0] == 500
        assert (await ask("POST", f"{at}/step", {"seq": 4, "action": "a"}))[
            0
        ] == 404  # what failed is ended
        other = await ask.open()
        assert (await ask("DELETE", other))[0] == 200
        assert (await ask("POST", f"{other}/reset", {"seq": 1, "seed": 5}))[0] == 404

    with served(Counting, max_body_bytes=4096) as server:
        plainly(server.url, work)


def test_hostile_frames_are_answered_and_an_oversized_one_ends_its_own_socket_only():
    async def work(ask: Plain) -> None:
        async with (
            aiohttp.ClientSession() as sockets,
            sockets.ws_connect(f"{ask.url}/sessions/ws") as hostile,
            sockets.ws_connect(f"{ask.url}/sessions/ws") as other,
        ):
            opens = '{"id": 1, "op": "open"}'
            for data in (
                "{",
                "{}",
                "[1]",
                '[{"id": 1, "op": "steal"}]',
                '[{"id": 1, "op": "step"}]',
                "\x00",
                opens,
            ):
                await hostile.send_str(data)
                assert [(one["id"], one["status"]) for one in await hostile.receive_json()] == [
                    (None, 422)
                ]
            await hostile.send_bytes(b"\xff\xff")
            assert [one["status"] for one in await hostile.receive_json()] == [422]
            await hostile.send_str("x" * 10_000)
            assert (await hostile.receive()).data == 1009
            await other.send_json([{"id": 9, "op": "open"}])
            answer = (await other.receive_json())[0]
            assert (answer["id"], answer["status"]) == (9, 200)

    with served(Counting, max_body_bytes=4096) as server:
        plainly(server.url, work)


def test_who_has_no_token_gets_nothing():
    async def work(ask: Plain) -> None:
        for wrong in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            assert (await ask("POST", "/sessions", headers=wrong))[0] == 401
        async with aiohttp.ClientSession() as sockets:
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await sockets.ws_connect(f"{ask.url}/sessions/ws")
        assert refused.value.status == 403
        assert (await ask("POST", "/sessions", headers={"Authorization": "Bearer secret"}))[
            0
        ] == 200
        assert (await ask("GET", "/health"))[0] == 200
        wrong_env = RemoteEnv([ask.url], token="wrong")
        with pytest.raises(ConfigError, match="AGENTRL_REMOTE_TOKEN"):
            await wrong_env.reset(seed=1, options={})
        right = RemoteEnv([ask.url], token="secret")
        assert await right.reset(seed=1, options={}) == ("seed 1", {})
        await right.close()

    with served(Counting, token="secret") as server:
        plainly(server.url, work)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 403),
        ("127.0.0.1.evil.example:8800", 403),
        ("[::1", 403),
        ("localhost:8800", 200),
        ("LOCALHOST", 200),
        ("[::1]:8800", 200),
        ("10.1.2.3", 200),
    ],
)
def test_without_a_token_a_name_that_was_made_to_lead_here_is_refused(
    counting, host: str, status: int
) -> None:
    async def work(ask: Plain) -> None:
        assert (await ask("POST", "/sessions", headers={"Host": host}))[0] == status

    plainly(counting.url, work)


def test_others_are_not_let_in_without_a_token():
    with pytest.raises(ConfigError, match="token"):
        EnvServer(Counting, host="0.0.0.0")


def test_a_full_server_says_when_to_come_again_and_remote_envs_do():
    async def work(ask: Plain) -> None:
        at = await ask.open()
        assert (await ask("POST", "/sessions"))[0] == 429
        assert ask.headers["Retry-After"] == "1"
        async with asyncio.TaskGroup() as group:
            env = RemoteEnv([ask.url])
            waiting = group.create_task(env.reset(seed=3, options={}))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await ask("DELETE", at)
        assert waiting.result() == ("seed 3", {})
        await env.close()

    with served(Counting, max_sessions=1, retry_seconds=0.05) as server:
        plainly(server.url, work)


@pytest.mark.slow
def test_sessions_in_processes_are_bounded_and_one_that_dies_takes_no_other_along():
    async def work(ask: Plain) -> None:
        dying, other = await ask.open(), await ask.open()
        status, body = await ask("POST", "/sessions")
        assert (status, "--max-processes" in body["detail"]) == (429, True)
        for at in (dying, other):
            assert (await ask("POST", f"{at}/reset", {"seq": 1, "seed": 5}))[0] == 200
        status, body = await ask("POST", f"{dying}/step", {"seq": 2, "action": "exit"})
        assert (status, "exit status 3" in body["detail"]) == (500, True)
        assert (await ask("POST", f"{other}/step", {"seq": 2, "action": "a"}))[1][
            "observation"
        ] == "a 1"
        assert await ask.open()  # there is room again
        assert (await ask("GET", "/health"))[1]["max_sessions"] == 2

    with served(
        partial(ProcessEnv, "file:tests/remote/test_remote.py:Counting"), max_processes=2
    ) as server:
        plainly(server.url, work)


@pytest.mark.slow
def test_an_idle_session_expires_and_reset_opens_another():
    async def work(ask: Plain) -> None:
        at = await ask.open()
        env = RemoteEnv([ask.url])
        await env.reset(seed=3, options={})
        await asyncio.sleep(0.9)
        assert (await ask("POST", f"{at}/reset", {"seq": 1, "seed": 5}))[0] == 404
        with pytest.raises(EnvError, match="404"):
            await env.step("a")
        assert await env.reset(seed=4, options={}) == ("seed 4", {})
        await env.close()

    with served(Counting, idle_seconds=0.4) as server:
        plainly(server.url, work)


def test_a_late_answer_is_never_given_to_the_next_request(counting):
    async def main(url: str) -> None:
        envs = [RemoteEnv([url]) for _ in range(6)]
        for seed, env in enumerate(envs):
            await env.reset(seed=seed, options={})
        late, others = LiveEnv(envs[0], EnvDeadlines(step=0.05)), envs[1:]
        with pytest.raises(DeadlineError):
            await late.step("sleep 0.2")
        for turn in range(1, 40):
            async with asyncio.TaskGroup() as group:
                steps = [
                    group.create_task(env.step(f"{number}")) for number, env in enumerate(others)
                ]
            assert [task.result()[0] for task in steps] == [
                f"{number} {turn}" for number in range(len(others))
            ]
            await asyncio.sleep(0.005)
        await late.close()
        for env in others:
            await env.close()

    asyncio.run(main(counting.url))


def test_cancelled_waits_in_any_order_leave_the_others_served(counting):
    async def one(url: str, number: int, rng: random.Random) -> int:
        env, turn, cancelled = RemoteEnv([url]), 0, 0
        await env.reset(seed=number, options={})
        for _ in range(15):
            try:
                async with asyncio.timeout(rng.choice([0.0, 0.001, 0.004, 5.0, 5.0])):
                    turn += 1
                    assert (await env.step(f"{number}"))[0] == f"{number} {turn}"
            except TimeoutError:
                cancelled, turn = cancelled + 1, 0
                await env.close()  # as LiveEnv does with what missed its deadline
                env = RemoteEnv([url])
                await env.reset(seed=number, options={})
        await env.close()
        return cancelled

    async def main(url: str) -> None:
        rng = random.Random(0)
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(url, number, rng)) for number in range(20)]
        assert sum(task.result() for task in tasks) > 20

    asyncio.run(main(counting.url))


def test_a_blocking_environment_blocks_no_other_and_is_ended_at_its_deadline():
    async def main(url: str) -> None:
        slow, quick = RemoteEnv([url]), RemoteEnv([url])
        await slow.reset(seed=1, options={})
        await quick.reset(seed=2, options={})
        async with asyncio.TaskGroup() as group:
            hung = group.create_task(asyncio.wait_for(_error(slow.step("sleep 1.2")), 60))
            await asyncio.sleep(0.01)
            for turn in range(1, 20):
                assert (await quick.step("a"))[0] == f"a {turn}"
            assert not hung.done()
        assert "504" in hung.result()
        await slow.close()
        await quick.close()

    async def _error(step: Any) -> str:
        with pytest.raises(EnvError) as raised:
            await step
        return str(raised.value)

    with served(Counting, call_seconds=0.6) as server:
        asyncio.run(main(server.url))


def test_wrong_options_are_an_error_of_the_config():
    async def main(url: str) -> None:
        env = RemoteEnv([url])
        with pytest.raises(ConfigError, match="sise"):
            await env.reset(seed=1, options={"sise": 4})
        await env.close()

    with served(FrozenLake) as server:
        asyncio.run(main(server.url))


@pytest.mark.slow
def test_a_server_that_is_killed_costs_its_episodes_and_the_pool_goes_on():
    async def main(dying: subprocess.Popen[str], first: str, second: str) -> None:
        pool = remote(f"{first},{second}")
        host = EnvPool({"pool": pool}, EnvDeadlines())
        envs = [host.acquire("pool") for _ in range(6)]
        for seed, env in enumerate(envs):
            await env.reset(seed, {})
        dying.kill()
        dying.wait()
        answers = [await _answer_or_error(env) for env in envs]
        assert [answer for answer in answers if answer == "a 1"] == [
            "a 1"
        ] * 3  # the load was shared
        assert sum(first in answer for answer in answers) == 3
        for env in envs:
            await host.release("pool", env)
        again = [host.acquire("pool") for _ in range(6)]
        for seed, env in enumerate(again):
            assert await env.reset(seed, {}) == (f"seed {seed}", {})
            assert (await env.step("a"))[0] == "a 1"
        for env in again:
            await env.close()

    async def _answer_or_error(env: LiveEnv) -> str:
        try:
            return (await env.step("a"))[0]
        except EnvError as error:
            return str(error)

    with in_process() as (process, url), served(Counting) as second:
        asyncio.run(main(process, url, second.url))


def test_nobody_at_the_address_is_an_env_error_and_no_address_a_config_error():
    async def main() -> None:
        env = RemoteEnv(["http://127.0.0.1:9"])
        with pytest.raises(EnvError, match=r"127\.0\.0\.1:9"):
            await env.reset(seed=1, options={})
        await env.close()

    asyncio.run(main())
    with pytest.raises(ConfigError, match="http://host:port"):
        remote("localhost")


def test_a_lost_socket_is_opened_again_and_the_step_happens_once(counting):
    async def main(url: str) -> None:
        env = RemoteEnv([url])
        await env.reset(seed=1, options={})
        async with asyncio.TaskGroup() as group:
            step = group.create_task(env.step("sleep 0.2"))
            await asyncio.sleep(0.05)
            env._lease.link._line.abort()
        assert step.result()[0] == "sleep 0.2 1"
        assert (await env.step("b"))[0] == "b 2"
        await env.close()

    asyncio.run(main(counting.url))


@pytest.mark.parametrize(
    ("origin", "status"),
    [("https://elsewhere.example", 403), ("null", 403), ("http://[", 403), ("", 200)],
)
def test_a_web_page_of_another_site_cannot_play(counting, origin: str, status: int) -> None:
    async def work(ask: Plain) -> None:
        headers = {"Origin": origin or ask.url}
        assert (await ask("POST", "/sessions", headers=headers))[0] == status
        async with aiohttp.ClientSession(headers=headers) as sockets:
            if status == 200:
                await (await sockets.ws_connect(f"{ask.url}/sessions/ws")).close()
            else:
                with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                    await sockets.ws_connect(f"{ask.url}/sessions/ws")
                assert refused.value.status == 403

    plainly(counting.url, work)


def test_metrics_and_health_and_the_schema_are_served():
    async def work(ask: Plain) -> None:
        at = await ask.open()
        await ask("POST", f"{at}/reset", {"seq": 1, "seed": 5})
        await ask("POST", f"{at}/step", {"seq": 2, "action": "a"})
        await ask("POST", f"{at}/step", {"seq": 2, "action": "a"})
        await ask("POST", f"{at}/step", {"seq": 7, "action": "a"})
        text = (await ask.http.get(f"{ask.url}/metrics")).text
        assert "agentrl_env_sessions 1.0" in text
        assert 'agentrl_env_seconds_count{call="step"} 1.0' in text
        assert "agentrl_env_repeated_total 1.0" in text
        assert 'agentrl_env_refused_total{status="409"} 1.0' in text
        assert (await ask("GET", "/health"))[1]["sessions"] == 1
        assert "/sessions/{session}/step" in (await ask("GET", "/openapi.json"))[1]["paths"]

    with served(Counting) as server:
        plainly(server.url, work)


async def drained(ask: Plain, tell: Callable[[], None]) -> None:
    at, waiting = await ask.open(), await ask.open()
    await ask("POST", f"{at}/reset", {"seq": 1, "seed": 5})
    tell()
    for _ in range(500):
        if (await ask("GET", "/health"))[0] == 503:
            break
        await asyncio.sleep(0.01)
    assert (await ask("POST", "/sessions"))[0] == 503
    assert (await ask("POST", f"{waiting}/reset", {"seq": 1, "seed": 5}))[0] in (503, 404)
    await asyncio.sleep(0.3)  # it looks ten times a second whether it may end
    assert (await ask("POST", f"{at}/step", {"seq": 2, "action": "a"}))[1]["observation"] == "a 1"
    assert (await ask("POST", f"{at}/step", {"seq": 3, "action": "end"}))[1]["terminated"]


def test_a_server_that_drains_lets_running_episodes_end_and_begins_no_more():
    with served(Counting, drain_seconds=30) as server:
        plainly(
            server.url, lambda ask: drained(ask, lambda: server.handle_exit(signal.SIGTERM, None))
        )
        for _ in range(300):
            if server.should_exit:
                break
            time.sleep(0.01)
        assert server.should_exit


def test_a_server_that_drains_waits_for_no_episode_longer_than_it_may():
    async def work(ask: Plain, server: EnvServer) -> None:
        at = await ask.open()
        await ask("POST", f"{at}/reset", {"seq": 1, "seed": 5})
        server.handle_exit(signal.SIGTERM, None)

    with served(Counting, drain_seconds=0.2) as server:
        plainly(server.url, lambda ask: work(ask, server))
        for _ in range(300):
            if server.should_exit:
                break
            time.sleep(0.01)
        assert server.should_exit


def test_a_server_that_drains_sends_its_last_answer(monkeypatch):
    sending = ServedSocket.send

    async def send_late(self: ServedSocket, text: bytes) -> None:
        await asyncio.sleep(0.2)
        await sending(self, text)

    monkeypatch.setattr(ServedSocket, "send", send_late)

    async def main(server: EnvServer) -> None:
        env = RemoteEnv([server.url])
        await env.reset(seed=1, options={})
        server.handle_exit(signal.SIGTERM, None)
        assert (await env.step("end"))[2]
        await env.close()

    with served(Counting) as server:
        asyncio.run(main(server))


@pytest.mark.slow
def test_sigterm_drains_the_command_which_then_exits_with_0():
    with in_process() as (process, url):
        plainly(url, lambda ask: drained(ask, lambda: process.send_signal(signal.SIGTERM)))
        assert process.wait(10) == 0


def test_a_config_names_a_server_where_it_named_an_environment():
    async def main(url: str) -> None:
        for name in (url, f"remote:{url},http://127.0.0.1:9"):
            host = EnvPool({name: plugins.load("envs", name)}, EnvDeadlines())
            env = host.acquire(name)
            assert env.env.isolation == "inline"
            assert (await env.reset(3, {"size": 4}))[0].count("P") == 1
            await host.release(name, env)
            await host.close()

    with served(FrozenLake) as server:
        asyncio.run(main(server.url))


def test_the_schema_says_what_each_status_means(counting):
    async def work(ask: Plain) -> None:
        _, schema = await ask("GET", "/openapi.json")
        step = schema["paths"]["/sessions/{session}/step"]["post"]["responses"]
        assert set(step) == {
            *("200", "401", "404", "408", "409", "410", "413", "422", "500", "502", "504")
        }
        assert "seq" in step["409"]["description"]
        seq = schema["components"]["schemas"]["Step"]["properties"]["seq"]
        assert seq["description"].startswith("One more")

    plainly(counting.url, work)
