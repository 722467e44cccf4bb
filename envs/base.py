"""Base classes for environments. They save lines, but none is required (`agentrl.Env`).

class Safe(ToolEnv):
    system_prompt = "Open the safe. Its code is a number from 0 to 99."

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        self.code = self.rng.randrange(100)
        return "The safe is closed."

    def compare(self, number: int) -> str:
        \"\"\"Say whether the code is higher or lower than a number.\"\"\"
        return "higher" if self.code > number else "lower or equal"

    def open(self, code: int) -> ToolResult:
        \"\"\"Try a code. There is only one try.\"\"\"
        right = code == self.code
        observation = "open" if right else "locked"
        return ToolResult(observation, reward=float(right), terminated=True, success=right)
"""

import difflib
import inspect
import json
import pickle
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar, Concatenate, Literal, ParamSpec, TypeVar

from pydantic import ValidationError

from agentrl.conversation.tool_calls import parse_tool_calls
from agentrl.conversation.tools import (
    ToolError,
    ToolSpec,
    find_tool,
    how_to_call,
    how_to_call_shortly,
    is_refusal,
    merged,
    read_short_call,
    short_call,
    tools_of,
)
from agentrl.errors import ConfigError, EnvError
from agentrl.protocols import Env, Observation, ResetReply, StepReply, StepResult
from agentrl.settings.base import Settings
from agentrl.settings.faults import faults
from agentrl.tokens.encoded_image import EncodedImage
from agentrl.trajectory import MadeCall, ToolCall

__all__ = ["TextEnv", "ToolEnv", "ToolError", "ToolResult", "plays", "read_options"]

_Options = TypeVar("_Options", bound=Settings)
_Env = TypeVar("_Env", bound=Env)
_P = ParamSpec("_P")


def read_options(shape: type[_Options], options: Mapping[str, Any]) -> _Options:
    """Parse the options of `reset` into a typed value.

    Raises:
        ConfigError: an option is unknown or invalid; the message lists the options that exist.
    """
    try:
        return shape.model_validate(dict(options))
    except ValidationError as error:
        wrong = []
        for fault in faults(error, options):
            near = difflib.get_close_matches(fault.where, shape.model_fields, n=1)
            is_misspelt = near and fault.where not in shape.model_fields
            hint = f"; did you mean {near[0]!r}?" if is_misspelt else ""
            wrong.append(f"{fault.where!r}: {fault.what}{hint}")
        raise ConfigError(
            f"env.options, with what the task adds: {'; '.join(wrong)}. Options are:"
            f" {', '.join(shape.model_fields)}"
        ) from error


def plays(
    kind: type[_Env],
) -> Callable[
    [Callable[Concatenate[_Env, random.Random, _P], str]],
    Callable[Concatenate[Env, random.Random, _P], str],
]:
    """Decorates a scripted player that reads the internals of one environment class and plays only
    that class.

        @plays(HigherLower)
        def careful_player(env: HigherLower, rng: random.Random) -> str:
            return "lower" if env.cards[0] > 7 else "higher"

    The decorated player raises `TypeError` for an environment of another class.
    """

    def decorate(
        player: Callable[Concatenate[_Env, random.Random, _P], str],
    ) -> Callable[Concatenate[Env, random.Random, _P], str]:
        @wraps(player)
        def checked(env: Env, rng: random.Random, /, *args: _P.args, **kwargs: _P.kwargs) -> str:
            if not isinstance(env, kind):
                raise TypeError(f"this player plays {kind.__name__}, not {type(env).__name__}")
            return player(env, rng, *args, **kwargs)

        return checked

    return decorate


class TextEnv(ABC):
    """A text environment. A subclass implements `start` and `step`.

    `rng` is the episode's only source of randomness; each `reset` seeds it.

    If the attributes of the instance are the whole state of an episode, and can be pickled, write
    `restorable = True`: then rollouts can go back to its states. A `__getstate__` may leave out
    attributes that can be rebuilt, as for pickle.
    """

    system_prompt: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    isolation: Literal["inline", "thread", "process"] = "thread"
    restorable: bool = False
    """The attributes of the instance are the whole state of an episode, and can be pickled."""
    rng: random.Random

    @abstractmethod
    def start(
        self, seed: int, options: Mapping[str, Any]
    ) -> str | Observation | Awaitable[str | Observation]:
        """Begin an episode, forget the last one, and return the first observation: a text, or an
        `Observation` with pictures. May be async.
        """

    @abstractmethod
    def step(self, action: str) -> StepReply | Awaitable[StepReply]:
        """Take the model's message; return (observation, reward, terminated, truncated, info). May
        be async.
        """

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetReply | Awaitable[ResetReply]:
        """Seed `rng` and begin an episode with `start`."""
        self.rng = random.Random(seed)
        observation = self.start(seed, options)
        if isinstance(observation, str | Observation):
            return observation, {}
        return _await_observation(observation)

    def close(self) -> None | Awaitable[None]:
        """Release what the environment holds; by default nothing."""
        return None

    def snapshot(self) -> bytes | Awaitable[bytes]:
        """The attributes of the instance, pickled."""
        return pickle.dumps(self.__getstate__())

    def restore(self, state: bytes) -> None | Awaitable[None]:
        """Replace the attributes of the instance by those of the snapshot."""
        self.__dict__.clear()
        self.__dict__.update(pickle.loads(state))
        return None


async def _await_observation(observation: Awaitable[str | Observation]) -> ResetReply:
    return await observation, {}


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a tool call."""

    observation: str
    """The text for the model."""
    reward: float = 0.0
    """The reward of the call."""
    terminated: bool = False
    """The episode is over."""
    truncated: bool = False
    """A limit has ended the episode."""
    success: bool | None = None
    """True if the goal was reached; `None` leaves it open."""
    images: Sequence[EncodedImage] = ()
    """Pictures for a model that sees; those of all calls of a message stand before the texts."""

    @property
    def over(self) -> bool:
        """True if the episode ends here."""
        return self.terminated or self.truncated

    @property
    def step(self) -> StepResult:
        """This result as an environment's `step` returns it; `success` goes into the info."""
        info = {} if self.success is None else {"success": self.success}
        return self.observation, self.reward, self.terminated, self.truncated, info


class ToolEnv(TextEnv):
    """An environment whose tools are its typed public methods, sync or async (see the head of this
    module).

    A tool returns the observation (text, or a number, list or dict, which is written as JSON; or a
    picture, or an `Observation` with some), or a `ToolResult` that can also give a reward and end
    the episode. It raises `ToolError` to tell the
    model that something cannot be done; any other exception is a failure of the environment. A call
    that is malformed, names no tool or has wrong arguments costs a turn, and the model gets a text
    that says why. The calls of a message run in order until one ends the episode.

    If any tool is async, the whole environment runs on the event loop, and its sync tools must not
    block.
    """

    short_calls: bool = False
    """If true, a message is one call in words, such as `open 42`: far fewer tokens, for models too
    small for JSON.

    Only the first parameter can be given. Set by `call_shortly`.
    """

    calls_made: Sequence[MadeCall] | None = None
    """The calls of the last step, up to the one that ended the episode: a new list for each step.
    Rewards that watch calls see these. None where a subclass with a `step` of its own does not
    say."""

    _specs: tuple[ToolSpec, ...] = ()
    _is_async: ClassVar[bool] = False
    _base: ClassVar[type]  # its public methods are not tools

    def __init_subclass__(cls, no_tools: bool = False) -> None:
        """Collect the tools. `no_tools` marks a base class: its public methods are never tools,
        also in subclasses.
        """
        super().__init_subclass__()
        if no_tools:
            cls._base = cls
        cls._specs = tools_of(cls, base=cls._base)
        cls.tools = tuple(spec.schema for spec in cls._specs)
        cls._is_async = any(
            inspect.iscoroutinefunction(getattr(cls, name))
            for name in ("reply", *(spec.name for spec in cls._specs))
        )

    def call_shortly(self, short: bool) -> None:
        """Choose short calls or JSON, in `start`. The system prompt lists short calls; there are
        then no schemas.
        """
        self.short_calls = short
        self.tools = () if short else type(self).tools
        own = type(self).system_prompt
        self.system_prompt = f"{own}\n\n{how_to_call_shortly(self._specs)}" if short else own

    def written(self, call: ToolCall) -> str:
        """The message that makes this call; for scripted players."""
        return short_call(call) if self.short_calls else call.render()

    def reply(self, text: str) -> str | ToolResult | Awaitable[str | ToolResult]:
        """Answer a message without tool calls; override it if plain text has a meaning. May be
        async.
        """
        return how_to_call(self.tools)

    def step(self, action: str) -> StepReply | Awaitable[StepReply]:
        """Run the tool calls in the model's message and return their merged results."""
        playing = self._play(action)
        return playing if self._is_async else _run_synchronously(playing)

    async def _play(self, action: str) -> StepReply:
        made: list[MadeCall] = []
        self.calls_made = made
        if self.short_calls:
            only = await self._run_short(action, made)
            return _with_images(only.step, only.images)
        message = parse_tool_calls(action)
        results: list[tuple[str, ToolResult]] = []
        for call in message.calls:
            began = time.perf_counter()
            result = await self._run(call)
            made.append(MadeCall(call, is_refusal(result.observation), time.perf_counter() - began))
            results.append((call.name, result))
            if result.over:
                break  # later calls, and what could not be read, are dropped
        else:
            made += [MadeCall(None)] * len(message.errors)
            results += [("", ToolResult(f"Error: {error}")) for error in message.errors]
        if not results:
            results = [("", _to_result(await _resolve(self.reply(message.text)), "reply"))]
        images = [image for _, result in results for image in result.images]
        return _with_images(merged([(name, result.step) for name, result in results]), images)

    async def _run_short(self, text: str, made: list[MadeCall]) -> ToolResult:
        try:
            call = read_short_call(self._specs, text)
        except ToolError as error:
            # The call is recorded by its first word if that names a tool, so that rewards can tell
            # a wrong argument from a message that is no call.
            named = ToolCall(text.split(maxsplit=1)[0], {}) if text.split() else None
            known = named is not None and any(spec.name == named.name for spec in self._specs)
            made.append(MadeCall(named, True) if known else MadeCall(None))
            return ToolResult(f"Error: {error}")
        began = time.perf_counter()
        result = await self._run(call)
        made.append(MadeCall(call, is_refusal(result.observation), time.perf_counter() - began))
        return result

    async def _run(self, call: ToolCall) -> ToolResult:
        try:
            spec = find_tool(self._specs, call.name)
            arguments = spec.validate(call.arguments)
            return _to_result(await _resolve(getattr(self, spec.name)(**arguments)), spec.name)
        except ToolError as error:
            return ToolResult(f"Error: {error}")


ToolEnv._base = ToolEnv


def _with_images(step: StepResult, images: Sequence[EncodedImage]) -> StepReply:
    """The step with these pictures in its observation, if there are any."""
    text, reward, terminated, truncated, info = step
    seen = Observation(text, images) if images else text
    return seen, reward, terminated, truncated, info


async def _resolve(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _run_synchronously(playing: Coroutine[Any, Any, StepReply]) -> StepReply:
    """Run a coroutine that never waits, without an event loop."""
    # `send` runs it up to its first real wait. Without one it ends here, and its result comes as
    # the value of StopIteration.
    try:
        playing.send(None)
    except StopIteration as done:
        result: StepReply = done.value
        return result
    playing.close()
    raise EnvError("a tool declared with `def` waited for something; declare it with `async def`")


def _to_result(value: Any, tool: str) -> ToolResult:
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, str):
        return ToolResult(value)
    if isinstance(value, EncodedImage):
        return ToolResult("", images=(value,))
    if isinstance(value, Observation):
        return ToolResult(value.text, images=value.images)
    if isinstance(value, bool | int | float | list | dict):
        return ToolResult(json.dumps(value, ensure_ascii=False))
    raise EnvError(
        f"tool {tool!r} returned {type(value).__name__}; return a text, a number, a list or dict of"
        " these, an EncodedImage or an Observation, or a ToolResult(observation, reward=...,"
        " terminated=..., success=...)"
    )
