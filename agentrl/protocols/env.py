"""Environments: text in, text and pictures out, one episode at a time."""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, Protocol, runtime_checkable

from agentrl.errors import PluginError
from agentrl.settings.base import Settings
from agentrl.tokens.encoded_image import EncodedImage


@dataclass(frozen=True, slots=True)
class OwnerOnly:
    """Marks an option of an environment that can decide what code runs: `Annotated[str,
    OwnerOnly()]`.

    Clients of a served environment may not set it (`agentrl/hosting/client_options.py`).
    """


Isolation = Literal["inline", "thread", "process"]
"""The place where an environment or a reward runs: on the event loop, in a thread, in a process."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment shows, if that is more than a text: pictures, which stand before it.

    return Observation("Your move.", [EncodedImage.of_pixels(self.screen)])
    """

    text: str = ""
    images: Sequence[EncodedImage] = ()


ResetResult = tuple[str, dict[str, Any]]
"""(observation, info)"""


StepResult = tuple[str, float, bool, bool, dict[str, Any]]
"""(observation, reward, terminated, truncated, info)"""


ResetReply = tuple[str | Observation, dict[str, Any]]
"""The same as `ResetResult`, of an environment that may show pictures."""


StepReply = tuple[str | Observation, float, bool, bool, dict[str, Any]]
"""The same as `StepResult`, of an environment that may show pictures."""


@runtime_checkable
class Env(Protocol):
    """A Gymnasium environment with text in and out; with an `Observation`, pictures too. Methods
    may be sync or async.

    One instance plays one episode at a time; `reset` may be called again for the next. All
    randomness comes from `seed`. Environments never handle tokens. Seven attributes are optional:

    - `system_prompt: str`: the system message of every episode;
    - `tools: Sequence[Mapping]`: JSON schemas of callable functions, passed to the chat template;
    - `isolation: "inline" | "thread" | "process"`: where it runs. An inline environment must answer
      in microseconds. By default a sync environment runs in its own thread and may block;
    - `calls_made: Sequence[MadeCall] | None`: the calls that the last step made, a new list for
      each step. Rewards that watch calls see these; else they read the messages as JSON;
    - `render_html() -> str`: draws the present state as HTML, after each reset and step. `agentrl
      view` shows it beside the messages, without scripts or requests: styles, SVG and `data:`
      images work;
    - `snapshot() -> bytes` and `restore(state: bytes) -> None`, both sync or both async: the whole
      state of the episode between two steps, its random state included, and the way back to it.
      Any instance that was made in the same way can be restored, also one that plays something
      else, and as often as is wanted. From there on the same actions give the same replies as if
      nothing had happened in between. `restorable: bool` says whether an instance can do it, for
      classes that always have the methods;
    - `deterministic: bool`: the seed, the options and the actions decide every reply, whenever and
      wherever they are repeated. Without a `snapshot` of its own, such an environment goes back by
      playing its actions again (`agentrl/hosting/snapshots.py`).

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

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetReply | Awaitable[ResetReply]:
        """Start an episode; the same seed and options give the same episode."""
        ...

    def step(self, action: str) -> StepReply | Awaitable[StepReply]:
        """Act on the model's whole message. The answer to a malformed one is an observation, not an
        exception.

        It is called by position, so the parameter may have any name.
        """
        ...

    def close(self) -> None | Awaitable[None]:
        """Release the environment's resources. May be called at any time and more than once."""
        ...


def check_env_methods(name: str, env: object) -> None:
    """Check that an environment, or its class, has the methods that each must have.

    Raises:
        PluginError: it lacks some.
    """
    if isinstance(env, type) and hasattr(env, "__getattr__"):
        return  # only an instance can tell
    missing = [f"`{one}`" for one in _METHODS if not callable(getattr(env, one, None))]
    if missing:
        raise PluginError(
            f"the environment {name!r} has no method {', '.join(missing)}: write it, or inherit"
            " from agentrl.TextEnv or agentrl.ToolEnv, which have what all need"
        )


_METHODS = ("reset", "step", "close")
ScriptedPlayer = Callable[[Env, Random], str | Awaitable[str]]
"""Looks at a live environment and returns an action, for example to play demonstrations.

It gets `env.unwrapped` if that exists: the environment without its wrappers.
"""


OptionalAttribute = Literal[
    "Options",
    "deterministic",
    "isolation",
    "preload",
    "render_html",
    "restorable",
    "restore",
    "reward_range",
    "shows_images",
    "snapshot",
    "system_prompt",
    "tools",
    "unwrapped",
]
"""What an environment, its factory or its options may have: a type checker refuses mistyped names.
They are no `Offers`, of which all are read at once: an environment may compute one when asked.
"""


def _stated(plugin: object, name: OptionalAttribute, default: Any = None) -> Any:
    return getattr(plugin, name, default)


def isolation_of(plugin: object, default: Isolation | None = "thread") -> Any:
    """The place where an environment, a reward or its class asks to run (`isolation`)."""
    return _stated(plugin, "isolation", default)


def tools_of(env: object) -> Any:
    """The schemas of an environment's tools, as it states them (`tools`)."""
    return _stated(env, "tools", ())


def system_prompt_of(env: object) -> Any:
    """The system message of an environment, as it states it (`system_prompt`): a text is one
    without a subclass, as `str(...)` of a member of an enum would give its name.
    """
    prompt: Any = _stated(env, "system_prompt", "")
    return str.__str__(prompt) if isinstance(prompt, str) else prompt


def reward_range_of(env: object) -> Any:
    """The lowest and the highest return of an episode, as an environment states them
    (`reward_range`).
    """
    return _stated(env, "reward_range", (-math.inf, math.inf))


def preload_of(factory: object) -> Sequence[str]:
    """The modules that a factory of environments asks to import once, before processes start."""
    modules: Sequence[str] = _stated(factory, "preload", ())
    return modules


def can_restore(env: object) -> bool:
    """True if an environment can tell its state and go back to it (`snapshot`, `restore`)."""
    declared = _stated(env, "restorable")
    if declared is not None:
        return bool(declared)
    return callable(_stated(env, "snapshot")) and callable(_stated(env, "restore"))


def can_draw(env: object) -> bool:
    """True if an environment can draw its present state (`render_html`)."""
    return callable(_stated(env, "render_html"))


def call_snapshot(env: Any) -> Any:
    """The reply of `snapshot` of an environment that can restore, which may be an awaitable."""
    return env.snapshot()


def call_restore(env: Any, state: bytes) -> Any:
    """Call `restore` of an environment that can; the reply may be an awaitable."""
    return env.restore(state)


def is_deterministic(env: object) -> bool:
    """True if an environment declares that its actions, repeated, give the same episode
    (`deterministic`).
    """
    return bool(_stated(env, "deterministic", False))


def options_class_of(factory: object) -> type[Settings] | None:
    """The class of an environment's options (`Options`), if it has one."""
    options = _stated(factory, "Options")
    is_class = isinstance(options, type) and issubclass(options, Settings)
    return options if is_class else None


def shows_images(options: Settings) -> bool:
    """True if an environment with these options shows pictures (`shows_images`)."""
    return bool(_stated(options, "shows_images", False))


def unwrapped_env(env: Env) -> Env:
    """An environment without its wrappers."""
    inner: Env = _stated(env, "unwrapped", env)
    return inner
