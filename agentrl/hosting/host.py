"""`Host`: the place where one instance of an environment runs.

The three hosts are the event loop (`inline.py`), a thread (`thread.py`) and a worker process
(`process.py`).
"""

import asyncio
import inspect
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from agentrl.errors import (
    RAISED_BY_CODE,
    ConfigError,
    DeadlineError,
    EnvError,
    LethalTaskError,
    OutageError,
    RolloutError,
    describe,
    is_cancellation,
)
from agentrl.flow.deadline import deadline
from agentrl.flow.spans import span
from agentrl.hosting.wrappers import Wrapper
from agentrl.protocols.env import Env, ScriptedPlayer, unwrapped_env

logger = logging.getLogger(__name__)

EXPLAINED: tuple[type[Exception], ...] = (
    DeadlineError,
    LethalTaskError,
    ConfigError,
    OutageError,
)
"""Errors that already say what happened to the environment."""


class Host(Protocol):
    """One instance of an environment, called under deadlines.

    Its calls return replies as the environment gave them, unchecked. They raise `EnvError` for
    whatever the environment raises, with the innermost frame in its text, and `DeadlineError` when
    it does not answer.
    """

    name: str
    """The environment's name, for messages."""
    answers_at_once: bool
    """True if `reset` and `step` return without awaiting anything."""
    broken: bool
    """True if a call has failed. The environment may still be inside that call, so a broken
    instance is closed and never called again.
    """

    async def reset(self, seconds: float, *, seed: int, options: Mapping[str, Any]) -> Any:
        """The reply of `Env.reset`, within `seconds` of loop time."""
        ...

    async def step(self, phase: str, seconds: float, action: str) -> Any:
        """The reply of `Env.step`, within `seconds`; `phase` names the deadline in its error."""
        ...

    async def consult(self, seconds: float, player: ScriptedPlayer, rng: random.Random) -> str:
        """A scripted player's action. The player is called where the environment runs."""
        ...

    async def snapshot(self, seconds: float) -> Any:
        """The reply of `Env.snapshot`, within `seconds`."""
        ...

    async def restore(self, seconds: float, state: bytes) -> None:
        """Call `Env.restore`, within `seconds`."""
        ...

    async def close(self, seconds: float) -> None:
        """Close the instance within `seconds`, or abandon it if it is broken. Errors are logged."""
        ...


async def call_env(
    host: Host,
    phase: str,
    seconds: float,
    begin: Callable[[], Any],
    *,
    explained: tuple[type[Exception], ...] = EXPLAINED,
) -> Any:
    """The answer to a call, or the error of a call that failed; the host is broken after it.

    `begin` starts the call, and may return an awaitable. Errors of the types `explained` are raised
    as they are, all others as `EnvError`.
    """
    with span("environments", phase):
        try:
            result = begin()
            # A sync environment on the event loop has answered by now. No deadline could have
            # interrupted it.
            if type(result) is tuple:
                return result
            with deadline("environment", phase, seconds):
                return await result if inspect.isawaitable(result) else result
        except explained:
            host.broken = True
            raise
        except RAISED_BY_CODE as error:
            host.broken = True
            if is_cancellation(error):
                raise
            raise EnvError(f"{host.name}.{phase} raised {describe(error)}") from error


async def consult_player(host: Host, env: Env, player: ScriptedPlayer, rng: random.Random) -> str:
    """The action of a player that is called on the event loop."""
    try:
        action = player(unwrapped_env(env), rng)
        return await action if inspect.isawaitable(action) else action
    except (SystemExit, asyncio.CancelledError) as error:
        # Passed on, either would end the run in silence.
        if is_cancellation(error):
            raise
        raise EnvError(f"a player of {host.name} raised {describe(error)}") from error


async def log_failure(closing: Awaitable[Any]) -> None:
    """Wait for a close. Its failure is only logged, since the episodes are over."""
    try:
        await closing
    except RolloutError as error:
        logger.warning("%s", error)


def inner_env(env: Env) -> Env:
    """The environment inside all wrappers."""
    return env.unwrapped if isinstance(env, Wrapper) else env


def has_async(env: Env, method: str) -> bool:
    """True if this method of the environment, or of the one inside its wrappers, is async."""
    return any(
        inspect.iscoroutinefunction(getattr(layer, method)) for layer in (env, inner_env(env))
    )
