"""Environments of verifiers, classic API: `env: {name: verifiers:ENV_ID, requires: [verifiers==0.3.0, ./my_env]}`.

Such an environment owns its loop and asks a client for the model's answers. Here the client hands each prompt to
`reset` or `step` and waits for the next message; rollout, tools, stop conditions and rubric run untouched. The rubric's
reward comes with the last step.

The rows of its dataset are the tasks: the seed draws one. Held-out seeds draw from the environment's own
`eval_dataset`, or, where there is none, from every tenth row, which the others then leave out.
"""

import importlib.util
import json
import logging
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

from pydantic import Field

from agentrl.envs import background
from agentrl.envs.base import TextEnv, read_options
from agentrl.errors import ConfigError, EnvError, PluginError
from agentrl.protocols import Env, Settings, StepResult
from agentrl.rollout.seeds import SPLITS
from agentrl.rollout.tools import parse_tool_calls

_LIMITS = ("max_turns_reached", "max_total_completion_tokens_reached", "prompt_too_long", "timeout_reached")
"""Stop conditions that cut an episode; any other is an end of its own."""


@dataclass(frozen=True, slots=True)
class Factory:
    """Makes the environment `env_id`, in a process of its own: verifiers sets signal handlers."""

    env_id: str
    isolation: ClassVar[str] = "process"

    @property
    def preload(self) -> tuple[str, ...]:
        """Five thousand modules, which take seconds; none of them starts a thread."""
        return ("datasets", "verifiers.clients", "verifiers.types", _module(self.env_id))

    def __call__(self) -> Env:
        """The environment."""
        return Verifiers(self.env_id)


def scheme(rest: str) -> Callable[[], Env]:
    """verifiers:wordle: an environment of verifiers, by the package that has its `load_environment`.

    Raises:
        PluginError: verifiers, or the environment's package, is not installed where this runs.
    """
    way_out = "Give it an interpreter of its own: env.requires=[verifiers==0.3.0, PACKAGE OR FOLDER]"
    try:
        installed = version("verifiers")
    except PackageNotFoundError as error:
        raise PluginError(f"'verifiers:{rest}': the package 'verifiers' is not installed. {way_out}") from error
    if tuple(map(int, installed.split(".")[:2])) >= (0, 4):
        raise PluginError(f"'verifiers:{rest}': verifiers {installed} has no classic environments. {way_out}")
    module = _module(rest)
    if not module or importlib.util.find_spec(module) is None:
        raise PluginError(f"'verifiers:{rest}': there is no module {module!r} with a load_environment. {way_out}")
    return Factory(rest)


def _module(env_id: str) -> str:
    """As verifiers finds it."""
    return env_id.replace("-", "_").split("/")[-1]


class Verifiers(TextEnv):
    """A classic environment of verifiers."""

    class Options(Settings):
        """What `reset(options=...)` takes."""

        args: dict[str, Any] = Field(default_factory=dict)
        """Arguments of `load_environment`."""
        success_at: float = 1.0
        """The least reward that is a success."""

    def __init__(self, env_id: str) -> None:
        self._env_id = env_id
        self._loaded: tuple[dict[str, Any], Any] | None = None
        self._rollout: _Rollout | None = None

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        """Draw a row and play until the model is asked.

        Raises:
            ConfigError: the environment cannot be loaded, or compares the rollouts of a group.
            EnvError: it ends without asking the model.
        """
        self._chosen = read_options(self.Options, options)
        self._forget()
        env = self._load(self._chosen.args)
        self._rollout = _Rollout(env, self._row(env, seed))
        asked = self._rollout.next()
        if not isinstance(asked, _Asked):
            raise EnvError(f"verifiers:{self._env_id} ended before the model was asked: {asked.get('stop_condition')}")
        system = [message for message in asked.messages if message.role == "system"]
        rest = [message for message in asked.messages if message.role != "system"]
        self.system_prompt = "\n".join(map(_text, system))
        self.tools = asked.tools
        if len(rest) == 1:
            return _text(rest[0])
        return "\n\n".join(f"{message.role}: {_text(message)}" for message in rest)

    def step(self, action: str) -> StepResult:
        """Answer the prompt, and play until the next one or the end.

        Raises:
            EnvError: no episode is being played, the environment or a reward function failed, or it rewrote the
                conversation.
        """
        if self._rollout is None:
            raise EnvError("no episode is being played; call reset first")
        asked = self._rollout.answer(action)
        if isinstance(asked, _Asked):
            return "\n".join(map(_text, asked.messages)), 0.0, False, False, {}
        self._rollout = None
        return self._over(asked)

    def close(self) -> None:
        """End the rollout and let the environment tear down what it holds."""
        self._forget()
        if self._loaded is not None:
            _, env = self._loaded
            self._loaded = None
            background.start(env._teardown()).result()

    def _forget(self) -> None:
        if self._rollout is not None:
            self._rollout.cancel()
            self._rollout = None

    def _load(self, args: dict[str, Any]) -> Any:
        if self._loaded is None or self._loaded[0] != args:
            self.close()
            import datasets
            import verifiers

            datasets.disable_progress_bars()
            try:
                env = verifiers.load_environment(self._env_id, **args)
            except Exception as error:
                raise ConfigError(
                    f"verifiers.load_environment({self._env_id!r}, **{args!r}): {error}. Correct options['args'], or "
                    "add what it needs to env.requires"
                ) from error
            if env.requires_group_rollouts:
                raise ConfigError(
                    f"verifiers:{self._env_id} has rewards that compare the rollouts of a group; an episode is scored "
                    "alone here. Use an environment with rewards of single rollouts, and a reward of agentrl for groups"
                )
            self._loaded = (args, env)
        return self._loaded[1]

    def _row(self, env: Any, seed: int) -> Mapping[str, Any]:
        rows, held_out = env.build_dataset(), env.build_eval_dataset()
        test = seed % len(SPLITS) == SPLITS.index("held-out")
        if rows is None or (test and held_out is not None):
            rows = held_out
        numbers = _tenths(len(rows), test) if held_out is None else range(len(rows))
        row: Mapping[str, Any] = rows[self.rng.choice(numbers)]
        return row

    def _over(self, output: Mapping[str, Any]) -> StepResult:
        reward, why = float(output["reward"]), str(output.get("stop_condition"))
        truncated = why in _LIMITS
        said: list[str] = []
        for message in reversed(output.get("completion") or []):
            if message["role"] == "assistant":
                break
            said.insert(0, _text(message))
        info = {"success": reward >= self._chosen.success_at, "stop": why, "metrics": dict(output.get("metrics") or {})}
        return "\n".join(said), reward, not truncated, truncated, info


def _tenths(count: int, test: bool) -> Sequence[int]:
    """Every tenth row for the test, the others for training; with fewer than ten the last is for the test."""
    if count < 2:
        return range(count)
    held_out = range(count - 1, -1, -10)
    return held_out if test else [number for number in range(count) if number not in held_out]


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is new in the prompt, the tools, and where the answer goes."""

    messages: Sequence[Any]
    tools: tuple[Mapping[str, Any], ...]
    answer: "Future[str]"


class _Rollout:
    """One rollout in the background, which stands still while the model is asked."""

    def __init__(self, env: Any, row: Mapping[str, Any]) -> None:
        self._heard: queue.SimpleQueue[_Asked | Future[Any]] = queue.SimpleQueue()
        self._asked: _Asked | None = None
        self._errors: list[str] = []
        client = _client_class()(self._heard)
        self._done = background.start(self._play(env, row, client))
        self._done.add_done_callback(self._heard.put)

    def next(self) -> "_Asked | Mapping[str, Any]":
        """The next prompt, or the output of the whole rollout."""
        heard = self._heard.get()
        if isinstance(heard, _Asked):
            self._asked = heard
            return heard
        output: Mapping[str, Any] = heard.result()
        if error := output.get("error"):
            raise EnvError(f"the environment failed: {error}")
        if self._errors:
            # Which verifiers itself makes a reward of 0.
            raise EnvError(f"the rubric failed: {'; '.join(self._errors)}")
        return output

    def answer(self, text: str) -> "_Asked | Mapping[str, Any]":
        """Answer the last prompt, and wait for the next."""
        assert self._asked is not None
        self._asked.answer.set_result(text)
        return self.next()

    def cancel(self) -> None:
        """End it where it stands."""
        self._done.cancel()
        with suppress(Exception):
            while not isinstance(self._heard.get(timeout=5.0), Future):
                pass

    async def _play(self, env: Any, row: Mapping[str, Any], client: Any) -> Mapping[str, Any]:
        with _errors_logged("verifiers.rubrics", self._errors):
            output: Mapping[str, Any] = await env.run_rollout(dict(row), client, "agentrl", {})
        return output


@contextmanager
def _errors_logged(name: str, errors: list[str]) -> Iterator[None]:
    """Collect what loggers of that name say is an error."""
    handler = _Collector(errors)
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Collector(logging.Handler):
    def __init__(self, errors: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._errors = errors

    def emit(self, record: logging.LogRecord) -> None:
        self._errors.append(record.getMessage())


@cache
def _client_class() -> type[Any]:
    """The client, whose base class is only there where verifiers is."""
    import asyncio

    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage, ToolCall

    class Asking(Client):  # type: ignore[misc]
        """Hands the prompts over and waits for the answers."""

        def __init__(self, heard: "queue.SimpleQueue[Any]") -> None:
            super().__init__(heard)
            self._seen: list[tuple[str, str]] = []

        def setup_client(self, config: Any) -> Any:
            return config

        async def to_native_tool(self, tool: Any) -> Any:
            function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
            return {"type": "function", "function": function}

        async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
            return messages, {}

        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
        ) -> Any:
            shown = [(message.role, _text(message)) for message in prompt]
            if shown[: len(self._seen)] != self._seen:
                raise EnvError(
                    "the environment shows the model another conversation than the one it was in: it rewrites its "
                    "history, or asks models of its own. Neither is played here"
                )
            asked = _Asked(prompt[len(self._seen) :], tuple(tools or ()), Future())
            self.client.put(asked)
            text = await asyncio.wrap_future(asked.answer)
            text = text.encode(errors="replace").decode()  # a model may write half of a surrogate pair
            reply = parse_tool_calls(text) if tools else None
            said = reply.text if reply and reply.calls else text
            self._seen = [*shown, ("assistant", said)]
            calls = [
                ToolCall(id=f"call_{len(shown)}_{number}", name=call.name, arguments=json.dumps(dict(call.arguments)))
                for number, call in enumerate(reply.calls if reply else ())
            ]
            message = ResponseMessage(
                content=said,
                tool_calls=calls or None,
                finish_reason="tool_calls" if calls else "stop",
                is_truncated=False,
            )
            return Response(id=f"answer_{len(shown)}", created=0, model=model, message=message)

        async def raise_from_native_response(self, response: Any) -> None:
            return None

        async def from_native_response(self, response: Any) -> Any:
            return response

        async def close(self) -> None:
            return None

    return Asking


def _text(message: Any) -> str:
    """A message as text.

    Raises:
        EnvError: it has other parts than text.
    """
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    texts = [part.get("text") for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise EnvError("the environment shows the model something other than text, which is not played here")
    return "".join(texts)
