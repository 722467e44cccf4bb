"""A task in a machine of its own: the model runs commands, works on files and submits.

A task is an instruction, the files that it begins with, and a command that tests the result. The
test runs in a fresh sandbox, which gets the model's working folder and then the files of the test:
nothing else that the model has done to its sandbox has any effect there.
"""

import random
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field

from agentrl.envs.base import plays
from agentrl.envs.sandboxed import SandboxedEnv, SandboxOptions
from agentrl.errors import ConfigError
from agentrl.protocols import Command, Dockerfile, Image, OwnerOnly, Sandbox, SandboxSpec, shell
from agentrl.sandbox.archive import archive_of
from agentrl.settings.base import PathText
from agentrl.trajectory import ToolCall

_EMPTY_FOLDER = "find . -mindepth 1 -delete"
_MOST_PRINTED = 1 << 20
"""Bytes that a test may print where its output is compared."""


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
    setup: str = ""
    """A command that prepares the working folder, also in the sandbox of the test."""
    printed: str | None = None
    """What the test must print, too. It is compared outside of the sandbox, where no program of the
    model can read what is expected."""


class ImageOptions(SandboxOptions):
    """Options of environments whose sandboxes start from one image."""

    image: Annotated[str, OwnerOnly()] = ""
    """An image to work in, where the provider has images."""
    dockerfile: Annotated[PathText, OwnerOnly()] = ""
    """A folder with a Dockerfile to build the image from, instead."""


class ShellTaskEnv(SandboxedEnv):
    """An environment of `ShellTask`s: a subclass implements `_task_of`."""

    options: ImageOptions
    task: ShellTask

    @abstractmethod
    def _task_of(self, seed: int) -> ShellTask:
        """The task of an episode.

        Raises:
            ConfigError: the options make none.
        """

    async def _begin(self, seed: int) -> tuple[str, Sandbox]:
        self.task = self._task_of(seed)
        return self.task.instruction, await self._prepared(self.task.files)

    async def _judge(self) -> float:
        """1 if the test passes on the working folder, in a sandbox that the model never had."""
        made = await self._made()
        await self._end()
        if made is None:
            return 0.0
        judge = await self._prepared({})
        try:
            await self._sound(judge, _EMPTY_FOLDER)
            try:
                await judge.upload(made)
                if self.task.test_files:
                    await judge.upload(archive_of(self.task.test_files))
            except (OSError, ValueError):
                await self._check_alive(judge)
                return 0.0  # what the model has made cannot be unpacked, or is in the test's way
            deadline = self.options.test_seconds
            test = Command(shell(self.task.test), deadline=deadline, output=_MOST_PRINTED)
            done = await judge.run(test)
            passed = done.exit == 0 and done.ended_by == "itself"
            if passed and self.task.printed in (None, done.stdout):
                return 1.0
            await self._check_alive(judge)
            return 0.0
        finally:
            await judge.close()

    async def _made(self) -> bytes | None:
        """The model's working folder; None if it cannot be had, or is too large."""
        try:
            return await self._live.download()
        except OSError:
            await self._check_alive(self._live)
            return None

    async def _prepared(self, files: Mapping[str, str]) -> Sandbox:
        chosen = self.options
        origin = Image(chosen.image) if chosen.image else None
        spec = SandboxSpec(
            Dockerfile(Path(chosen.dockerfile)) if chosen.dockerfile else origin,
            chosen.resources,
            lease=chosen.lease,
        )
        sandbox = await self._provider.start(spec)
        try:
            if files:
                await sandbox.upload(archive_of(files))
            if self.task.setup:
                await self._sound(sandbox, self.task.setup)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox


class Shell(ShellTaskEnv):
    """Do a task in a sandbox; `submit` ends the episode, with reward 1 if the test passes."""

    options: "Shell.Options"

    class Options(ImageOptions):
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

    def _task_of(self, seed: int) -> ShellTask:
        chosen = self.options
        if not chosen.instruction:
            return adding_task(random.Random(seed))
        if not chosen.test:
            raise ConfigError(
                "options: the task has an instruction and no test: write the command whose exit"
                " status 0 means that it is done"
            )
        return ShellTask(
            chosen.instruction, chosen.files, chosen.test, chosen.test_files, chosen.setup
        )


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
