"""Environments of verifiers, classic API: `env: {name: verifiers:ENV_ID, requires:
[verifiers==0.3.0, ./my_env]}`.

(`envs/verifiers_v1.py` is for 0.4; the installed version decides.)

Such an environment owns its loop and asks a client for the model's answers. Here the client passes
each prompt to `reset` or `step` and waits for the next message; rollout, tools, stop conditions and
rubric run unchanged. The rubric's reward comes with the last step.

The tasks are the rows of the environment's dataset; the seed draws one. Held-out seeds draw from
its `eval_dataset`. Without one they draw from every tenth row, and other seeds from the rest.
"""

import importlib.util
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, ClassVar

from pydantic import Field

from agentrl.envs import background
from agentrl.envs.base import TextEnv, read_options
from agentrl.envs.callback import Ask, Asked, CallbackEnv, line, opening, tenths
from agentrl.envs.verifiers_v1 import TasksetFactory
from agentrl.errors import ConfigError, EnvError, PluginError
from agentrl.protocols import Env, OwnerOnly, StepResult
from agentrl.rollout.seeds import SPLITS
from agentrl.settings.base import Settings
from agentrl.tokens.arrays import at_least
from agentrl.trajectory import unshared

_LIMITS = (
    "max_turns_reached",
    "max_total_completion_tokens_reached",
    "prompt_too_long",
    "timeout_reached",
)
"""Stop conditions that truncate an episode; any other terminates it."""


@dataclass(frozen=True, slots=True)
class Factory:
    """Makes the environment `env_id`. It needs its own process, because verifiers sets signal
    handlers.
    """

    env_id: str
    isolation: ClassVar[str] = "process"

    @property
    def preload(self) -> tuple[str, ...]:
        """Packages of five thousand modules, whose import takes seconds; none of them starts a
        thread.
        """
        return ("datasets", "verifiers.clients", "verifiers.types", _module(self.env_id))

    def __call__(self) -> Env:
        """Make the environment."""
        return Verifiers(self.env_id)


def scheme(rest: str) -> Callable[[], Env]:
    """verifiers:wordle: an environment or a taskset of verifiers, by the name of its package.

    Raises:
        PluginError: verifiers, or the environment's package, is not installed where this runs.
    """
    way_out = (
        "Give it an interpreter of its own: env.requires=[verifiers==0.3.0, PACKAGE OR FOLDER]"
    )
    try:
        installed = version("verifiers")
    except PackageNotFoundError as error:
        raise PluginError(
            f"'verifiers:{rest}': the package 'verifiers' is not installed. {way_out}"
        ) from error
    module = _module(rest)
    classic = tuple(map(int, installed.split(".")[:2])) < (0, 4)
    built_in = "" if classic else f"verifiers.v1.tasksets.{module}"
    if not any(name and importlib.util.find_spec(name) for name in (module, built_in)):
        raise PluginError(
            f"'verifiers:{rest}': verifiers {installed} finds no module {module!r}. {way_out}"
        )
    return Factory(rest) if classic else TasksetFactory(rest)


def _module(env_id: str) -> str:
    """The module that verifiers looks for."""
    return env_id.rpartition("/")[2].partition("@")[0].replace("-", "_")


class Verifiers(TextEnv):
    """A classic environment of verifiers."""

    class Options(Settings):
        """The options of `reset`."""

        args: Annotated[dict[str, Any], OwnerOnly()] = Field(default_factory=dict)
        """Arguments of `load_environment`."""
        success_at: float = 1.0
        """Lowest reward that counts as a success."""

    def __init__(self, env_id: str) -> None:
        self._env_id = env_id
        self._loaded: tuple[dict[str, Any], Any] | None = None
        self._rollout: CallbackEnv[Mapping[str, Any]] | None = None

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        """Draw a row and play until the environment asks the model.

        Raises:
            ConfigError: the environment cannot be loaded, or compares the rollouts of a group.
            EnvError: it ends without asking the model.
        """
        self._chosen = read_options(self.Options, options)
        self._cancel_rollout()
        env = self._load(self._chosen.args)
        self._rollout = CallbackEnv(partial(_play, env, self._draw_row(env, seed)))
        asked = self._rollout.next()
        if not isinstance(asked, Asked):
            raise EnvError(
                f"verifiers:{self._env_id} ended before the model was asked:"
                f" {asked.get('stop_condition')}"
            )
        self.system_prompt, observation = opening(asked.lines)
        self.tools = asked.tools
        return observation

    def step(self, action: str) -> StepResult:
        """Answer the prompt, and play until the next one or the end.

        Raises:
            EnvError: no episode is being played, the environment or a reward function failed, or it
                rewrote the conversation.
        """
        if self._rollout is None:
            raise EnvError("no episode is being played; call reset first")
        asked = self._rollout.answer(action)
        if isinstance(asked, Asked):
            return "\n".join(text for _, text in asked.lines), 0.0, False, False, {}
        self._rollout = None
        return self._final_result(asked)

    def close(self) -> None:
        """End the rollout and tear down the environment."""
        self._cancel_rollout()
        if self._loaded is not None:
            _, env = self._loaded
            self._loaded = None
            background.start(env._teardown()).result()

    def _cancel_rollout(self) -> None:
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
                    f"verifiers.load_environment({self._env_id!r}, **{args!r}): {error}. Correct"
                    " options['args'], or add what it needs to env.requires"
                ) from error
            if env.requires_group_rollouts:
                raise ConfigError(
                    f"verifiers:{self._env_id} has rewards that compare the rollouts of a group,"
                    " but each episode is scored alone. Use an environment that rewards single"
                    " rollouts, and a reward of agentrl for groups"
                )
            self._loaded = (args, env)
        return self._loaded[1]

    def _draw_row(self, env: Any, seed: int) -> Mapping[str, Any]:
        rows, held_out = env.build_dataset(), env.build_eval_dataset()
        test = seed % len(SPLITS) == SPLITS.index("held-out")
        if rows is None or (test and held_out is not None):
            rows = held_out
        numbers = tenths(len(rows), test) if held_out is None else range(len(rows))
        row: Mapping[str, Any] = rows[self.rng.choice(numbers)]
        return row

    def _final_result(self, output: Mapping[str, Any]) -> StepResult:
        reward, why = float(output["reward"]), str(output.get("stop_condition"))
        truncated = why in _LIMITS
        replies: list[str] = []
        # What the environment said after the model's last message.
        for message in reversed(output.get("completion") or []):
            if message["role"] == "assistant":
                break
            replies.insert(0, line(message)[1])
        info = {
            "success": at_least(reward, self._chosen.success_at),
            "stop": why,
            "metrics": dict(output.get("metrics") or {}),
        }
        return "\n".join(replies), reward, not truncated, truncated, info


async def _play(env: Any, row: Mapping[str, Any], ask: Ask) -> Mapping[str, Any]:
    """Run a rollout and score it.

    Raises:
        EnvError: the environment, or its rubric, failed.
    """
    errors: list[str] = []
    with _collect_errors("verifiers.rubrics", errors):
        output: Mapping[str, Any] = await env.run_rollout(
            unshared(row, "a row"), _client_class()(ask), "agentrl", {}
        )
    if error := output.get("error"):
        raise EnvError(f"the environment failed: {error}")
    if errors:  # verifiers itself would give a reward of 0
        raise EnvError(f"the rubric failed: {'; '.join(errors)}")
    return output


@contextmanager
def _collect_errors(name: str, errors: list[str]) -> Iterator[None]:
    """Collect the errors that the logger `name` and its children log in the block: verifiers logs
    the failure of a reward function and goes on.
    """
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
    """The client class, made on first use because its base class is verifiers'."""
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage, ToolCall

    class Asking(Client):  # type: ignore[misc]
        """Forwards each request to the `Ask` that it was given."""

        def setup_client(self, config: Any) -> Any:
            return config

        async def to_native_tool(self, tool: Any) -> Any:
            function = {
                "name": tool.name,
                "description": tool.description,
                "parameters": dict(tool.parameters),
            }
            return {"type": "function", "function": function}

        async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
            return messages, {}

        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
        ) -> Any:
            reply = await self.client([line(message) for message in prompt], tools or ())
            calls = [
                ToolCall(
                    id=f"call_{len(prompt)}_{number}",
                    name=call.name,
                    arguments=json.dumps(dict(call.arguments)),
                )
                for number, call in enumerate(reply.calls)
            ]
            message = ResponseMessage(
                content=reply.text,
                tool_calls=calls or None,
                finish_reason="tool_calls" if calls else "stop",
                is_truncated=False,
            )
            return Response(id=f"answer_{len(prompt)}", created=0, model=model, message=message)

        async def raise_from_native_response(self, response: Any) -> None:
            return None

        async def from_native_response(self, response: Any) -> Any:
            return response

        async def close(self) -> None:
            return None

    return Asking
