"""A task in a machine of its own: the model runs commands, works on files and submits.

A task is an instruction, the files that it begins with, and a command that tests the result. The
test runs in a fresh sandbox, which gets the model's working folder and then the files of the test:
nothing else that the model has done to its sandbox has any effect there.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from agentrl.envs.base import ToolEnv, ToolError, ToolResult, plays, read_options
from agentrl.errors import ConfigError, EnvError
from agentrl.protocols import (
    Command,
    Dockerfile,
    Executed,
    Image,
    OwnerOnly,
    Resources,
    Sandbox,
    SandboxProvider,
    SandboxSpec,
    shell,
)
from agentrl.sandbox.archive import archive_of
from agentrl.sandbox.providers import borrow_provider, give_back_provider
from agentrl.settings.base import PathText, Settings
from agentrl.trajectory import ToolCall

LARGEST_FILE = 1 << 20
"""Bytes of a file that the model can read or edit."""
_EMPTY_FOLDER = "find . -mindepth 1 -delete"
_USED_UP = {
    "deadline": "it took longer than it may",
    "cpu": "it used more processor time than it may",
    "memory": "it used more memory than there is",
    "processes": "no more processes can be started",
    "disk": "it used more disk than there is",
}


@dataclass(frozen=True, slots=True)
class ShellTask:
    """What is to be done, and how it is tested."""

    instruction: str
    """What the model is told."""
    files: Mapping[str, str]
    """The working folder at the beginning, by relative paths."""
    test: str
    """The command that tests the result: with exit status 0, the task is done."""
    test_files: Mapping[str, str] = field(default_factory=dict)
    """Files that the test needs, by relative paths. The model never sees them."""


class Shell(ToolEnv):
    """Do a task in a sandbox; `submit` ends the episode, with reward 1 if the test passes."""

    system_prompt = (
        "You work on a machine of your own, by its tools. Do what you are asked, check it, and then"
        " submit."
    )
    isolation = "inline"

    class Options(Settings):
        """The options of `reset`."""

        instruction: str = ""
        """What the model is told. By default, the task is to add the numbers of a file, which the
        seed draws; the other options of a task then stay empty."""
        files: Mapping[str, str] = Field(default_factory=dict)
        """Files in the working folder at the beginning: contents by relative paths."""
        setup: str = ""
        """A command that prepares the working folder, also in the sandbox of the test."""
        test: str = ""
        """The command that tests the result in a fresh sandbox: exit status 0 is reward 1."""
        test_files: Mapping[str, str] = Field(default_factory=dict)
        """Files for the test, which replace the model's: contents by relative paths."""
        image: Annotated[str, OwnerOnly()] = ""
        """An image to work in, where the provider has images."""
        dockerfile: Annotated[PathText, OwnerOnly()] = ""
        """A folder with a Dockerfile to build the image from, instead."""
        command_seconds: float = Field(60.0, gt=0)
        """Seconds after which a command of the model is killed."""
        test_seconds: float = Field(120.0, gt=0)
        """Seconds after which the test, or the setup, is killed; the test has then failed."""
        lease: float = Field(3600.0, gt=0)
        """Seconds after which a sandbox ends by itself: longer than any episode takes."""
        output: int = Field(8192, ge=64)
        """Bytes of stdout, and of stderr, that the model is shown: the beginning and the end."""
        memory: Annotated[int, OwnerOnly()] = Field(1 << 30, ge=32 << 20)
        """Bytes of memory of a sandbox."""
        cpus: Annotated[float, OwnerOnly()] = Field(1.0, gt=0)
        """CPUs of a sandbox."""
        processes: Annotated[int, OwnerOnly()] = Field(128, ge=1)
        """Processes and threads of a sandbox at a time."""
        disk: Annotated[int, OwnerOnly()] = Field(256 << 20, ge=1 << 20)
        """Bytes of files in a sandbox, as far as its provider limits them."""
        sandbox: Annotated[dict[str, Any], OwnerOnly()] = Field(
            default_factory=lambda: {"name": "jail"}
        )
        """The provider and its settings: `{name: docker, image: python:3.12}`
        (docs/sandboxes.md)."""

    def __init__(self) -> None:
        self._provider: SandboxProvider | None = None
        self._choice: dict[str, Any] = {}
        self._sandbox: Sandbox | None = None
        self.last: Executed | None = None
        """How the model's last command has ended."""

    async def start(self, seed: int, options: Mapping[str, Any]) -> str:
        """Start the sandbox of an episode."""
        self.options = read_options(self.Options, options)
        self.task = self._task_of(seed)
        self.last = None
        await self._end()
        if self._provider is None or self._choice != self.options.sandbox:
            await self.close()
            self._provider = await borrow_provider(self.options.sandbox)
            self._choice = self.options.sandbox
        self._sandbox = await self._prepared(self.task.files)
        return self.task.instruction

    async def close(self) -> None:
        """End the sandbox, and give back the provider."""
        await self._end()
        provider, self._provider = self._provider, None
        if provider is not None:
            await give_back_provider(provider)

    def _task_of(self, seed: int) -> ShellTask:
        """The task of an episode.

        Raises:
            ConfigError: it has no test.
        """
        chosen = self.options
        if not chosen.instruction:
            return adding_task(random.Random(seed))
        if not chosen.test:
            raise ConfigError(
                "options: the task has an instruction and no test: write the command whose exit"
                " status 0 means that it is done"
            )
        return ShellTask(chosen.instruction, chosen.files, chosen.test, chosen.test_files)

    async def run(self, command: str) -> str:
        """Run a command line in a shell, from the working folder.

        Args:
            command: what the shell runs
        """
        limits = self.options
        line = Command(shell(command), deadline=limits.command_seconds, output=limits.output)
        self.last = done = await self._live.run(line)
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
        """Hand in the working folder as it is now. This ends the task."""
        done = await self._judged()
        return ToolResult(
            "the test passed" if done else "the test failed",
            reward=float(done),
            terminated=True,
            success=done,
        )

    async def _judged(self) -> bool:
        """Whether the test passes on the working folder, in a sandbox that the model never had."""
        made = await self._made()
        await self._end()
        if made is None:
            return False
        judge = await self._prepared({})
        try:
            await self._sound(judge, _EMPTY_FOLDER)
            try:
                await judge.upload(made)
            except (OSError, ValueError):
                return False  # it holds what cannot be unpacked, which is the model's doing
            if self.task.test_files:
                await judge.upload(archive_of(self.task.test_files))
            test = Command(shell(self.task.test), deadline=self.options.test_seconds)
            done = await judge.run(test)
        finally:
            await judge.close()
        return done.exit == 0 and done.ended_by == "itself"

    async def _made(self) -> bytes | None:
        """The model's working folder; None if it cannot be had, or is too large."""
        try:
            return await self._live.download()
        except OSError:
            return None

    async def _prepared(self, files: Mapping[str, str]) -> Sandbox:
        assert self._provider is not None
        chosen = self.options
        origin = Image(chosen.image) if chosen.image else None
        spec = SandboxSpec(
            Dockerfile(Path(chosen.dockerfile)) if chosen.dockerfile else origin,
            Resources(chosen.memory, chosen.cpus, chosen.processes, chosen.disk),
            lease=chosen.lease,
        )
        sandbox = await self._provider.start(spec)
        try:
            if files:
                await sandbox.upload(archive_of(files))
            if chosen.setup:
                await self._sound(sandbox, chosen.setup)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def _sound(self, sandbox: Sandbox, line: str) -> None:
        """Run a command of the task's, which must succeed."""
        done = await sandbox.run(Command(shell(line), deadline=self.options.test_seconds))
        if done.exit or done.ended_by != "itself":
            raise EnvError(f"the task's command {line!r:.200} failed: {done}")

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


def adding_task(rng: random.Random) -> ShellTask:
    """Add the numbers of a file."""
    numbers = [rng.randrange(1000) for _ in range(rng.randint(3, 30))]
    return ShellTask(
        "The file numbers.txt has a number in each line. Write their sum into the file sum.txt.",
        {"numbers.txt": "".join(f"{number}\n" for number in numbers)},
        f'test "$(cat sum.txt)" = {sum(numbers)}',
    )


@plays(Shell)
def strong_player(env: Shell, rng: random.Random) -> str:
    """Does the built-in task with one command, and submits. A `ScriptedPlayer`."""
    if env.last is not None:
        return env.written(ToolCall("submit", {}))
    add = "t=0; while read n; do t=$((t + n)); done < numbers.txt; echo $t > sum.txt"
    return env.written(ToolCall("run", {"command": add}))
