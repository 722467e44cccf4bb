"""Programs that reach nothing by network but the gateway (`gateway.network: gateway`)."""

import asyncio
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.gateway import command_agent
from agentrl.gateway.address import scheme
from agentrl.gateway.command_agent import CommandAgent
from agentrl.gateway.config import GatewayConfig
from agentrl.gateway.program import ProgramAssignment
from agentrl.gateway.server import serving
from agentrl.gateway.session_registry import SessionRegistry
from agentrl.rollout.assignment import Assignment
from agentrl.trajectory import Failed, Task, Terminated
from tests.gateway.served import runner_on, saying, until
from tests.processes import PATIENCE_SECONDS, processes_with

ROOT = Path(__file__).parents[2]
THREAD_SECONDS = 60.0
"""How long a thread that has nothing to wait for may take to end."""
ALL_BUT_THE_GATEWAY = """
import json, os, socket, sys, urllib.request

body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hi"}]}).encode()
key = os.environ["OPENAI_API_KEY"]
headers = {"authorization": "Bearer " + key, "content-type": "application/json"}
asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
with urllib.request.urlopen(asked) as answer:
    said = json.load(answer)["choices"][0]["message"]["content"]

reached = []
for family, address in json.loads(sys.argv[1]):
    try:
        with socket.socket(family) as connecting:
            connecting.settimeout(10)
            connecting.connect(tuple(address) if isinstance(address, list) else address)
            reached.append(address)
    except OSError:
        continue
sees = [name for name in os.listdir("/proc") if name.isdigit() and int(name) > 1000]
assert not sees, sees
print(f"said {said!r}, reached {reached}")
with open(os.environ["AGENTRL_REWARD_FILE"], "w") as file:
    json.dump(float(said == "left" and not reached), file)
"""


def played(command: str, network: str, url: str | None = None):
    """An episode of a command. `url`: where others reach the gateway."""

    async def main():
        registry, engine = SessionRegistry(GatewayConfig(network=network, url=url)), saying("left")
        runner = runner_on(
            registry,
            engine,
            scheme(f"command {command}").program(registry, None, None),
            PATIENCE_SECONDS,
        )
        async with engine, serving(registry):
            return (await runner.play(Assignment("e", Task("agent:x", 7), 0)))[0]

    return asyncio.run(main())


def own_address() -> str:
    """An address of this machine beside 127.0.0.1, as that of another host is."""
    found = [
        one.address
        for each in psutil.net_if_addrs().values()
        for one in each
        if one.family == socket.AF_INET
    ]
    return next((address for address in found if not address.startswith("127.")), "127.0.0.2")


@pytest.fixture
def services(tmp_path):
    """Listeners on this machine: on another loopback port, another address, a file."""
    with (
        socket.create_server(("127.0.0.1", 0)) as near,
        socket.create_server((own_address(), 0)) as far,
        socket.socket(socket.AF_UNIX) as file,
        tempfile.TemporaryDirectory() as folder,
    ):
        file.bind(f"{folder}/socket")
        file.listen()
        yield [(listener.family, listener.getsockname()) for listener in (near, far, file)]


@pytest.mark.parametrize(("network", "reward"), [("gateway", 1.0), ("open", 0.0)])
def test_a_program_reaches_the_gateway_and_nothing_else(network, reward, services, tmp_path):
    file = tmp_path / "agent.py"
    file.write_text(
        ALL_BUT_THE_GATEWAY if network == "gateway" else ALL_BUT_THE_GATEWAY.replace("assert", "#")
    )
    trajectory = played(shlex.join([sys.executable, str(file), json.dumps(services)]), network)
    assert trajectory.status == Terminated(), trajectory.status
    assert trajectory.env_return == reward
    assert len(trajectory.turns) == 1


def test_a_contained_program_does_not_take_the_address_of_others(tmp_path):
    file = tmp_path / "agent.py"
    file.write_text(ALL_BUT_THE_GATEWAY)
    trajectory = played(
        shlex.join([sys.executable, str(file), "[]"]), "gateway", "http://gateway.example:9000"
    )
    assert trajectory.env_return == 1.0, trajectory.status


@pytest.mark.parametrize(
    ("command", "error"),
    [("echo no idea; exit 3", "status 3: no idea"), ("kill -9 $$", "status 137")],
)
def test_a_contained_command_that_fails_has_failed(command, error):
    status = played(command, "gateway").status
    assert isinstance(status, Failed)
    assert error in status.error


LEAVES_PROCESSES = "from tests.gateway.programs import leaves_processes as p; p(0, 0, 0)"


def test_all_processes_of_a_contained_command_end_with_it(tmp_path):
    key, started = f"agentrl-key-{os.getpid()}-contained", tmp_path / "started"
    command = f"PYTHONPATH={ROOT} {shlex.join([sys.executable, '-c', LEAVES_PROCESSES])}"

    async def main():
        registry = SessionRegistry(GatewayConfig(network="gateway"))
        async with serving(registry):
            agent = CommandAgent(command, {"AGENTRL_TEST_STARTED": str(started)}, registry)
            playing = asyncio.get_running_loop().create_task(
                agent.run(ProgramAssignment(Task("agent:x", 7), registry.url, key))
            )
            await until(started.exists)
            assert len(processes_with(key)) >= 5
            playing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing
            await until(lambda: not processes_with(key))

    asyncio.run(main())


RUN = """
import asyncio
from agentrl.gateway.command_agent import CommandAgent
from agentrl.gateway.config import GatewayConfig
from agentrl.gateway.session_registry import SessionRegistry
from agentrl.gateway.program import ProgramAssignment
from agentrl.gateway.server import serving
from agentrl.trajectory import Task

async def main():
    registry = SessionRegistry(GatewayConfig(network="gateway"))
    async with serving(registry):
        agent = CommandAgent("touch STARTED; sleep 600", None, registry)
        await agent.run(ProgramAssignment(Task("x", 0), registry.url, "KEY"))

asyncio.run(main())
"""


def test_contained_processes_end_when_the_run_is_killed(tmp_path):
    key, started = f"agentrl-key-{os.getpid()}-killed-contained", tmp_path / "started"

    async def main():
        driver = RUN.replace("STARTED", str(started)).replace("KEY", key)
        run = await asyncio.create_subprocess_exec(sys.executable, "-c", driver)
        await until(started.exists)
        assert processes_with(key)
        run.kill()
        await run.wait()
        await until(lambda: not processes_with(key))

    asyncio.run(main())


WITHOUT_NAMESPACES = """
import asyncio, os
from agentrl.errors import ConfigError
from agentrl.gateway.config import GatewayConfig
from agentrl.gateway.containment import check_containment
from agentrl.gateway.session_registry import SessionRegistry
from agentrl.gateway.server import serving
from agentrl.sandbox import kernel

uid, gid = os.geteuid(), os.getegid()
kernel.unshare(kernel.CLONE_NEWUSER)
kernel.map_to_self(uid, gid)
with open("/proc/sys/user/max_user_namespaces", "w") as file:
    file.write("0")

async def main():
    registry = SessionRegistry(GatewayConfig(network="gateway"))
    async with serving(registry):
        await check_containment(registry)

try:
    asyncio.run(main())
except ConfigError as error:
    print(error)
"""


def test_a_machine_without_namespaces_is_refused_by_name():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NAMESPACES], check=True, capture_output=True, text=True
    )
    assert (
        "gateway.network=gateway: this machine cannot keep programs from the network" in done.stdout
    )
    assert "unshare: No space left on device" in done.stdout


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        ([], "runs in threads: write env.isolation=process"),
        (["env=agent:remote"], "started by others: leave it out"),
    ],
)
def test_programs_that_cannot_be_contained_are_refused(overrides, error):
    with pytest.raises(ConfigError, match=error):
        load_config(
            ROOT / "examples" / "agent" / "agent.yaml", ["gateway.network=gateway", *overrides]
        )


def test_a_command_that_is_cancelled_as_it_starts_leaves_no_thread_that_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_agent, "_START_SECONDS", 2 * THREAD_SECONDS)

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        ours, theirs = socket.socketpair()
        with theirs:
            with ours:
                receiving = CommandAgent("true")._receive_listener(ours, tmp_path)
                waiting = asyncio.create_task(receiving)
                await asyncio.sleep(0.1)
                waiting.cancel()
                await asyncio.wait({waiting})
            # The only thread is free again, though the other end is still open.
            await asyncio.wait_for(asyncio.to_thread(lambda: None), THREAD_SECONDS)
        assert waiting.cancelled()

    asyncio.run(main())
