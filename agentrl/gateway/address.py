"""The addresses of programs: `env: agent:...`."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from shlex import join
from shutil import which
from sys import executable

from agentrl import plugins
from agentrl.errors import ConfigError
from agentrl.gateway.coding_agents import CodingAgent
from agentrl.gateway.command_agent import CommandAgent
from agentrl.gateway.function_agent import FunctionAgent
from agentrl.gateway.program import AgentProgram
from agentrl.gateway.remote_agents import RemoteAgents
from agentrl.gateway.sandboxed_agent import SandboxedAgent
from agentrl.gateway.session_registry import SessionRegistry
from agentrl.protocols import Env, Isolation
from agentrl.sandbox.config import AgentPlace

SCHEME = "agent:"


@dataclass(frozen=True, slots=True)
class AgentAddress:
    """The part of an address after `agent:`. It takes the place of an environment factory, and
    cannot be called as one."""

    rest: str

    def __call__(self) -> Env:
        """Refuse: a program is no environment.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"{SCHEME}{self.rest} is a program that calls the model, and no environment that is"
            " reset and stepped: train and evaluate it (`agentrl train`, `agentrl eval`)"
        )

    def program(
        self,
        registry: SessionRegistry,
        isolation: Isolation | None,
        python: str | None,
        folder: Path | None = None,
        place: AgentPlace | None = None,
    ) -> AgentProgram:
        """The program at this address. Functions run in a thread, or in a process if `isolation` or
        `python` says so.

        `folder`: where another interpreter looks for the function too (`env.folder`). `place`:
        where a command or a preset runs; by default outside of sandboxes.

        Raises:
            ConfigError: there is no such function or interpreter.
        """
        if self.rest == "remote":
            return RemoteAgents(registry)
        if (agent := self._command_or_preset) is not None:
            if place is not None and place.where == "inside":
                return SandboxedAgent(agent, place, registry)
            within = registry if registry.config.network == "gateway" else None
            command = (
                agent
                if isinstance(agent, str)
                else agent.command(registry.config.model, contained=within is not None)
            )
            return CommandAgent(command, contained_by=within)
        if python is None and isolation != "process":
            return FunctionAgent(plugins.load("agents", self.rest), self.rest)
        found = executable if python is None else which(python)
        if found is None:
            raise ConfigError(
                f"env.python: there is no program {python!r}: write its path, or a name on the PATH"
            )
        child = Path(__file__).with_name("function_child.py")
        places = [
            str(folder or "") if python else self._package_folder(),
            os.environ.get("PYTHONPATH", ""),
        ]
        return CommandAgent(
            join([found, str(child), self.rest]),
            {"PYTHONPATH": os.pathsep.join(filter(None, places))},
        )

    @property
    def _command_or_preset(self) -> str | CodingAgent | None:
        if self.rest.startswith("command "):
            return self.rest.removeprefix("command ").strip()
        if ":" not in self.rest:
            preset: CodingAgent = plugins.load("coding_agents", self.rest)
            return preset
        return None

    def _package_folder(self) -> str:
        """The folder of the function's package."""
        module = plugins.load("agents", self.rest).__module__
        file = Path(sys.modules[module].__file__ or "").absolute()
        depth = module.count(".") + (file.name == "__init__.py")
        return str(file.parents[depth])


def scheme(rest: str) -> AgentAddress:
    """The scheme `agent`. Checks the address.

    Raises:
        ConfigError: it names nothing that can be run.
    """
    known = [one.name for one in plugins.installed("coding_agents")]
    if rest == "remote" or rest.startswith("command ") or rest in known:
        return AgentAddress(rest)
    if ":" not in rest:
        raise ConfigError(
            f'{SCHEME}{rest} names no program: write agent:my_package.module:run, "agent:command'
            ' python my_agent.py", agent:remote, or a coding agent of'
            f" {', '.join(known)}.{plugins.nearest(rest, known)}"
        )
    if not callable(plugins.load("agents", rest)):
        raise ConfigError(
            f"{SCHEME}{rest} is no function: write `async def run(task, base_url, api_key)`"
        )
    return AgentAddress(rest)
