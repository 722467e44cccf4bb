"""`ThreadHost`: an environment in a thread of its own."""

import logging
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from agentrl.hosting.call_thread import CallThread
from agentrl.hosting.host import call_env, consult_player, has_async, inner_env, log_failure
from agentrl.protocols.env import Env, ScriptedPlayer, call_restore, call_snapshot

logger = logging.getLogger(__name__)


class ThreadHost:
    """An environment whose methods may block. One that hangs is abandoned with its thread, and the
    event loop goes on.
    """

    answers_at_once = False

    def __init__(self, env: Env) -> None:
        self.name = type(inner_env(env)).__name__
        self.broken = False
        self._env = env
        self._thread = CallThread(f"env-{self.name}")

    async def reset(self, seconds: float, *, seed: int, options: Mapping[str, Any]) -> Any:
        """The reply of `Env.reset`, within `seconds`."""
        return await self._call(
            "reset", seconds, partial(self._env.reset, seed=seed, options=options)
        )

    async def step(self, phase: str, seconds: float, action: str) -> Any:
        """The reply of `Env.step`, within `seconds`."""
        return await self._call(phase, seconds, partial(self._env.step, action))

    async def consult(self, seconds: float, player: ScriptedPlayer, rng: random.Random) -> str:
        """A scripted player's action."""
        return await consult_player(self, self._env, player, rng)

    async def snapshot(self, seconds: float) -> Any:
        """The reply of `Env.snapshot`, within `seconds`."""
        return await self._call("snapshot", seconds, lambda: call_snapshot(self._env))

    async def restore(self, seconds: float, state: bytes) -> None:
        """Call `Env.restore`, within `seconds`."""
        await self._call("restore", seconds, lambda: call_restore(self._env, state))

    async def close(self, seconds: float) -> None:
        """Close the instance. A sync close runs in the background, after a call that hangs (if that
        ever returns); an async one is awaited on the event loop.
        """
        if not has_async(self._env, "close"):
            self._thread.stop_after(self._env.close)
            return
        try:
            await log_failure(call_env(self, "close", seconds, self._env.close))
        finally:
            self._thread.stop_after(lambda: None)

    async def _call(self, phase: str, seconds: float, work: Callable[[], Any]) -> Any:
        return await call_env(self, phase, seconds, partial(self._thread.run, work))
