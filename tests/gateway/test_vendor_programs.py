"""Unmodified programs of others, in interpreters of their own: `make agents`."""

import asyncio
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.gateway.command_agent import CommandAgent
from agentrl.gateway.config import GatewayConfig
from agentrl.gateway.desk import Desk
from agentrl.gateway.player import PlayerEngine
from agentrl.gateway.server import serving
from agentrl.rollout.episode import Episode
from agentrl.trajectory import Task, Terminated, ToolCall
from tests.gateway.served import RENDERER, runner_on
from tests.processes import PATIENCE_SECONDS

AGENTS = Path(__file__).parent / "agents"
EPISODES = 20
UV = str(Path(sys.executable).with_name("uv"))
PROGRAMS = {
    "openai-agents": "openai_agents.py",
    "pydantic-ai-slim[openai]": "pydantic_ai_agent.py",
}
"""Packages of PyPI, and the programs that use them."""


def adds(prompt: str, rng) -> str:
    """Calls the tool with the numbers of the question, and then says what it returned."""
    after_question = prompt.rpartition("What is ")[2]
    a, b = re.findall(r"(\d+) \+ (\d+)", after_question)[0]
    results = re.findall(r"<tool_response>\s*(\d+)", after_question)
    return results[-1] if results else ToolCall("add", {"a": int(a), "b": int(b)}).render()


def play(command: str, variables: dict[str, str] | None = None):
    """Twenty episodes of a command, a few at a time."""

    async def main():
        desk, engine = Desk(GatewayConfig()), PlayerEngine(adds, RENDERER)
        runner = runner_on(desk, engine, CommandAgent(command, variables), PATIENCE_SECONDS)
        slots = asyncio.Semaphore(2)

        async def one(seed: int):
            async with slots:
                return (await runner.play(Episode(f"e{seed}", Task("agent:command", seed), seed)))[0]

        async with engine, serving(desk), asyncio.TaskGroup() as group:
            playing = [group.create_task(one(seed)) for seed in range(EPISODES)]
        return [task.result() for task in playing]

    return asyncio.run(main())


def check(trajectories) -> None:
    for trajectory in trajectories:
        assert trajectory.status == Terminated(), trajectory.status
        assert trajectory.env_return == 1.0, [message.content for message in trajectory.messages]
        assert len(trajectory.turns) == 2
        assert not any(turn.forked for turn in trajectory.turns)
        assert not trajectory.dropped


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """Where packages are installed, kept if AGENTRL_AGENTS names a folder."""
    return Path(os.environ.get("AGENTRL_AGENTS") or tmp_path_factory.mktemp("agents"))


@pytest.mark.long
@pytest.mark.parametrize("package", PROGRAMS)
def test_a_program_of_pypi_is_recorded_exactly(package, folder):
    venv = folder / re.sub(r"\W", "_", package)
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([UV, "venv", "-q", str(venv)], check=True)
        subprocess.run([UV, "pip", "install", "-q", "--python", str(python), package], check=True)
    check(play(shlex.join([str(python), str(AGENTS / PROGRAMS[package])])))


@pytest.mark.long
def test_a_program_of_npm_is_recorded_exactly(folder):
    if not (folder / "node_modules" / "openai").exists():
        install = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), "openai"]
        subprocess.run(install, check=True)
    shutil.copy(AGENTS / "node_openai.mjs", folder)  # node looks for packages beside the program
    check(play(shlex.join(["node", str(folder / "node_openai.mjs")])))
