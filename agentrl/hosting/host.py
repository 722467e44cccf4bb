"""Hosts environments: makes them, calls them under deadlines, reuses them, and abandons them when
they hang.

A sync environment runs in its own thread unless it sets `isolation = "inline"`; an async one runs
on the event loop. A hung environment is abandoned with its thread (a daemon): its episode loses one
deadline, and nothing else is blocked. An environment with `isolation = "process"` is a `ProcessEnv`
here, and is killed at its deadline.
"""

import asyncio
import inspect
import logging
import queue
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from agentrl.errors import (
    RAISED_BY_CODE,
    ConfigError,
    DeadlineError,
    EnvError,
    LethalTaskError,
    OutageError,
    RolloutError,
    as_exception,
    describe,
    is_cancellation,
)
from agentrl.flow import Flow, deadline, span
from agentrl.hosting.calls import recorded
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.lethal_requests import Requests
from agentrl.hosting.pictures import pictured
from agentrl.hosting.process import ProcessEnv
from agentrl.hosting.replies import checked_prompt, checked_reset, checked_step, checked_tools
from agentrl.hosting.wrappers import Wrapper
from agentrl.protocols import Env, Isolation, ResetResult, ScriptedPlayer, StepResult
from agentrl.trajectory import unshared

logger = logging.getLogger(__name__)
T = TypeVar("T")


class _Thread:
    """Runs one call at a time on its own daemon thread, which starts with the first call."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[
            tuple[Callable[[], Any], asyncio.Future[Any] | None] | None
        ] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            work, future = call
            try:
                result, error = work(), None
            except BaseException as raised:
                result, error = None, raised
            if future is None:
                if error is not None:
                    logger.warning("closing an environment raised %r", error)
                continue
            loop = future.get_loop()
            if loop.is_closed():
                return
            loop.call_soon_threadsafe(_settle, future, result, error)

    async def run(self, work: Callable[[], Any]) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._put(work, future)
        result, error = await future
        if error is None:
            return result
        raise (
            error if isinstance(error, SystemExit | asyncio.CancelledError) else as_exception(error)
        )

    def stop_after(self, last: Callable[[], Any]) -> None:
        """Run `last` in the background as soon as the current call returns (if ever), then end the
        thread.
        """
        self._put(last, None)
        self._calls.put(None)

    def _put(self, work: Callable[[], Any], future: asyncio.Future[Any] | None) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._calls.put((work, future))


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():  # the caller's deadline has passed; the answer is dropped
        return
    future.set_result((result, error))


@dataclass(eq=False)
class LiveEnv:
    """One environment instance and the thread it may need. `isolation`, where given, overrides the
    environment's own.

    Raises `EnvError` for whatever the environment raises, with the innermost frame in its text, and
    `DeadlineError` when the environment does not answer; after either, the instance is `broken` and
    never used again.
    """

    env: Env
    deadlines: EnvDeadlines
    broken: bool = False
    isolation: Isolation | None = None

    def __post_init__(self) -> None:
        chosen = None if isinstance(self.env, ProcessEnv) else self.isolation
        isolation = chosen or getattr(self.env, "isolation", "thread")
        if isolation == "process":
            raise ConfigError(
                f"{self._name} needs its own process, but was made in this one, as its factory does"
                " not declare that: write env.isolation=process in the config (or"
                " env.isolation=thread, if it may run here)"
            )
        inline = isolation == "inline" or inspect.iscoroutinefunction(self.env.step)
        self._thread = None if inline else _Thread(f"env-{self._name}")
        inner = self.env.unwrapped if isinstance(self.env, Wrapper) else self.env
        calls = (self.env.reset, self.env.step, inner.reset, inner.step)
        self._requests = Requests(self.env.address) if isinstance(self.env, ProcessEnv) else None
        self.answers_at_once = inline and not any(
            inspect.iscoroutinefunction(call) for call in calls
        )
        """Whether its calls return without awaiting: it is sync, and runs on the event loop."""
        self.tools: Sequence[Mapping[str, Any]] = ()
        """The environment's tools in this episode; known after `reset`."""
        self.system_prompt = ""
        """The environment's system prompt in this episode; known after `reset`."""

    async def reset(self, seed: int, options: Mapping[str, Any]) -> ResetResult:
        """Begin an episode. Its options are a copy, so an environment that changes them changes no
        other episode.

        Raises:
            ConfigError: the options are wrong.
        """
        if seed < 0:
            raise ConfigError(f"the seed of an episode is 0 or more, got {seed}")
        # Those of a task can be copied; whoever else calls this may pass a handle.
        own = unshared(options, f"the options of {self._name}", keep_handles=True)
        call = partial(self.env.reset, seed=seed, options=own)
        answer = partial(self._call, "reset", self.deadlines.reset, call)
        reply = await (
            answer() if self._requests is None else self._requests.reset(seed, options, answer)
        )
        result = self._checked(checked_reset, reply)
        self.tools = self._checked(
            lambda name, env: checked_tools(name, getattr(env, "tools", ())), self.env
        )
        self.system_prompt = self._checked(
            lambda name, env: checked_prompt(name, getattr(env, "system_prompt", "")), self.env
        )
        return result

    async def step(self, action: str) -> StepResult:
        phase, seconds = (
            ("tool", self.deadlines.tool) if self.tools else ("step", self.deadlines.step)
        )
        answer = partial(self._call, phase, seconds, partial(self.env.step, action))
        reply = await (answer() if self._requests is None else self._requests.step(action, answer))
        return self._checked(checked_step, reply)

    def _checked(self, check: Callable[[str, Any], T], reply: Any) -> T:
        try:
            return check(self._name, reply)
        except RAISED_BY_CODE as error:
            self.broken = True
            if isinstance(error, EnvError):
                raise
            raise EnvError(
                f"{self._name} replied with what cannot be read: {describe(error)}"
            ) from error

    async def consult(self, player: ScriptedPlayer, rng: random.Random) -> str:
        """A scripted player's action; the player is called in the process where the environment
        runs.
        """
        if isinstance(self.env, ProcessEnv):
            return str(
                await self._call(
                    "step", self.deadlines.step, partial(self.env.consult, player, rng)
                )
            )
        try:
            action = player(getattr(self.env, "unwrapped", self.env), rng)
            return await action if inspect.isawaitable(action) else action
        except (SystemExit, asyncio.CancelledError) as error:  # else the run would end in silence
            if is_cancellation(error):
                raise
            raise EnvError(f"a player of {self._name} raised {describe(error)}") from error

    async def close(self) -> None:
        """Close the instance. Errors are only logged, since its episodes are over."""
        if isinstance(self.env, ProcessEnv) and self._thread is not None:
            await self._end_process(self.env, self._thread)
            return
        if self._thread is not None and not inspect.iscoroutinefunction(self.env.close):
            self._thread.stop_after(self.env.close)
            return
        thread, self._thread = self._thread, None
        try:
            await self._call(
                "close", self.deadlines.close, self.env.close
            )  # an async one runs on the event loop
        except RolloutError as error:
            logger.warning("%s", error)
        finally:
            if thread is not None:
                thread.stop_after(lambda: None)

    async def _end_process(self, env: ProcessEnv, thread: _Thread) -> None:
        try:
            if not self.broken:
                await self._call("close", self.deadlines.close, env.close)
        except RolloutError as error:
            logger.warning("%s", error)
        finally:
            # a thread that waits for an answer then reads the end of the stream, and makes its last
            # call
            env.kill()
            thread.stop_after(env.reap)

    @property
    def _name(self) -> str:
        if isinstance(self.env, ProcessEnv):
            return self.env.name
        return type(self.env.unwrapped if isinstance(self.env, Wrapper) else self.env).__name__

    async def _call(self, phase: str, seconds: float, work: Callable[[], Any]) -> Any:
        with span("environments", phase):
            return await self._answer(phase, seconds, work)

    async def _answer(self, phase: str, seconds: float, work: Callable[[], Any]) -> Any:
        try:
            result = None if self._thread else work()
            if (
                type(result) is tuple
            ):  # an inline environment has answered already, and could not be interrupted
                return result
            with deadline("environment", phase, seconds):
                if self._thread:
                    result = await self._thread.run(work)
                return await result if inspect.isawaitable(result) else result
        except (DeadlineError, LethalTaskError, ConfigError):
            # The environment may still be inside the call. Wrong options end the run, not only the
            # episode.
            self.broken = True
            raise
        except RAISED_BY_CODE as error:
            self.broken = True
            if (
                is_cancellation(error)
                or isinstance(error, OutageError)
                or (isinstance(self.env, ProcessEnv) and isinstance(error, EnvError))
            ):
                raise  # its text already has what the worker raised
            raise EnvError(f"{self._name}.{phase} raised {describe(error)}") from error


class EnvHost:
    """Makes environments by name and keeps the idle ones for the next episode.

    `isolation`, where given (for all, or by name), overrides the environments' own; for "process"
    the factories make `ProcessEnv`s. `pictures`: whether environments that can draw their states
    (`render_html`) do.
    """

    def __init__(
        self,
        factories: Mapping[str, Callable[[], Env]],
        deadlines: EnvDeadlines,
        isolation: Isolation | Mapping[str, Isolation | None] | None = None,
        *,
        pictures: bool = False,
    ) -> None:
        self._factories = factories
        self._deadlines = deadlines
        self._pictures = pictures
        self._isolation = (
            isolation if isinstance(isolation, Mapping) else dict.fromkeys(factories, isolation)
        )
        self._idle: dict[str, list[LiveEnv]] = {name: [] for name in factories}

    def acquire(self, name: str) -> LiveEnv:
        """An idle instance of the environment `name`, or a new one.

        Raises:
            EnvError: its constructor raised.
            ConfigError: it needs its own process and is not a `ProcessEnv`, or this run has no such
            environment.
        """
        if name not in self._factories:
            raise ConfigError(
                f"a task is of the environment {name!r}, and this run has"
                f" {', '.join(self._factories)}: a task source gives tasks of the environment that"
                " it was made for"
            )
        if self._idle[name]:
            return self._idle[name].pop()
        try:
            env = self._factories[name]()
        except RAISED_BY_CODE as error:
            raise EnvError(f"making the environment {name!r} raised {describe(error)}") from error
        if isinstance(env, ProcessEnv):
            env.pictures = self._pictures
            env.records_calls = True
        else:
            env = recorded(pictured(env) if self._pictures else env)
        return LiveEnv(env, self._deadlines, isolation=self._isolation.get(name))

    async def release(self, name: str, env: LiveEnv) -> None:
        """Keep a working instance for the next episode; close a broken one."""
        if env.broken:
            await env.close()
        else:
            self._idle[name].append(env)

    async def close(self) -> None:
        """Close every idle instance, all at once: one that hangs costs its deadline and not its
        neighbours'.
        """
        idle = [env for envs in self._idle.values() for env in envs]
        self._idle = {name: [] for name in self._idle}
        async with Flow("environments.close") as flow:
            for number, env in enumerate(idle):
                flow.start(env.close(), name=str(number))
