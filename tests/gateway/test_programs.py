"""Programs as episodes: functions, commands, agents elsewhere. How they end, and that nothing of
them is left.
"""

import asyncio
import os
import sys
import tempfile
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest

from agentrl.errors import ConfigError, EnvError
from agentrl.gateway.address import scheme
from agentrl.gateway.command_agent import CommandAgent
from agentrl.gateway.config import GatewayConfig
from agentrl.gateway.outcome import AgentOutcome
from agentrl.gateway.program import ProgramAssignment
from agentrl.gateway.remote_agents import RemoteAgents
from agentrl.gateway.server import serving
from agentrl.gateway.session_registry import SessionRegistry
from agentrl.rollout.assignment import Assignment
from agentrl.runs.temp import RunTemp
from agentrl.trajectory import Failed, Task, Terminated
from tests.gateway.served import runner_on, saying, until
from tests.processes import PATIENCE_SECONDS, processes_with

TASK = Task("agent:x", 7, {"size": 3}, "t1")


def played(
    address: str,
    *,
    seconds: float = PATIENCE_SECONDS,
    isolation=None,
    text: str = "left",
    task=TASK,
):
    async def main():
        registry, engine = SessionRegistry(GatewayConfig()), saying(text)
        runner = runner_on(
            registry, engine, scheme(address).program(registry, isolation, None), seconds
        )
        async with engine, serving(registry):
            return (await runner.play(Assignment("e", task, 0)))[0]

    return asyncio.run(main())


@pytest.mark.parametrize("isolation", [None, "process"])
def test_a_function_plays_an_episode_in_a_thread_or_in_a_process(isolation):
    trajectory = played("tests.gateway.programs:follow", isolation=isolation)
    assert trajectory.status == Terminated()
    assert len(trajectory.turns) == 1
    assert trajectory.env_return in (0.0, 1.0)


@pytest.mark.parametrize("isolation", [None, "process"])
def test_each_episode_of_a_function_has_the_options_of_its_task(isolation):
    task = Task("agent:x", 7, {"size": 3, "deep": []}, "t1")
    address = "tests.gateway.programs:spoils_options"
    assert [played(address, isolation=isolation, task=task).env_return for _ in range(2)] == [
        4.0,
        4.0,
    ]
    assert task.options == {"size": 3, "deep": []}


@pytest.mark.parametrize("isolation", [None, "process"])
def test_a_function_that_raises_has_failed(isolation):
    trajectory = played("tests.gateway.programs:crashes", isolation=isolation)
    assert isinstance(trajectory.status, Failed)
    assert trajectory.status.layer == "environment"
    assert "the agent is lost" in trajectory.status.error


def test_a_function_that_hangs_is_cancelled_at_the_deadline():
    trajectory = played("tests.gateway.programs:hangs", seconds=2.0)
    assert isinstance(trajectory.status, Failed)
    assert "rollout.deadlines.episode" in trajectory.status.error


def run_command(command: str, **variables: str) -> AgentOutcome:
    assignment = ProgramAssignment(
        TASK, "http://127.0.0.1:1", f"agentrl-key-{os.getpid()}-of-a-test"
    )
    return asyncio.run(CommandAgent(command, variables).run(assignment))


SCRIPT = """
import json, os
assert os.environ["OPENAI_BASE_URL"] == "http://127.0.0.1:1/v1"
assert os.environ["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:1"
task = json.loads(os.environ["AGENTRL_TASK"])
assert task == {"env": "agent:x", "seed": 7, "options": {"size": 3}, "id": "t1"}
with open(os.environ["AGENTRL_REWARD_FILE"], "w") as file:
    json.dump({"reward": 0.5, "success": True}, file)
"""


def test_a_command_gets_its_task_and_writes_its_reward(tmp_path):
    file = tmp_path / "agent.py"
    file.write_text(SCRIPT)
    assert run_command(f"{sys.executable} {file}") == AgentOutcome(0.5, True)


def test_a_command_that_writes_nothing_leaves_the_reward_to_others():
    assert run_command("true") == AgentOutcome()


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("echo no idea; exit 3", "status 3: no idea"),
        ("exit 7", "status 7: it printed nothing"),
        ('echo much > "$AGENTRL_REWARD_FILE"', "wrote 'much"),
        ('echo NaN > "$AGENTRL_REWARD_FILE"', "returned nan"),
        ('echo 1e999 > "$AGENTRL_REWARD_FILE"', "returned inf"),
        ('printf "%0400d" 9 | tr 0 9 > "$AGENTRL_REWARD_FILE"', "returned 9999"),
        ('printf "%09999d" 9 | tr 0 9 > "$AGENTRL_REWARD_FILE"', "wrote '9999"),
        ('printf "%09999d" 0 | tr 0 "[" > "$AGENTRL_REWARD_FILE"', r"wrote '\[\["),
        ('echo "[1]" > "$AGENTRL_REWARD_FILE"', r"returned \[1\]"),
        ('head -c 99 /dev/urandom > "$AGENTRL_REWARD_FILE"', "cannot be read"),
        ('mkdir "$AGENTRL_REWARD_FILE"', "cannot be read"),
        ('mkfifo "$AGENTRL_REWARD_FILE"', "cannot be read"),
        ('ln -s /dev/zero "$AGENTRL_REWARD_FILE"', "cannot be read"),
        ('yes | head -c 99999 > "$AGENTRL_REWARD_FILE"', "wrote 'y"),
        ('echo 1.0 > "$AGENTRL_REWARD_FILE"; exit 1', "status 1"),
        ("kill -9 $$", "status 137"),
        ("kill -9 $PPID; sleep 600", "status 255"),
    ],
)
def test_a_command_that_fails_has_failed(command, error):
    with pytest.raises(EnvError, match=error):
        run_command(command)


def test_all_processes_of_a_command_end_with_it(tmp_path):
    key, started = f"agentrl-key-{os.getpid()}-ends", tmp_path / "started"
    code = "from tests.gateway.programs import leaves_processes as p; p(0, 0, 0)"
    child = f"PYTHONPATH={Path.cwd()} {sys.executable} -c '{code}'"

    async def main():
        agent = CommandAgent(child, {"AGENTRL_TEST_STARTED": str(started)})
        assignment = ProgramAssignment(TASK, "http://127.0.0.1:1", key)
        playing = asyncio.get_running_loop().create_task(agent.run(assignment))
        await until(started.exists)
        assert len(processes_with(key)) >= 3
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        await until(lambda: not processes_with(key))

    asyncio.run(main())


def test_an_episode_that_ends_while_its_folder_is_made_leaves_no_folder(tmp_path, monkeypatch):
    begun, may_go_on, make = threading.Event(), threading.Event(), tempfile.mkdtemp

    def made_late(prefix: str) -> str:
        begun.set()
        may_go_on.wait()
        return make(prefix=prefix, dir=tmp_path)

    async def main() -> None:
        agent = CommandAgent("true").run(ProgramAssignment(TASK, "http://127.0.0.1:1", "key"))
        playing = asyncio.get_running_loop().create_task(agent)
        await asyncio.to_thread(begun.wait)
        playing.cancel()
        await asyncio.sleep(0)  # it is cancelled now
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await playing

    monkeypatch.setattr(tempfile, "mkdtemp", made_late)
    asyncio.run(main())
    assert list(tmp_path.iterdir()) == []


# Starts a process that ignores signals and has none of the episode's variables, and whose parents
# have ended.
DAEMON = """trap "" TERM HUP INT; (env -i setsid sh -c 'trap "" TERM HUP; sleep {mark}; :' &)
until pgrep -f '^sleep {mark}'; do :; done
"""


@pytest.mark.parametrize(
    ("ends", "error"), [("true", None), ("exit 4", "status 4"), ("kill -9 0", "status 137")]
)
def test_no_daemon_outlives_its_command(ends, error):
    mark = f"6{os.getpid()}"
    with pytest.raises(EnvError, match=error) if error else nullcontext():
        run_command(DAEMON.format(mark=mark) + ends)
    assert not still_sleeping(mark)


@pytest.mark.parametrize("what_ends", ["the episode", "the run"])
def test_no_daemon_outlives_its_episode_or_the_run(what_ends, tmp_path):
    mark, started = f"7{os.getpid()}", tmp_path / "started"
    driver = f"""
import asyncio, sys
from agentrl.gateway.command_agent import CommandAgent
from agentrl.gateway.program import ProgramAssignment
from agentrl.trajectory import Task

async def main():
    command = {DAEMON.format(mark=mark)!r} + "touch {started}; while :; do sleep 600; done"
    assignment = ProgramAssignment(Task("x", 0), "http://127.0.0.1:1", "k-of-a-daemon")
    agent = CommandAgent(command).run(assignment)
    playing = asyncio.get_running_loop().create_task(agent)
    await asyncio.to_thread(sys.stdin.read)
    playing.cancel()
    await asyncio.wait([playing])

asyncio.run(main())
"""

    async def main():
        run = await asyncio.create_subprocess_exec(
            sys.executable, "-c", driver, stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        await until(started.exists)
        assert still_sleeping(mark)
        if what_ends == "the run":
            run.kill()
        else:
            run.stdin.close()
        await run.wait()
        await until(lambda: not still_sleeping(mark))

    asyncio.run(main())


def still_sleeping(mark: str) -> list[psutil.Process]:
    return [
        one for one in psutil.process_iter(["cmdline"]) if ["sleep", mark] == one.info["cmdline"]
    ]


def test_processes_end_when_the_run_is_killed_and_the_next_start_removes_their_files(tmp_path):
    key, started, run = f"agentrl-key-{os.getpid()}-killed", tmp_path / "started", tmp_path / "run"
    driver = f"""
import asyncio
from pathlib import Path
from agentrl.gateway.command_agent import CommandAgent
from agentrl.gateway.program import ProgramAssignment
from agentrl.runs.temp import RunTemp
from agentrl.trajectory import Task
with RunTemp(Path({str(run)!r})):
    given = ProgramAssignment(Task("x", 0), "http://127.0.0.1:1", {key!r})
    asyncio.run(CommandAgent("touch {started}; sleep 600").run(given))
"""

    async def main():
        driving = await asyncio.create_subprocess_exec(sys.executable, "-c", driver)
        await until(started.exists)
        driving.kill()
        await driving.wait()
        await until(lambda: not processes_with(key))

    asyncio.run(main())
    assert len(list(run.glob("tmp/*/agentrl-agent-*"))) == 1
    with RunTemp(run):
        assert not list(run.glob("tmp/*/agentrl-agent-*"))


def remotely(agent, config=None, token=None, needs_reward=True):
    """Play one episode by an agent elsewhere: `agent(client, url)` speaks HTTP."""

    async def main():
        registry, engine = SessionRegistry(config or GatewayConfig()), saying("left")
        agents = RemoteAgents(registry)
        runner = replace(
            runner_on(registry, engine, agents, PATIENCE_SECONDS), needs_reward=needs_reward
        )
        async with (
            engine,
            serving(registry, agents),
            httpx.AsyncClient(base_url=registry.url) as client,
        ):
            headers = {"authorization": f"Bearer {token}"} if token else {}
            assert (await client.post("/v1/tasks", headers=headers)).status_code == 204
            async with asyncio.TaskGroup() as group:
                playing = group.create_task(runner.play(Assignment("e", TASK, 0)))
                while (taken := await client.post("/v1/tasks", headers=headers)).status_code == 204:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                await agent(client, taken.json())
            return playing.result()[0]

    return asyncio.run(main())


async def asks(client, taken):
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    headers = {"authorization": f"Bearer {taken['api_key']}"}
    answer = await client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200
    return headers


def test_an_agent_elsewhere_takes_a_task_and_posts_its_reward():
    async def agent(client, taken):
        assert taken["task"] == {"env": "agent:x", "seed": 7, "options": {"size": 3}, "id": "t1"}
        headers = await asks(client, taken)
        await client.post("/v1/rewards", json={"reward": 2.0, "done": True}, headers=headers)

    trajectory = remotely(agent)
    assert trajectory.status == Terminated()
    assert trajectory.env_return == 2.0


def test_an_agent_elsewhere_may_post_its_reward_before_it_says_that_it_is_done():
    async def agent(client, taken):
        headers = await asks(client, taken)
        for said in ({"reward": 1.0}, {"reward": 2.0}, {"success": True, "done": True}):
            posted = await client.post("/v1/rewards", json=said, headers=headers)
            assert posted.status_code == 200

    trajectory = remotely(agent)
    assert (trajectory.env_return, trajectory.success) == (2.0, True)


def test_an_agent_elsewhere_whose_run_has_rewards_of_its_own_only_says_that_it_is_done():
    async def agent(client, taken):
        headers = await asks(client, taken)
        for wrong in (
            {},
            {"done": False},
            {"call": "0", "done": True},
            {"reward": None},
            {"reward": True},
        ):
            assert (
                await client.post("/v1/rewards", json=wrong, headers=headers)
            ).status_code == 400
        ends = {"success": True, "done": True}
        assert (await client.post("/v1/rewards", json=ends, headers=headers)).status_code == 200

    assert remotely(agent, needs_reward=False).status == Terminated()
    status = remotely(agent).status
    assert isinstance(status, Failed)
    assert "earned no reward" in status.error


def test_an_agent_elsewhere_that_comes_back_too_late_changes_nothing():
    late = []

    async def agent(client, taken):
        headers = await asks(client, taken)
        await client.post("/v1/rewards", json={"reward": 1.0, "done": True}, headers=headers)
        while (await client.get("/health")).json()["episodes"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for path, body in (
            ("rewards", {"reward": 9.0}),
            ("failures", {"error": "x"}),
            ("chat/completions", {}),
        ):
            late.append((await client.post(f"/v1/{path}", json=body, headers=headers)).status_code)

    assert remotely(agent).env_return == 1.0
    assert late == [401, 401, 401]


def test_an_agent_elsewhere_may_say_that_it_has_failed():
    async def agent(client, taken):
        headers = await asks(client, taken)
        await client.post("/v1/failures", json={"error": "no disk"}, headers=headers)

    trajectory = remotely(agent)
    assert trajectory.status == Failed("environment", "the agent failed: no disk")


def test_an_agent_elsewhere_that_falls_silent_loses_its_task():
    async def agent(client, taken):
        await asks(client, taken)

    trajectory = remotely(agent, GatewayConfig(lease_seconds=0.3))
    assert isinstance(trajectory.status, Failed)
    assert "lost its task" in trajectory.status.error


def test_tasks_are_only_for_agents_with_the_token(monkeypatch):
    monkeypatch.setenv("AGENTS_TOKEN", "secret")

    async def agent(client, taken):
        assert (
            await client.post("/v1/tasks", headers={"authorization": "Bearer guessed"})
        ).status_code == 401
        headers = await asks(client, taken)
        await client.post("/v1/rewards", json={"reward": 1.0, "done": True}, headers=headers)

    config = GatewayConfig(token_env="AGENTS_TOKEN")
    assert remotely(agent, config, "secret").status == Terminated()
    monkeypatch.delenv("AGENTS_TOKEN")
    with pytest.raises(ConfigError, match="is not set"):
        remotely(agent, config, "secret")
    with pytest.raises(ConfigError, match="other machines can reach"):
        remotely(agent, GatewayConfig(host="0.0.0.0"))


@pytest.mark.parametrize(
    ("rest", "error"),
    [
        ("", "names no program"),
        ("my_agent", "names no program"),
        ("command", "names no program"),
        ("tests.gateway.programs:folow", "Did you mean 'follow'"),
        ("tests.gateway.programs:WORDS", "is no function"),
    ],
)
def test_an_address_of_no_program_is_refused(rest, error):
    with pytest.raises(ConfigError, match=error):
        scheme(rest)


def test_a_program_is_no_environment():
    with pytest.raises(ConfigError, match="is a program that calls the model"):
        scheme("remote")()
