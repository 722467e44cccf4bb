"""The seam between the gateway and the programs that it serves."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from agentrl.gateway.outcome import AgentOutcome
from agentrl.trajectory import Task


@dataclass(frozen=True, slots=True)
class ProgramAssignment:
    """The inputs of a program: its task, and the address of the model. `api_key` is that of this
    episode alone.

    `url` is the gateway's address. OpenAI's clients take `base_url`, Anthropic's take `url`.
    """

    task: Task
    url: str
    api_key: str

    @property
    def base_url(self) -> str:
        """The address for OpenAI's clients."""
        return f"{self.url}/v1"

    @property
    def port(self) -> int:
        """The port of `url`."""
        parts = urlsplit(self.url)
        return parts.port or (443 if parts.scheme == "https" else 80)


class AgentProgram(Protocol):
    """A program that solves tasks by calling a model."""

    async def run(self, assignment: ProgramAssignment) -> AgentOutcome:
        """Solve one task. When this returns or raises, or is cancelled, nothing of it runs any
        more.

        Raises:
            EnvError: the program failed.
        """
        ...


def agent_variables(assignment: ProgramAssignment, folder: Path) -> dict[str, str]:
    """What a command is told, in the variables that clients of the model read, and `folder`, which
    is its own.
    """
    return {
        "OPENAI_BASE_URL": assignment.base_url,
        "OPENAI_API_BASE": assignment.base_url,
        "OPENAI_API_KEY": assignment.api_key,
        "ANTHROPIC_BASE_URL": assignment.url,
        "ANTHROPIC_API_KEY": assignment.api_key,
        "GOOGLE_GEMINI_BASE_URL": assignment.url,
        "GEMINI_API_KEY": assignment.api_key,
        "GOOGLE_API_KEY": assignment.api_key,
        "AGENTRL_URL": assignment.url,
        "AGENTRL_TASK": json.dumps(asdict(assignment.task)),
        "AGENTRL_REWARD_FILE": str(folder / "reward"),
        "TMPDIR": str(folder),
    }
