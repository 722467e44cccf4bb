"""Environments: text in and text out, one episode at a time."""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, Protocol, runtime_checkable

from agentrl.settings.base import Settings


@dataclass(frozen=True, slots=True)
class OwnerOnly:
    """Marks an option of an environment that can decide what code runs: `Annotated[str,
    OwnerOnly()]`.

    Clients of a served environment may not set it (`agentrl/hosting/client_options.py`).
    """


Isolation = Literal["inline", "thread", "process"]
"""The place where an environment or a reward runs: on the event loop, in a thread, in a process."""


ResetResult = tuple[str, dict[str, Any]]
"""(observation, info)"""


StepResult = tuple[str, float, bool, bool, dict[str, Any]]
"""(observation, reward, terminated, truncated, info)"""


@runtime_checkable
class Env(Protocol):
    """A Gymnasium environment with text in and out. Methods may be sync or async.

    One instance plays one episode at a time; `reset` may be called again for the next. All
    randomness comes from `seed`. Environments never handle tokens. Five attributes are optional:

    - `system_prompt: str`: the system message of every episode;
    - `tools: Sequence[Mapping]`: JSON schemas of callable functions, passed to the chat template;
    - `isolation: "inline" | "thread" | "process"`: where it runs. An inline environment must answer
      in microseconds. By default a sync environment runs in its own thread and may block;
    - `calls_made: Sequence[MadeCall] | None`: the calls that the last step made, a new list for
      each step. Rewards that watch calls see these; else they read the messages as JSON;
    - `render_html() -> str`: draws the present state as HTML, after each reset and step. `agentrl
      view` shows it beside the messages, without scripts or requests: styles, SVG and `data:`
      images work.

    The optional `info["success"]` says whether the episode reached its goal. At the end of a game
    of one message, `info["answer"]` may give the message that would have reached it (`check_env`
    tries it). Without it, or if it is None, the verdict is left to the run's reward
    (`agentrl.trajectory.succeeded`): an episode with a score above 0 succeeded, unless a part of
    the reward says otherwise (`success_at`).

    A reset's `info["history"]` may give messages that stand before the observation, such as
    examples and earlier turns of a chat: a list of `{"role": ..., "content": ...}`
    (`agentrl.conversation.chats`). The model sees them and is not trained on them.

    In a multi-agent environment the agents take turns. Its infos name them, so that every transport
    carries the names:

    - of a reset: `info["agents"]`, the names of all agents; `info["agent"]`, the agent that acts
      first and sees the observation; `info["system_prompts"]` by name, if they differ;
    - of a step: `info["agent"]`, the agent that acts next and sees the observation, which tells
      what is new since that agent's last action. The step's reward belongs to the agent that acted;
      if others earned something too, `info["rewards"]` gives each agent's reward by name.
      `info["success"]` may be by name.
    """

    def reset(
        self, *, seed: int, options: Mapping[str, Any]
    ) -> ResetResult | Awaitable[ResetResult]:
        """Start an episode; the same seed and options give the same episode."""
        ...

    def step(self, action: str) -> StepResult | Awaitable[StepResult]:
        """Act on the model's whole message. The answer to a malformed one is an observation, not an
        exception.

        It is called by position, so the parameter may have any name.
        """
        ...

    def close(self) -> None | Awaitable[None]:
        """Release the environment's resources. May be called at any time and more than once."""
        ...


ScriptedPlayer = Callable[[Env, Random], str | Awaitable[str]]
"""Looks at a live environment and returns an action, for example to play demonstrations.

It gets `env.unwrapped` if that exists: the environment without its wrappers.
"""


def isolation_of(plugin: object, default: Isolation | None = "thread") -> Any:
    """The place where an environment, a reward or its class asks to run (`isolation`)."""
    return getattr(plugin, "isolation", default)


def tools_of(env: object) -> Any:
    """The schemas of an environment's tools, as it states them (`tools`)."""
    return getattr(env, "tools", ())


def system_prompt_of(env: object) -> Any:
    """The system message of an environment, as it states it (`system_prompt`)."""
    return getattr(env, "system_prompt", "")


def reward_range_of(env: object) -> Any:
    """The lowest and the highest return of an episode, as an environment states them
    (`reward_range`).
    """
    return getattr(env, "reward_range", (-math.inf, math.inf))


def preload_of(factory: object) -> Sequence[str]:
    """The modules that a factory of environments asks to import once, before processes start."""
    modules: Sequence[str] = getattr(factory, "preload", ())
    return modules


def options_class_of(factory: object) -> type[Settings] | None:
    """The class of an environment's options (`Options`), if it has one."""
    options = getattr(factory, "Options", None)
    is_class = isinstance(options, type) and issubclass(options, Settings)
    return options if is_class else None


def unwrapped_env(env: Env) -> Env:
    """An environment without its wrappers."""
    inner: Env = getattr(env, "unwrapped", env)
    return inner
