"""`LiveEnv`: an instance of an environment, as episodes see it."""

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from agentrl.errors import RAISED_BY_CODE, ConfigError, EnvError, describe
from agentrl.hosting.beginnings import BEGIN, Beginning
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.host import Host, inner_env
from agentrl.hosting.inline import InlineHost
from agentrl.hosting.process import ProcessHost
from agentrl.hosting.process_env import ProcessEnv
from agentrl.hosting.replies import (
    checked_prompt,
    checked_reset,
    checked_state,
    checked_step,
    checked_tools,
)
from agentrl.hosting.thread import ThreadHost
from agentrl.protocols.env import (
    Env,
    Isolation,
    ResetResult,
    ScriptedPlayer,
    StepResult,
    can_restore,
    isolation_of,
    system_prompt_of,
    tools_of,
)
from agentrl.trajectory import unshared

T = TypeVar("T")


def host_for(env: Env, isolation: Isolation | None = None) -> Host:
    """The host of an instance, by `isolation` or else by what the environment asks for.

    Raises:
        ConfigError: the environment needs its own process and was made in this one.
    """
    if isinstance(env, ProcessEnv):
        return ProcessHost(env)
    chosen = isolation or isolation_of(env)
    if chosen == "process":
        raise ConfigError(
            f"{type(inner_env(env)).__name__} needs its own process, but was made in this one, as"
            " its factory does not declare that: write env.isolation=process in the config (or"
            " env.isolation=thread, if it may run here)"
        )
    # An async step cannot run in a thread: it belongs to the event loop.
    inline = chosen == "inline" or inspect.iscoroutinefunction(env.step)
    return InlineHost(env) if inline else ThreadHost(env)


class LiveEnv:
    """One instance of an environment on its host. Its replies are checked, and converted to the
    types that JSON has.

    Raises `EnvError` for whatever the environment raises or replies wrongly, with the innermost
    frame in its text, and `DeadlineError` when the environment does not answer; after either, the
    instance is `broken` and never used again.
    """

    def __init__(
        self, env: Env, deadlines: EnvDeadlines, isolation: Isolation | None = None
    ) -> None:
        self.env = env
        self.tools: Sequence[Mapping[str, Any]] = ()
        """The environment's tools in this episode; known after `reset`."""
        self.system_prompt = ""
        """The environment's system prompt in this episode; known after `reset`."""
        self.earned = 0.0
        """The rewards of the answers that the options gave (`begin`); known after `reset`."""
        self._deadlines = deadlines
        self._host = host_for(env, isolation)

    @property
    def broken(self) -> bool:
        """True if the instance must be closed and not used again."""
        return self._host.broken

    @broken.setter
    def broken(self, broken: bool) -> None:
        self._host.broken = broken

    @property
    def answers_at_once(self) -> bool:
        """True if its calls return without awaiting: it is sync, and runs on the event loop."""
        return self._host.answers_at_once

    async def reset(self, seed: int, options: Mapping[str, Any]) -> ResetResult:
        """Begin an episode. Its options are a copy, so an environment that changes them changes no
        other episode. Answers that they give (`begin`) are given.

        Raises:
            ConfigError: the options are wrong.
            ReplayError: the environment replies to given answers in another way than was recorded.
        """
        if seed < 0:
            raise ConfigError(f"the seed of an episode is 0 or more, got {seed}")
        # The options of a task can be copied; whoever else calls this may pass a handle.
        name = self._host.name
        copied = unshared(options, f"the options of {name}", keep_handles=True)
        beginning = Beginning.of(copied)
        own = {key: value for key, value in copied.items() if key != BEGIN}
        reply = await self._host.reset(self._deadlines.reset, seed=seed, options=own)
        result, self.earned = self._check(checked_reset, reply), 0.0
        self._read_properties()
        if beginning.turns:
            tools = bool(self.tools)
            result, self.earned = await beginning.play(result, self.step, tools=tools)
        return result

    async def step(self, action: str) -> StepResult:
        """Act with the model's message."""
        if self.tools:
            reply = await self._host.step("tool", self._deadlines.tool, action)
        else:
            reply = await self._host.step("step", self._deadlines.step, action)
        return self._check(checked_step, reply)

    @property
    def restorable(self) -> bool:
        """True if it can tell the states of its episode and go back to them; known after
        `reset`.
        """
        return can_restore(self.env)

    async def snapshot(self) -> bytes:
        """The state of the episode between two steps, for `restore` of an instance that was made in
        the same way.
        """
        if not self.restorable:
            raise EnvError(
                f"{self._host.name} cannot go back to a state: write its `snapshot` and `restore`,"
                " or declare it `deterministic` (agentrl.Env)"
            )
        state = await self._host.snapshot(self._deadlines.reset)
        return self._check(checked_state, state)

    async def restore(self, state: bytes) -> None:
        """Go back to a state of an episode, this one or another's."""
        await self._host.restore(self._deadlines.reset, state)
        self._read_properties()

    async def consult(self, player: ScriptedPlayer, rng: random.Random) -> str:
        """A scripted player's action; the player is called in the process where the environment
        runs.
        """
        return await self._host.consult(self._deadlines.step, player, rng)

    async def close(self) -> None:
        """Close the instance. Errors are only logged, since its episodes are over."""
        await self._host.close(self._deadlines.close)

    def _read_properties(self) -> None:
        # Inside the check: an environment's own code may compute them.
        self.tools = self._check(lambda name, env: checked_tools(name, tools_of(env)), self.env)
        self.system_prompt = self._check(
            lambda name, env: checked_prompt(name, system_prompt_of(env)), self.env
        )

    def _check(self, check: Callable[[str, Any], T], reply: Any) -> T:
        try:
            return check(self._host.name, reply)
        except RAISED_BY_CODE as error:
            self.broken = True
            if isinstance(error, EnvError):
                raise
            raise EnvError(
                f"{self._host.name} replied with what cannot be read: {describe(error)}"
            ) from error
