"""Tasks in Harbor's format (Terminal-Bench and many others): `env: harbor:FOLDER`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from agentrl.envs.sandboxed import SandboxedEnv, SandboxOptions
from agentrl.errors import ConfigError, PluginError
from agentrl.protocols import Env, OwnerOnly, Sandbox, StepReply
from agentrl.sandbox.harbor.task import named_folder, read_task, task_folders
from agentrl.sandbox.harbor.trial import HarborTrial, TrialSettings
from agentrl.settings.base import NameText


def scheme(rest: str) -> Callable[[], Env]:
    """harbor:tasks/: a task of Harbor, or a folder of tasks.

    Raises:
        PluginError: there is none.
    """
    try:
        folders = task_folders(Path(rest).expanduser().resolve())
    except ConfigError as error:
        raise PluginError(f"'harbor:{rest}': {error}") from error
    return partial(Harbor, tuple(map(str, folders)))


class Harbor(SandboxedEnv):
    """Do a task of Harbor in a sandbox; `submit` ends the episode, with the reward of the task's
    verifier. A verifier that gives none has given 0.
    """

    options: "Harbor.Options"

    class Options(SandboxOptions):
        """The options of `reset`."""

        task: str = ""
        """The name of a task's folder. By default the seed chooses one."""
        network: Annotated[Literal["task", "none"], OwnerOnly()] = "task"
        """`none` starts sandboxes without a network, whatever the tasks say; `task` gives them one
        if they say so and the provider has one."""
        verifier: Annotated[Literal["task", "fresh"], OwnerOnly()] = "task"
        """`fresh` runs every verifier in a sandbox of its own, with the working folder and the
        artifacts. By default the task says; in the agent's own, the agent can forge the verdict."""
        reward: NameText = "reward"
        """Which one of the verifier's rewards counts."""

    restorable = False  # a trial has sandboxes of its own

    def __init__(self, folders: tuple[str, ...]) -> None:
        super().__init__()
        self._folders = tuple(map(Path, folders))
        self.trial: HarborTrial | None = None
        """The episode's."""

    async def _begin(self, seed: int) -> tuple[str, Sandbox]:
        chosen = self.options
        folders = self._folders
        folder = named_folder(folders, chosen.task) if chosen.task else folders[seed % len(folders)]
        task = read_task(folder)
        settings = TrialSettings(
            chosen.resources, chosen.lease, chosen.network == "task", chosen.verifier == "fresh"
        )
        self.trial = HarborTrial(task, self._provider, settings)
        sandbox = await self.trial.start()
        return task.instruction, sandbox

    async def step(self, action: str) -> StepReply:
        """Run the tool calls in the model's message. After the agent's time, the work is judged as
        it is then.
        """
        if self.trial is not None and self.trial.is_late:
            return (await self.submit()).step
        playing = super().step(action)
        return playing if isinstance(playing, tuple) else await playing

    async def _judge(self) -> float:
        assert self.trial is not None
        verdict = await self.trial.judge()
        if verdict.rewards and self.options.reward not in verdict.rewards:
            raise ConfigError(
                f"env.options.reward: the verifier of {self.trial.task.name!r} gives no"
                f" {self.options.reward!r}, but {', '.join(verdict.rewards)}"
            )
        return verdict.rewards.get(self.options.reward, 0.0)

    async def _end(self) -> None:
        await super()._end()
        if self.trial is not None:
            await self.trial.close()
