"""`ProcessHost`: an environment in a process of its own."""

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from agentrl.errors import EnvError
from agentrl.flow import has_played, note_played
from agentrl.hosting.call_thread import CallThread
from agentrl.hosting.host import EXPLAINED, call_env, log_failure
from agentrl.hosting.lethal_requests import LethalRequests
from agentrl.hosting.process_env import ProcessEnv
from agentrl.protocols.env import ScriptedPlayer


class ProcessHost:
    """An environment in a worker process, which is killed if it misses a deadline. A thread waits
    for its answers.

    A request that processes have died of is refused with `LethalTaskError`.
    """

    answers_at_once = False

    def __init__(self, env: ProcessEnv) -> None:
        self.name = env.name
        self.broken = False
        self._env = env
        self._thread = CallThread(f"env-{self.name}")
        self._requests = LethalRequests(env.address)

    async def reset(self, seconds: float, *, seed: int, options: Mapping[str, Any]) -> Any:
        """The reply of `Env.reset`, within `seconds`."""
        begin = partial(self._env.reset, seed=seed, options=options)
        self._env.has_played = has_played()
        reply = await self._requests.reset(
            seed, options, partial(self._call, "reset", seconds, begin)
        )
        note_played()
        return reply

    async def step(self, phase: str, seconds: float, action: str) -> Any:
        """The reply of `Env.step`, within `seconds`."""
        begin = partial(self._env.step, action)
        return await self._requests.step(action, partial(self._call, phase, seconds, begin))

    async def consult(self, seconds: float, player: ScriptedPlayer, rng: random.Random) -> str:
        """A scripted player's action. The worker imports and calls the player."""
        begin = partial(self._env.consult, player, rng)
        return str(await self._call("step", seconds, begin))

    async def snapshot(self, seconds: float) -> Any:
        """The reply of `Env.snapshot`, within `seconds`."""
        return await self._call("snapshot", seconds, self._env.snapshot)

    async def restore(self, seconds: float, state: bytes) -> None:
        """Call `Env.restore`, within `seconds`."""
        self._env.has_played = has_played()
        await self._call("restore", seconds, partial(self._env.restore, state))

    async def close(self, seconds: float) -> None:
        """Close the instance, unless it is broken, and kill its process."""
        try:
            if not self.broken:
                await log_failure(self._call("close", seconds, self._env.close))
        finally:
            # A thread that waits for an answer reads the end of the stream after the kill, and can
            # make its last call.
            self._env.kill()
            self._thread.stop_after(self._env.reap)

    async def _call(self, phase: str, seconds: float, work: Callable[[], Any]) -> Any:
        # The text of a worker's EnvError already has what the environment raised there.
        begin = partial(self._thread.run, work)
        return await call_env(self, phase, seconds, begin, explained=(*EXPLAINED, EnvError))
