"""Configs of programs: what goes with them, and what does not."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.gateway.address import AgentAddress
from agentrl.gateway.program import ProgramAssignment
from agentrl.gateway.session_registry import SessionRegistry
from agentrl.trajectory import Task

ROOT = Path(__file__).parents[2]


def test_the_example_finds_its_agent_beside_the_config(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if "examples" not in entry])
    config = load_config(ROOT / "examples" / "agent" / "agent.yaml").config
    assert config.env.is_agent
    assert config.env.name == "agent:guess_agent:run"


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("rollout.context=scratchpad", "rollout.context"),
        ("model.history=template", "model.history=template"),
        ("env.isolation=inline", "env.isolation=inline"),
        ("cluster.env_workers=2", "cluster.env_workers"),
        ("env.agents.north=frozen", "env.agents"),
    ],
)
def test_what_a_program_decides_itself_is_refused(override, named):
    with pytest.raises(ConfigError, match=f"keeps its own conversations.*{named}"):
        load_config(ROOT / "examples" / "agent" / "agent.yaml", [override])


AGENT = """
async def run(task, base_url, api_key):
    return 1.0
"""


def test_a_function_beside_the_config_is_found_again_by_a_resumed_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    project, run, elsewhere = tmp_path / "project", tmp_path / "run", tmp_path / "elsewhere"
    for folder in (project, run, elsewhere):
        folder.mkdir()
    (project / "lone_agent.py").write_text(AGENT)
    (project / "agent.yaml").write_text("env: agent:lone_agent:run\nmodel: tiny\nsteps: 1\n")
    config = load_config(project / "agent.yaml").config
    (run / "config.yaml").write_text(config.to_yaml())
    assert config.env.folder == project

    code = (
        "from pathlib import Path; from agentrl.config import load_config\n"
        f"print(load_config(Path({str(run / 'config.yaml')!r})).config.env.folder)"
    )
    resumed = subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=elsewhere, capture_output=True, text=True
    )
    assert resumed.stdout.strip() == str(project), resumed.stderr


def test_another_interpreter_finds_the_function_beside_the_config(monkeypatch, tmp_path):
    (tmp_path / "lone_agent.py").write_text(AGENT)
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    program = AgentAddress("lone_agent:run").program(
        SessionRegistry(), "process", sys.executable, tmp_path
    )
    assert program.more == {"PYTHONPATH": f"{tmp_path}{os.pathsep}/somewhere"}
    ended = asyncio.run(
        program.run(ProgramAssignment(Task("agent:x", 0), "http://127.0.0.1:1", "key"))
    )
    assert ended.reward == 1.0
