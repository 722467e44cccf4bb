"""Programs that call the policy from inside a sandbox, which reaches nothing but the gateway."""

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.errors import ConfigError
from agentrl.gateway.address import AgentAddress
from agentrl.gateway.coding_agents import CodingAgent
from agentrl.gateway.config import GatewayConfig
from agentrl.gateway.player import PlayerEngine
from agentrl.gateway.sandboxed_agent import SandboxedAgent
from agentrl.gateway.server import serving
from agentrl.gateway.session_registry import SessionRegistry
from agentrl.rollout.assignment import Assignment
from agentrl.sandbox.config import AgentPlace
from agentrl.sandbox.docker import DockerSandboxes
from agentrl.sandbox.sandbox_socket import NAME, SandboxSocket, remove_dead_sockets
from agentrl.trajectory import Failed, Task, Terminated, Trajectory
from tests.docker_engine import BASE, needs_docker
from tests.gateway.served import RENDERER, runner_on
from tests.processes import PATIENCE_SECONDS

AGENT = """#!/usr/bin/env python3
import json, os, socket, subprocess, urllib.request

def reaches(*address):
    try:
        socket.create_connection(address, 3).close()
    except OSError:
        return False
    return True

def ask(messages):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    key = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    asked = urllib.request.Request(url, body, {**key, "content-type": "application/json"})
    return json.load(urllib.request.urlopen(asked))["choices"][0]["message"]["content"]

options = json.loads(os.environ["AGENTRL_TASK"])["options"]
seen = {
    "reached": [address for address in options["elsewhere"] if reaches(*address)],
    "files": [path for path in options["secret_files"] if os.path.exists(path)],
    "variables": [name for name in os.environ if "SECRET" in name],
}
messages = [{"role": "user", "content": json.dumps(seen)}]
for _ in range(2):
    said = ask(messages)
    printed = subprocess.run(said, shell=True, capture_output=True, text=True).stdout
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": printed}]
if "AGENTRL_REWARD_FILE" in os.environ and options.get("own_reward"):
    open(os.environ["AGENTRL_REWARD_FILE"], "w").write(str(options["own_reward"]))
"""
SUM = {
    "files": {"numbers.txt": "3\n4\n", "agent.py": AGENT},
    "setup": "printf '' > ready",
    "test": "sh check.sh",
    "test_files": {"check.sh": 'test -f ready && test "$(cat sum.txt)" = 7'},
}
SAYS = ["cat numbers.txt", "expr 3 + 4 > sum.txt; echo true > check.sh"]


DOCKER = pytest.param("docker", marks=[needs_docker, pytest.mark.slow])


@pytest.fixture(params=["jail", DOCKER])
def sandbox(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "jail":
        return {"name": "jail"}
    return {"name": "docker", "host": request.getfixturevalue("docker_host"), "image": BASE}


def play(
    agent: CodingAgent | str, sandbox: dict[str, Any], options: dict[str, Any], says=SAYS
) -> Trajectory:
    async def main() -> Trajectory:
        registry = SessionRegistry(GatewayConfig())
        engine = PlayerEngine(lambda prompt, rng: says[prompt.count("numbers.txt")], RENDERER)
        place = AgentPlace(where="inside", sandbox=sandbox)
        program = SandboxedAgent(agent, place, registry)
        runner = runner_on(registry, engine, program, PATIENCE_SECONDS)
        async with engine, serving(registry), program:
            port = int(registry.url.rpartition(":")[2])
            elsewhere = [["127.0.0.1", port], *options.get("elsewhere", [])]
            task = Task("agent:command", 0, {**options, "elsewhere": elsewhere})
            (played,) = await runner.play(Assignment("e", task, 0))
        return played

    return asyncio.run(main())


def test_a_program_in_a_sandbox_reaches_the_gateway_and_nothing_else(
    sandbox, tmp_path, monkeypatch
):
    monkeypatch.setenv("THE_SECRET", "hidden")
    (tmp_path / "secret").write_text("hidden")
    with socket.create_server(("0.0.0.0", 0)) as service:
        elsewhere = [["127.0.0.1", service.getsockname()[1]], ["192.0.2.1", 80]]
        secrets = [str(tmp_path / "secret"), str(Path(__file__)), "/etc/shadow"]
        played = play(
            "python3 agent.py", sandbox, {**SUM, "elsewhere": elsewhere, "secret_files": secrets}
        )
    assert (played.status, played.env_return) == (Terminated(), 1.0)
    assert json.loads(played.messages[0].content) == {"reached": [], "files": [], "variables": []}
    assert [RENDERER.answer_text(turn.completion.token_ids) for turn in played.turns] == SAYS
    assert [turn.completion.token_ids.tolist() for turn in played.turns] == [
        RENDERER.answer_ids(text).tolist() for text in SAYS
    ]
    assert not any(turn.forked for turn in played.turns)
    assert played.messages[2].content == "3\n4\n"


def test_a_preset_has_a_home_of_its_own_in_a_sandbox_and_its_transcript_is_kept(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("AGENTRL_TRANSCRIPTS", str(tmp_path / "kept"))
    (tmp_path / "tool" / "bin").mkdir(parents=True)
    program = tmp_path / "tool" / "bin" / "small_agent"
    program.write_text(
        AGENT.replace("OPENAI_BASE_URL", "SMALL_URL")
        + 'open(os.environ["HOME"] + "/log.json", "w").write(json.dumps(messages))\n'
        + 'print(open(os.environ["HOME"] + "/config").read())\nraise SystemExit(3)\n'
    )
    program.chmod(0o755)
    small = CodingAgent(
        "small_agent",
        ("{instruction}",),
        "pip install small",
        {"SMALL_URL": "{base_url}"},
        {"config": "model = {model}"},
        "*.json",
        ends=(3,),
    )
    jail = {"name": "jail", "paths": [str(tmp_path / "tool")]}
    options = {**SUM, "instruction": "Add them.", "secret_files": []}
    played = play(small, jail, options)
    assert (played.status, played.env_return) == (Terminated(), 1.0)
    (kept,) = (tmp_path / "kept").glob("*/log.json")
    assert json.loads(kept.read_text())[1]["content"] == SAYS[0]
    unknown = CodingAgent("small_agent", ("{instruction}",), "pip install small", ends=(0,))
    failed = play(unknown, jail, options)
    assert isinstance(failed.status, Failed)
    assert "'small_agent' ended with status" in failed.status.error
    with pytest.raises(ConfigError, match=r"no program 'small_agent' in the sandbox.*pip install"):
        play(small, {"name": "jail"}, options)


def test_a_program_in_a_sandbox_may_write_its_own_reward(tmp_path):
    options = {"files": SUM["files"], "secret_files": [], "own_reward": 0.25}
    played = play("python3 agent.py", {"name": "jail"}, options)
    assert (played.status, played.env_return) == (Terminated(), 0.25)
    lost = play("rm -rf $HOME; kill -9 $$", {"name": "jail"}, options)
    assert isinstance(lost.status, Failed)
    assert "ended with status 137" in lost.status.error


def test_what_cannot_show_the_gateway_is_refused_by_name():
    with pytest.raises(
        ConfigError, match=r"sandboxes 'agentrl\.testing:FakeSandboxes' cannot show"
    ):
        play("true", {"name": "agentrl.testing:FakeSandboxes"}, SUM)
    client: Any = SimpleNamespace(docker_host="tcp://machine:2375")
    with pytest.raises(ConfigError, match="tcp://machine:2375 may be on another machine"):
        DockerSandboxes(DockerSandboxes.Config(), client).served_socket()


def test_sockets_of_a_killed_run_are_removed_by_the_next_one():
    make = "from agentrl.sandbox.sandbox_socket import SandboxSocket; print(SandboxSocket().folder)"
    left = subprocess.run([sys.executable, "-c", make], capture_output=True, text=True, check=True)
    folder, own = Path(left.stdout.strip()), SandboxSocket()
    try:
        assert (folder / NAME).is_socket()
        remove_dead_sockets()
        assert not folder.parent.exists()
        assert (own.folder / NAME).is_socket()
    finally:
        own.close()
    assert not own.folder.exists()


def test_the_address_makes_a_program_for_a_sandbox():
    registry, place = SessionRegistry(GatewayConfig()), AgentPlace(where="inside")
    made = AgentAddress("command ls -l").program(registry, None, None, place=place)
    assert isinstance(made, SandboxedAgent)
    assert made.agent == "ls -l"
