"""Tasksets of verifiers 0.4: `env: {name: verifiers:TASKSET, requires: [verifiers==0.4.0, uv,
./my_tasks]}`.

In 0.4 a program, the harness, owns the loop and sends its model calls to an endpoint. Here the
endpoint passes each call to `reset` or `step` and waits for the next message; taskset, harness,
tool servers and rewards run unchanged. The default harness is `null`, a chat loop with the task's
tools. It runs on this machine, and uv installs its packages when it first runs. A harness that
gives the model a shell (`bash`) gives it a shell on this machine.
"""

import itertools
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from agentrl.conversation.tool_calls import ParsedReply
from agentrl.envs.base import TextEnv, read_options
from agentrl.envs.callback import Ask, Asked, CallbackEnv, line, opening, tenths
from agentrl.errors import ConfigError, EnvError
from agentrl.protocols import Env, OwnerOnly, StepResult
from agentrl.rollout.seeds import SPLITS
from agentrl.settings.base import Settings
from agentrl.tokens.arrays import at_least

if TYPE_CHECKING:
    from aiohttp.web import Response

_KEY = "AGENTRL_ENDPOINT_KEY"


@dataclass(frozen=True, slots=True)
class TasksetFactory:
    """Makes the environment of a taskset, in its own process."""

    taskset: str
    isolation: ClassVar[str] = "process"

    @property
    def preload(self) -> tuple[str, ...]:
        """Packages of thousands of modules, whose import takes seconds; none of them starts a
        thread.
        """
        return (
            "verifiers.v1",
            "verifiers.v1.utils.loaders",
            "verifiers.v1.harnesses.null",
            "aiohttp.web",
        )

    def __call__(self) -> Env:
        """Make the environment."""
        return VerifiersTaskset(self.taskset)


class VerifiersTaskset(TextEnv):
    """A taskset of verifiers 0.4, played by one agent."""

    class Options(Settings):
        """The options of `reset`."""

        args: Annotated[dict[str, Any], OwnerOnly()] = Field(default_factory=dict)
        """Settings of the taskset (`env.taskset` of verifiers)."""
        harness: Annotated[str, OwnerOnly()] = "null"
        """The program that owns the loop."""
        agent: Annotated[dict[str, Any], OwnerOnly()] = Field(default_factory=dict)
        """Other settings of the agent, such as `max_turns`."""
        size: int = Field(1000, gt=0)
        """The number of tasks to use of an endless taskset."""
        success_at: float = 1.0
        """Lowest reward that counts as a success."""

    def __init__(self, taskset: str) -> None:
        self._taskset = taskset
        self._loaded: tuple[Any, Any, list[Any]] | None = None
        self._episode: CallbackEnv[Any] | None = None

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        """Draw a task and play until the harness asks the model.

        Raises:
            ConfigError: the taskset cannot be loaded, or several agents play it.
            EnvError: it ends without asking the model.
        """
        self._chosen = read_options(self.Options, options)
        self.close()
        env, tasks = self._load(self._chosen)
        test = seed % len(SPLITS) == SPLITS.index("held-out")
        task = tasks[self.rng.choice(tenths(len(tasks), test))]
        self._episode = CallbackEnv(partial(_play, env, task))
        asked = self._episode.next()
        if not isinstance(asked, Asked):
            raise EnvError(
                f"verifiers:{self._taskset} ended before the model was asked:"
                f" {asked.stop_condition}"
            )
        self.system_prompt, observation = opening(asked.lines)
        self.tools = asked.tools
        return observation

    def step(self, action: str) -> StepResult:
        """Answer the prompt, and play until the next one or the end.

        Raises:
            EnvError: no episode is being played, the episode failed, or its harness rewrote the
            conversation.
        """
        if self._episode is None:
            raise EnvError("no episode is being played; call reset first")
        asked = self._episode.answer(action)
        if isinstance(asked, Asked):
            return "\n".join(text for _, text in asked.lines), 0.0, False, False, {}
        self._episode = None
        reward, truncated = float(asked.reward), bool(asked.is_truncated)
        info = {
            "success": at_least(reward, self._chosen.success_at),
            "stop": str(asked.stop_condition),
            "metrics": {name: value for name, value in asked.metrics.items() if value is not None},
        }
        return "", reward, not truncated, truncated, info

    def close(self) -> None:
        """End the episode, its harness and its servers."""
        if self._episode is not None:
            self._episode.cancel()
            self._episode = None

    def _load(self, chosen: Options) -> tuple[Any, list[Any]]:
        key = (chosen.args, chosen.harness, chosen.agent, chosen.size)
        if self._loaded is None or self._loaded[0] != key:
            from verifiers.v1.utils.loaders import load_environment, resolve_env_config

            agent = {
                "runtime": {"type": "subprocess"},
                "harness": {"id": chosen.harness},
                **chosen.agent,
            }
            config = {"taskset": {"id": self._taskset, **chosen.args}, "agent": agent}
            try:
                env = load_environment(resolve_env_config(config))
                tasks = list(
                    itertools.islice(env.taskset, chosen.size if not env.taskset.bounded else None)
                )
            except Exception as error:
                raise ConfigError(
                    f"verifiers cannot load {config!r}: {error}. Correct options, or add what it"
                    " needs to env.requires; only environments with the one role `agent` are"
                    " played"
                ) from error
            self._loaded = (key, env, tasks)
        return self._loaded[1], self._loaded[2]


async def _play(env: Any, task: Any, ask: Ask) -> Any:
    """Play an episode; returns its trace with the rewards.

    Raises:
        EnvError: the environment, a tool server, the harness or a reward failed.
    """
    from verifiers.v1 import EvalClientConfig, ModelContext

    async with _endpoint(ask) as (url, failures):
        client = EvalClientConfig(base_url=url, api_key_var=_KEY)
        async with env.serving():
            episode = await env.run_episode(task, ModelContext(model="agentrl", client=client))
    if failures:
        raise failures[0]
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors or not episode.ok or len(episode.traces) != 1:
        reasons = "; ".join(f"{error.type}: {error.message}" for error in errors)
        raise EnvError(f"the episode failed: {reasons or 'it did not give one valid trace'}")
    (trace,) = episode.traces
    if unscored := [name for name, reward in trace.rewards.items() if reward is None]:
        raise EnvError(f"the rewards {', '.join(unscored)} were not computed")
    return trace


@asynccontextmanager
async def _endpoint(ask: Ask) -> AsyncIterator[tuple[str, list[Exception]]]:
    """Serve OpenAI's chat completions on this machine, with answers from `ask`; yields the URL and
    the failures.
    """
    from aiohttp import web

    failures: list[Exception] = []

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        try:
            reply = await ask(
                [line(message) for message in body["messages"]], body.get("tools") or ()
            )
        except EnvError as error:
            # The harness may swallow the refusal, so `_play` raises the cause afterwards.
            failures.append(error)
            return web.json_response(
                {"error": {"message": str(error), "type": "invalid_request_error"}}, status=400
            )
        return _completion(reply, len(body["messages"]), streamed=bool(body.get("stream")))

    os.environ.setdefault(_KEY, "no other server is asked")
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", failures
    finally:
        await runner.cleanup()


def _completion(reply: ParsedReply, number: int, *, streamed: bool) -> "Response":
    """An answer of the endpoint, as one JSON object or as a stream."""
    from aiohttp import web

    calls = [
        {
            "index": at,
            "id": f"call_{number}_{at}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for at, call in enumerate(reply.calls)
    ]
    message = {
        "role": "assistant",
        "content": reply.text,
        **({"tool_calls": calls} if calls else {}),
    }
    choice = {
        "index": 0,
        "delta" if streamed else "message": message,
        "finish_reason": "tool_calls" if calls else "stop",
    }
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    kind = "chat.completion.chunk" if streamed else "chat.completion"
    answer = {
        "id": f"answer_{number}",
        "object": kind,
        "created": 0,
        "model": "agentrl",
        "choices": [choice],
    }
    if not streamed:
        return web.json_response({**answer, "usage": usage})
    events = [answer, {**answer, "choices": [], "usage": usage}]
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    return web.Response(text=text, content_type="text/event-stream")
