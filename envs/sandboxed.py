"""The base of environments in which the model works in a sandbox: its tools, and the limits."""

import asyncio
import pickle
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from agentrl.envs.base import ToolEnv, ToolError, ToolResult, read_options
from agentrl.errors import EnvError
from agentrl.protocols import (
    Command,
    Executed,
    Sandbox,
    SandboxProvider,
    SandboxSnapshot,
    SandboxSpec,
    shell,
)
from agentrl.sandbox.config import SandboxChoice
from agentrl.sandbox.providers import borrow_provider, give_back_provider
from agentrl.tokens.arrays import at_least

LARGEST_FILE = 1 << 20
"""Bytes of a file that the model can read or edit."""
_NOT_STATE = {"_lender", "_choice", "_sandbox", "_kept"}
_USED_UP = {
    "deadline": "it took longer than it may",
    "cpu": "it used more processor time than it may",
    "memory": "it used more memory than there is",
    "processes": "no more processes can be started",
    "disk": "it used more disk than there is",
}


class SandboxOptions(SandboxChoice):
    """The options of every environment with a sandbox."""

    command_seconds: float = Field(60.0, gt=0)
    """Seconds after which a command of the model is killed."""
    output: int = Field(8192, ge=64)
    """Bytes of stdout, and of stderr, that the model is shown: the beginning and the end."""
    short_calls: bool = False
    """Tools are called in words (`run ls -l`) in place of JSON, for small models. Of `write` and
    `edit`, which take several arguments, commands can do the work."""


class SandboxedEnv(ToolEnv):
    """Work in a sandbox by tools; `submit` ends the episode. A subclass implements `_begin` and
    `_judge`, and its `Options` extend `SandboxOptions`.
    """

    system_prompt = (
        "You work on a machine of your own, by its tools. Do what you are asked, check it, and then"
        " submit."
    )
    isolation = "inline"
    restorable = True
    options: SandboxOptions
    last: Executed | None = None
    """How the model's last command has ended."""
    commands: int = 0
    """Commands that the model has run in this episode."""

    def __init__(self) -> None:
        self._lender: SandboxProvider | None = None
        self._choice: dict[str, Any] = {}
        self._sandbox: Sandbox | None = None
        self._kept: list[tuple[float, SandboxSnapshot]] = []
        """The files of states, each with the time until which they are kept."""

    @abstractmethod
    async def _begin(self, seed: int) -> tuple[str, Sandbox]:
        """The instruction of an episode, and its sandbox."""

    @abstractmethod
    async def _judge(self) -> float:
        """The reward for the sandbox as it is now, which `_end` may end first."""

    async def start(self, seed: int, options: Mapping[str, Any]) -> str:
        """Start the sandbox of an episode."""
        self.options = read_options(type(self).Options, options)  # type: ignore[attr-defined]
        self.call_shortly(self.options.short_calls)
        self.last, self.commands = None, 0
        await self._end()
        await self._borrow_provider()
        instruction, self._sandbox = await self._begin(seed)
        return instruction

    async def snapshot(self) -> bytes:
        """The state of the episode, with the name of its files, which are kept for a lease.

        What runs in the sandbox in the background is no part of it.
        """
        files = await self._live.snapshot()
        now = asyncio.get_running_loop().time()
        # Snapshots take disk, and nothing says when the last rollout from one has begun.
        while self._kept and self._kept[0][0] < now:
            await self._provider.remove(self._kept.pop(0)[1])
        self._kept.append((now + self.options.lease, files))
        own = {name: value for name, value in self.__dict__.items() if name not in _NOT_STATE}
        return pickle.dumps((own, files))

    async def restore(self, state: bytes) -> None:
        """Go back to a state, in a sandbox that starts with its files."""
        own, files = pickle.loads(state)
        await self._end()
        self.__dict__.update(own)
        await self._borrow_provider()
        chosen = self.options
        self._sandbox = await self._provider.start(
            SandboxSpec(files, chosen.resources, lease=chosen.lease)
        )

    async def _borrow_provider(self) -> None:
        if self._lender is None or self._choice != self.options.sandbox:
            await self.close()
            self._lender = await borrow_provider(self.options.sandbox)
            self._choice = self.options.sandbox

    async def close(self) -> None:
        """End the sandbox, and give back the provider."""
        await self._end()
        lender, self._lender = self._lender, None
        if lender is not None:
            await give_back_provider(lender)

    async def run(self, command: str) -> str:
        """Run a command line in a shell, from the working folder.

        Args:
            command: what the shell runs
        """
        limits = self.options
        line = Command(shell(command), deadline=limits.command_seconds, output=limits.output)
        self.last = done = await self._live.run(line)
        self.commands += 1
        said = f"{done.stdout}{done.stderr}".rstrip() or "(no output)"
        if done.ended_by != "itself":
            return f"{said}\n[killed: {_USED_UP[done.ended_by]}]"
        return f"{said}\n[exit status {done.exit}]" if done.exit else said

    async def read(self, path: str, first: int = 1, lines: int = 200) -> str:
        """Show lines of a file.

        Args:
            path: the file, from the working folder
            first: the number of the first line
            lines: how many lines
        """
        text = (await self._content(path)).splitlines()
        shown = text[max(first, 1) - 1 :][: max(lines, 0)]
        left = len(text) - max(first, 1) + 1 - len(shown)
        more = f"\n[{left} more lines]" if left > 0 else ""
        return ("\n".join(shown)[: self.options.output] or "(nothing)") + more

    async def write(self, path: str, content: str) -> str:
        """Replace a file, or make it.

        Args:
            path: the file, from the working folder
            content: all of its text
        """
        try:
            await self._live.write(path, content.encode(errors="replace"))
        except OSError as error:
            raise ToolError(str(error)) from error
        return "written"

    async def edit(self, path: str, old: str, new: str) -> str:
        """Replace a text that occurs once in a file.

        Args:
            path: the file, from the working folder
            old: the text as it is there, with all of its spaces
            new: what to put in its place
        """
        text = await self._content(path)
        found = text.count(old) if old else 0
        if found != 1:
            raise ToolError(f"the old text occurs {found} times in {path!r}: it must be once")
        return await self.write(path, text.replace(old, new))

    async def submit(self) -> ToolResult:
        """Hand in the work as it is now. This ends the task."""
        try:
            reward = await self._judge()
        finally:
            await self._end()
        done = at_least(reward, 1)
        return ToolResult(
            "the test passed" if done else "the test failed",
            reward=reward,
            terminated=True,
            success=done,
        )

    async def _content(self, path: str) -> str:
        try:
            return (await self._live.read(path, most=LARGEST_FILE)).decode(errors="replace")
        except OSError as error:
            raise ToolError(str(error)) from error

    async def _end(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.close()

    @property
    def _live(self) -> Sandbox:
        if self._sandbox is None:
            raise EnvError("no episode is being played; call reset first")
        return self._sandbox

    @property
    def _provider(self) -> SandboxProvider:
        assert self._lender is not None
        return self._lender
