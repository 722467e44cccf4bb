"""A task in a machine of its own: the model runs commands, works on files and submits.

A task is an instruction, the files that it begins with, and a command that tests the result. The
test runs in a fresh sandbox, which gets the model's working folder and then the files of the test:
nothing else that the model has done to its sandbox has any effect there.
"""

import random
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field

from agentrl.envs.base import plays
from agentrl.envs.sandboxed import SandboxedEnv, SandboxOptions
from agentrl.errors import ConfigError
from agentrl.protocols import Dockerfile, Image, OwnerOnly, Sandbox, SandboxSpec
from agentrl.sandbox.shell_task import ShellTask, TaskSandboxes
from agentrl.settings.base import PathText
from agentrl.trajectory import ToolCall


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
        return self.task.instruction, await self._sandboxes.to_work_in()

    async def _judge(self) -> float:
        """1 if the test passes on the working folder, in a sandbox that the model never had."""
        async with self._sandboxes.work_in(self._live) as made:
            await self._end()
            return await self._sandboxes.verdict(made)

    @property
    def _sandboxes(self) -> TaskSandboxes:
        chosen = self.options
        origin = Image(chosen.image) if chosen.image else None
        spec = SandboxSpec(
            Dockerfile(Path(chosen.dockerfile)) if chosen.dockerfile else origin,
            chosen.resources,
            lease=chosen.lease,
        )
        return TaskSandboxes(self._provider, spec, self.task, chosen.test_seconds)


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
