"""`LethalRequests`: the requests of an episode to a process, each of which may kill it again."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from pydantic_core import to_json

from agentrl.errors import EnvProcessDiedError, LethalTaskError
from agentrl.flow.suspicion import Suspicion

T = TypeVar("T")

_suspicions: WeakKeyDictionary[asyncio.AbstractEventLoop, Suspicion] = WeakKeyDictionary()
"""By event loop, and gone with it. An environment lives for one host, and what it died of is a
warning to all that come after it, so no environment can own this."""


class LethalRequests:
    """The requests of an episode: its reset, and each step with all before it.

    One that two processes have died of is set aside: it fails at once. The same step after others
    is another request, since what an action does depends on them, and a model that is asked again
    may write another one.
    """

    def __init__(self, env: str) -> None:
        self._env = env
        self._task = ""
        self._steps = 0
        self._said = b""

    async def reset(
        self, seed: int, options: Mapping[str, Any], answer: Callable[[], Awaitable[T]]
    ) -> T:
        """Begin an episode.

        Raises:
            LethalTaskError: processes have died of this task.
            EnvError: the environment failed.
        """
        self._task = f"the task of seed {seed} with the options {dict(options)!r:.200}"
        self._steps = 0
        self._said = to_json([self._env, seed, options], fallback=repr)
        return await self._ask(self._task, answer)

    async def step(self, action: str, answer: Callable[[], Awaitable[T]]) -> T:
        """Act.

        Raises:
            LethalTaskError: processes have died of this action after the same ones.
            EnvError: the environment failed.
        """
        self._steps += 1
        self._said = hashlib.sha256(self._said + action.encode(errors="replace")).digest()
        return await self._ask(f"step {self._steps} of {self._task}", answer)

    async def _ask(self, name: str, answer: Callable[[], Awaitable[T]]) -> T:
        said = self._said
        suspicion = _suspicions.setdefault(
            asyncio.get_running_loop(), Suspicion(LethalTaskError, "processes of the environment")
        )
        suspect = suspicion.suspect(name, lambda: said)
        suspicion.check(suspect)
        try:
            result = await answer()
        except EnvProcessDiedError as error:
            # Another may have died of it meanwhile.
            suspicion.died([suspicion.suspect(name, lambda: said)], error)
            suspicion.check(suspect)
            raise
        suspicion.ended(suspicion.suspect(name, lambda: said))
        return result
