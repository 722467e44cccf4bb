"""Wrappers: environments around other environments. `env.wrappers` lists them, each around those
before it.

    env:
      name: my_game
      wrappers:
        - {name: action_format, pattern: "<action>(.*?)</action>"}
        - {name: time_limit, turns: 20}

A wrapped environment has its own address, so it works over every transport (`scheme`, below). A
package registers a wrapper in the entry-point group `agentrl.env_wrappers`: a class with a nested
`Config`, called with its settings and the environment.
"""

import inspect
import json
import pickle
import re
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from pydantic import Field, ValidationError, field_validator

from agentrl import plugins
from agentrl.errors import ConfigError, PluginError
from agentrl.hosting.observations import as_result
from agentrl.plugins import Component
from agentrl.protocols.env import (
    Env,
    ResetResult,
    StepResult,
    call_restore,
    call_snapshot,
    can_restore,
    isolation_of,
    preload_of,
    system_prompt_of,
    unwrapped_env,
)
from agentrl.settings.base import Settings
from agentrl.settings.faults import faults

_Result = TypeVar("_Result", ResetResult, StepResult)


class Wrapper:
    """An `Env` around another one: override what you change. All else is delegated to the inner
    environment, which may be sync or async. `began` and `stepped` get its results.

    Its state, for `snapshot`, is all of its attributes. If these are picklable, say so by
    `picklable = True`; otherwise no environment can go back to a state within it.
    """

    picklable: ClassVar[bool] = False

    def __init__(self, env: Env) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        if name == "env" or name.startswith("__"):  # copying looks these up before `env` is set
            raise AttributeError(name)
        return getattr(self.env, name)

    @property
    def isolation(self) -> str:
        """The inner environment's; "inline" if its `step` is a coroutine function, which this
        `step` is not.
        """
        declared: str = isolation_of(self.env)
        return "inline" if inspect.iscoroutinefunction(self.env.step) else declared

    @property
    def restorable(self) -> bool:
        """True if this wrapper and the inner environment can tell their states and go back to
        them.
        """
        return self.picklable and can_restore(self.env)

    @property
    def unwrapped(self) -> Env:
        """The innermost environment, which scripted players look at."""
        inner: Env = unwrapped_env(self.env)
        return inner

    def reset(
        self, *, seed: int, options: Mapping[str, Any]
    ) -> ResetResult | Awaitable[ResetResult]:
        """Reset the inner environment. Pictures that it shows are in the info then."""
        return _apply(self.env.reset(seed=seed, options=options), self.began)

    def step(self, action: str) -> StepResult | Awaitable[StepResult]:
        """Step the inner environment."""
        return _apply(self.env.step(action), self.stepped)

    def close(self) -> None | Awaitable[None]:
        """Close the inner environment."""
        return self.env.close()

    def snapshot(self) -> bytes | Awaitable[bytes]:
        """The state of this wrapper and of the inner environment."""
        state = call_snapshot(self.env)
        return self._pack_later(state) if inspect.isawaitable(state) else self._pack(state)

    def restore(self, state: bytes) -> None | Awaitable[None]:
        """Go back to a state of both."""
        own, of_inner = pickle.loads(state)
        self.__dict__.update(own)
        restoring: None | Awaitable[None] = call_restore(self.env, of_inner)
        return restoring

    def _pack(self, inner: bytes) -> bytes:
        own = {name: value for name, value in self.__dict__.items() if name != "env"}
        return pickle.dumps((own, inner))

    async def _pack_later(self, inner: Awaitable[bytes]) -> bytes:
        return self._pack(await inner)

    def began(self, result: ResetResult) -> ResetResult:
        """The result of the reset, in place of the inner environment's `result`."""
        return result

    def stepped(self, result: StepResult) -> StepResult:
        """The result of the step, in place of the inner environment's `result`."""
        return result


class TimeLimit(Wrapper):
    """Truncates an episode after `turns` steps."""

    picklable = True

    class Config(Settings):
        """Settings of `time_limit`."""

        turns: int = Field(gt=0)
        """Steps, of all agents together."""

    def __init__(self, config: Config, env: Env) -> None:
        super().__init__(env)
        self._turns = config.turns
        self._left = 0

    def began(self, result: ResetResult) -> ResetResult:
        """Start the count again."""
        self._left = self._turns
        return result

    def stepped(self, result: StepResult) -> StepResult:
        """Truncate after the last step allowed, unless the episode has ended by itself."""
        observation, reward, terminated, truncated, info = result
        self._left -= 1
        return (
            observation,
            reward,
            terminated,
            truncated or (self._left <= 0 and not terminated),
            info,
        )


class ActionFormat(Wrapper):
    """Extracts the action from a longer message. A message without one is answered by a hint and
    costs a turn.
    """

    picklable = True

    class Config(Settings):
        """Settings of `action_format`."""

        pattern: str
        """A regular expression. Its last match in the message is the action, or that match's first
        group, if any.
        """
        hint: str = ""
        """Part of the system prompt, and the answer to a message without a match; by default it
        shows the pattern.
        """
        penalty: float = Field(0.0, ge=0)
        """The reward that a message without a match costs."""

        @field_validator("pattern")
        @classmethod
        def _check_pattern(cls, pattern: str) -> str:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"is not a regular expression: {error}") from error
            return pattern

    def __init__(self, config: Config, env: Env) -> None:
        super().__init__(env)
        self._pattern = re.compile(config.pattern, re.DOTALL)
        self._hint = config.hint or f"Write your action so that it matches {config.pattern}"
        self._penalty = config.penalty
        self._whose_turn: dict[str, Any] = {}

    @property
    def system_prompt(self) -> str:
        """The inner environment's, with the hint."""
        return self._add_hint(str(system_prompt_of(self.env) or ""))

    def began(self, result: ResetResult) -> ResetResult:
        """Add the hint to each agent's system prompt."""
        observation, info = result
        self._note_turn(info)
        prompts = info.get("system_prompts")
        if not prompts:
            return result
        return observation, {
            **info,
            "system_prompts": {agent: self._add_hint(prompts[agent]) for agent in prompts},
        }

    def step(self, action: str) -> StepResult | Awaitable[StepResult]:
        """Step with the extracted action, or answer with the hint."""
        found = list(self._pattern.finditer(action))
        if not found:
            return self._hint, -self._penalty, False, False, dict(self._whose_turn)
        return super().step(found[-1][1 if self._pattern.groups else 0] or "")

    def stepped(self, result: StepResult) -> StepResult:
        """Remember whose turn it is, for the info of a hint."""
        self._note_turn(result[4])
        return result

    def _note_turn(self, info: Mapping[str, Any]) -> None:
        self._whose_turn = {"agent": info["agent"]} if "agent" in info else {}

    def _add_hint(self, prompt: str) -> str:
        return f"{prompt}\n\n{self._hint}" if prompt else self._hint


class Instructions(Wrapper):
    """Says something else in the system message than the environment does, or more.

    In an environment of several agents, each is told the same.
    """

    picklable = True

    class Config(Settings):
        """Settings of `instructions`."""

        system_prompt: str | None = None
        """The system message, instead of the environment's own."""
        rules: str = ""
        """Text added at the end of the system message."""

    def __init__(self, config: Config, env: Env) -> None:
        super().__init__(env)
        self._config = config

    @property
    def system_prompt(self) -> str:
        """The system message, which takes the place of the inner environment's."""
        return self._compose(str(system_prompt_of(self.env) or ""))

    def began(self, result: ResetResult) -> ResetResult:
        """Change each agent's system prompt too."""
        observation, info = result
        prompts = info.get("system_prompts")
        if not prompts:
            return result
        return observation, {
            **info,
            "system_prompts": {agent: self._compose(prompts[agent]) for agent in prompts},
        }

    def _compose(self, inner: str) -> str:
        prompt = inner if self._config.system_prompt is None else self._config.system_prompt
        return "\n\n".join(filter(None, (prompt, self._config.rules)))


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A factory of the environment `name` in its wrappers, which are JSON text: it pickles as two
    strings.
    """

    name: str
    wrappers: str

    def __call__(self) -> Env:
        """Make the environment."""
        env: Env = plugins.load("envs", self.name)()
        for raw in json.loads(self.wrappers):
            env = wrapper(raw).make(env)
        return env

    @property
    def isolation(self) -> str:
        """The inner environment's isolation."""
        declared: str = isolation_of(plugins.load("envs", self.name))
        return declared

    @property
    def preload(self) -> Sequence[str]:
        """The modules that the inner environment's worker processes should have imported."""
        declared: Sequence[str] = preload_of(plugins.load("envs", self.name))
        return declared


def wrapper(raw: Any) -> Component:
    """Read a wrapper from a config, which gives its name, or a mapping of name and settings.

    Raises:
        ConfigError: there is no such wrapper, or a setting is unknown or does not fit.
    """
    if isinstance(raw, Component):
        return raw
    settings = (
        {"name": raw} if isinstance(raw, str) else dict(raw) if isinstance(raw, Mapping) else {}
    )
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"write a wrapper as {{name: time_limit, turns: 20}}, got {raw!r:.80}")
    try:
        factory = plugins.load("env_wrappers", name)
        plugins.check_callable("env_wrappers", name, factory)
        shape = plugins.settings_of(factory)
    except PluginError as error:
        raise ConfigError(str(error)) from error
    try:
        return Component(name, factory, shape.model_validate(settings))
    except ValidationError as error:
        wrong = "; ".join(map(str, faults(error, settings)))
        known = ", ".join(shape.model_fields) or "none"
        raise ConfigError(
            f"the wrapper {name!r} has wrong settings: {wrong}. Its settings are: {known}"
        ) from error


def address(name: str, wrappers: Sequence[Component]) -> str:
    """The address of the environment `name` in these wrappers; `name` itself if there are none."""
    if not wrappers:
        return name
    return f"wrapped:{json.dumps({'env': name, 'wrappers': [each.dump() for each in wrappers]})}"


def inner_name(address: str) -> str:
    """The name of the environment at an address, without its wrappers."""
    kind, _, rest = address.partition(":")
    if kind != "wrapped":
        return address
    try:
        return inner_name(json.loads(rest)["env"])
    except (ValueError, LookupError, TypeError):
        return address  # `scheme` says what is wrong with it


def scheme(rest: str) -> Callable[[], Env]:
    """wrapped:{"env": "guess_number", "wrappers": [{"name": "time_limit", "turns": 3}]}: an
    environment in wrappers.

    Raises:
        ConfigError: `rest` is not the JSON of an environment and its wrappers.
        PluginError: there is no such environment.
    """
    try:
        match json.loads(rest):
            case {"env": str(name), "wrappers": [*wrappers]}:
                pass
            case _:
                raise ValueError('it must have the keys "env" and "wrappers"')
    except ValueError as error:
        raise ConfigError(
            f"'wrapped:{rest:.200}': {error}. Write 'wrapped:' and "
            '{"env": "guess_number", "wrappers": [{"name": "time_limit", "turns": 3}]}'
        ) from error
    found = plugins.load("envs", name)
    if isinstance(found, plugins.FileEnv):  # the environment may be made in another folder
        name = f"file:{found.path}:{found.attribute}"
    for raw in wrappers:
        wrapper(raw)
    return Wrapped(name, json.dumps(wrappers))


def _apply(reply: Any, change: Callable[[_Result], _Result]) -> _Result | Awaitable[_Result]:
    """Apply `change` to the reply of a method, which is awaited first if it is an awaitable."""
    if isinstance(reply, tuple):
        return change(as_result(reply))
    return _Changed(reply, change)


async def _apply_later(reply: Awaitable[Any], change: Callable[[_Result], _Result]) -> _Result:
    return change(as_result(await reply))


class _Changed(Coroutine[Any, Any, _Result]):
    """The coroutine of an async method, with a change of its result.

    It closes the method's coroutine with it. An async function would leave that open when it is
    closed before it has begun, as it is where the caller has been cancelled.
    """

    def __init__(self, result: Awaitable[Any], change: Callable[[_Result], _Result]) -> None:
        self._result: Awaitable[_Result] = result
        self._outer: Coroutine[Any, Any, _Result] = _apply_later(result, change)

    def __await__(self) -> Generator[Any, Any, _Result]:
        return self._outer.__await__()

    def send(self, value: Any, /) -> Any:
        return self._outer.send(value)

    def throw(self, *error: Any) -> Any:
        return self._outer.throw(*error)

    def close(self) -> None:
        self._outer.close()
        if isinstance(self._result, Coroutine):
            self._result.close()
