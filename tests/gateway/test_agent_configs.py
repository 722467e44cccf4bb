"""Configs of programs: what goes with them, and what does not."""

import sys
from pathlib import Path

import pytest

from agentrl.config import load_config
from agentrl.errors import ConfigError

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
