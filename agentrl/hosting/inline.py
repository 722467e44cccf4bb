"""`InlineHost`: an environment on the event loop."""

import random
from collections.abc import Mapping
from functools import partial
from typing import Any

from agentrl.hosting.host import call_env, consult_player, has_async, inner_env, log_failure
from agentrl.protocols.env import Env, ScriptedPlayer, call_restore, call_snapshot


class InlineHost:
    """An environment whose methods are called on the event loop: async ones, and sync ones that
    never block.
    """

    def __init__(self, env: Env) -> None:
        self.name = type(inner_env(env)).__name__
        self.answers_at_once = not (has_async(env, "reset") or has_async(env, "step"))
        self.broken = False
        self._env = env

    async def reset(self, seconds: float, *, seed: int, options: Mapping[str, Any]) -> Any:
        """The reply of `Env.reset`, within `seconds`."""
        begin = partial(self._env.reset, seed=seed, options=options)
        return await call_env(self, "reset", seconds, begin)

    async def step(self, phase: str, seconds: float, action: str) -> Any:
        """The reply of `Env.step`, within `seconds`."""
        return await call_env(self, phase, seconds, partial(self._env.step, action))

    async def consult(self, seconds: float, player: ScriptedPlayer, rng: random.Random) -> str:
        """A scripted player's action."""
        return await consult_player(self, self._env, player, rng)

    async def snapshot(self, seconds: float) -> Any:
        """The reply of `Env.snapshot`, within `seconds`."""
        return await call_env(self, "snapshot", seconds, lambda: call_snapshot(self._env))

    async def restore(self, seconds: float, state: bytes) -> None:
        """Call `Env.restore`, within `seconds`."""
        await call_env(self, "restore", seconds, lambda: call_restore(self._env, state))

    async def close(self, seconds: float) -> None:
        """Close the instance, whether or not it is broken: nothing else holds its memory."""
        await log_failure(call_env(self, "close", seconds, self._env.close))
