"""Coding agents that others publish, each as it is: `env: agent:claude_code`.

A preset says how a program is called and configured so that it asks the gateway. It works in a
folder of its own, with a home of its own (`agentrl/gateway/coding_agent_child.py`). These names
stand for values in its arguments, variables and files: `{instruction}`, `{base_url}` (OpenAI's
clients), `{url}` (the others), `{api_key}`, `{model}`, `{home}`.

A preset of your own is registered by an entry point:

    [project.entry-points."agentrl.coding_agents"]
    my_agent = "my_package.agents:MY_AGENT"
"""

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shutil import which

from agentrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CodingAgent:
    """How a program is called, configured and read."""

    program: str
    """Its name on the PATH."""
    arguments: tuple[str, ...]
    """Its arguments, for one task without a person."""
    install: str
    """The command that installs it."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Its variables, beside those of every command."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Its configuration, by paths in its home."""
    transcript: str = ""
    """A pattern of the paths in its home where it writes down what happened; empty: it does not."""
    ends: tuple[int, ...] = (0,)
    """The exit statuses with which it has ended by itself. With another one it has failed."""
    file_sockets: bool = False
    """It needs sockets of files, for example to run commands in terminals of tmux."""

    def command(self, model: str, contained: bool = False) -> str:
        """The command that plays it, for a policy of this name. `contained`: it will be able to
        reach nothing but the gateway.

        Raises:
            ConfigError: it is not installed, or cannot work so.
        """
        if contained and self.file_sockets:
            raise ConfigError(
                f"gateway.network=gateway: {self.program} needs sockets of files, which this does"
                " not allow; write gateway.network=open"
            )
        found = which(self.program)
        if found is None:
            raise ConfigError(
                f"env: there is no program {self.program!r} on the PATH: install it by"
                f" `{self.install}`"
            )
        preset = {**asdict(self), "program": found, "model": model}
        child = Path(__file__).with_name("coding_agent_child.py")
        return shlex.join([sys.executable, "-I", "-S", str(child), json.dumps(preset)])


CLAUDE_CODE = CodingAgent(
    program="claude",
    arguments=("-p", "{instruction}", "--dangerously-skip-permissions"),
    install="npm install --global @anthropic-ai/claude-code",
    variables={
        "ANTHROPIC_MODEL": "{model}",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "IS_SANDBOX": "1",
    },
    transcript=".claude/projects/*/*.jsonl",
)
CODEX = CodingAgent(
    program="codex",
    arguments=(
        "exec",
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
        "{instruction}",
    ),
    install="npm install --global @openai/codex",
    files={
        ".codex/config.toml": """\
model = "{model}"
model_provider = "gateway"
web_search = "disabled"

[features]
multi_agent = false
apps = false
goals = false

[model_providers.gateway]
name = "gateway"
base_url = "{base_url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
supports_websockets = false
"""
    },
    transcript=".codex/sessions/*/*/*/*.jsonl",
)
QWEN_CODE = CodingAgent(
    program="qwen",
    arguments=("-y", "-p", "{instruction}"),
    install="npm install --global @qwen-code/qwen-code",
    variables={"OPENAI_MODEL": "{model}"},
    transcript=".qwen/projects/*/chats/*.jsonl",
)
GEMINI_CLI = CodingAgent(
    program="gemini",
    arguments=("--yolo", "--model", "{model}", "--prompt", "{instruction}"),
    install="npm install --global @google/gemini-cli",
    variables={"GEMINI_CLI_TRUST_WORKSPACE": "true"},
    files={
        ".gemini/settings.json": """\
{"security": {"auth": {"selectedType": "gemini-api-key"}},
 "privacy": {"usageStatisticsEnabled": false},
 "general": {"enableAutoUpdate": false}}
"""
    },
    transcript=".gemini/tmp/*/chats/*",
)
OPENCODE = CodingAgent(
    program="opencode",
    arguments=(
        "run",
        "--pure",
        "--auto",
        "--model",
        "gateway/{model}",
        "--title",
        "task",
        "{instruction}",
    ),
    install="npm install --global opencode-ai",
    variables={"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"},
    files={
        ".config/opencode/opencode.json": """\
{"autoupdate": false, "share": "disabled", "small_model": "gateway/{model}",
 "provider": {"gateway": {
  "npm": "@ai-sdk/openai-compatible", "name": "gateway",
  "options": {"baseURL": "{base_url}", "apiKey": "{api_key}"},
  "models": {"{model}": {"name": "{model}"}}}}}
"""
    },
)
AIDER = CodingAgent(
    program="aider",
    arguments=(
        "--model",
        "openai/{model}",
        "--message",
        "{instruction}",
        "--edit-format",
        "whole",
        "--yes-always",
        "--no-git",
        "--no-pretty",
        "--no-check-update",
        "--no-show-model-warnings",
        "--no-show-release-notes",
        "--no-detect-urls",
        "--no-suggest-shell-commands",
        "--analytics-disable",
        "--chat-history-file",
        "{home}/chat.md",
        "--input-history-file",
        "{home}/input",
    ),
    install="pip install aider-chat",
    variables={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    transcript="chat.md",
)
MINI_SWE_AGENT = CodingAgent(
    program="mini",
    arguments=(
        "--model",
        "openai/{model}",
        "--task",
        "{instruction}",
        "--yolo",
        "--exit-immediately",
        "--output",
        "{home}/trajectory.json",
    ),
    install="pip install mini-swe-agent mcp",
    variables={
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    },
    transcript="trajectory.json",
)
OPENHANDS = CodingAgent(
    program="openhands",
    arguments=("--headless", "--override-with-envs", "--task", "{instruction}"),
    install="uv tool install --python 3.12 openhands",
    variables={
        "LLM_MODEL": "openai/{model}",
        "LLM_BASE_URL": "{base_url}",
        "LLM_API_KEY": "{api_key}",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENHANDS_SUPPRESS_BANNER": "1",
        "TMUX_TMPDIR": "{home}",  # else all episodes have one server of terminals
    },
    transcript=".openhands/conversations/*/events/*.json",
    file_sockets=True,
)
