"""GEM's environments: `env: gem:game:GuessTheNumber-v0-easy`."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from agentrl.envs.base import TextEnv, read_options
from agentrl.envs.foreign import GlobalRng, check_known, load_package
from agentrl.errors import ConfigError, EnvError
from agentrl.protocols import Env, OwnerOnly, StepResult
from agentrl.settings.base import Settings
from agentrl.tokens.arrays import at_least


def scheme(rest: str) -> Callable[[], Env]:
    """gem:game:GuessTheNumber-v0-easy: an environment of GEM.

    Raises:
        PluginError: there is no such environment, or the package is missing.
    """
    with _keep_root_logger():
        load_package("gem")
        load_package("gem.envs")
    from gem.envs.registration import ENV_REGISTRY

    check_known(f"gem:{rest}", rest, ENV_REGISTRY)
    return partial(Gem, rest)


class Gem(TextEnv):
    r"""A GEM environment. Actions are written in \boxed{}; a game that ends with a reward of 1 is a
    success.
    """

    system_prompt = "You play a game. Write each action in \\boxed{}, as the rules say."

    class Options(Settings):
        """The options of `reset`."""

        kwargs: Annotated[dict[str, Any], OwnerOnly()] = Field(default_factory=dict)
        """Keyword arguments of `gem.make`."""

    deterministic = True

    def __init__(self, name: str) -> None:
        self._name = name
        self._env: Any = None

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        """Make a new environment, since some count their episodes, and reset it.

        Raises:
            ConfigError: GEM cannot make it.
        """
        import gem

        chosen = read_options(self.Options, options)
        self._global_rng = GlobalRng(seed)
        with self._global_rng.install():
            try:
                self._env = gem.make(self._name, **chosen.kwargs)
            except Exception as error:
                raise ConfigError(
                    f"gem cannot make {self._name!r} with kwargs={chosen.kwargs!r}: {error!r}."
                    " Install or download what it needs, or correct options['kwargs']"
                ) from error
            observation, _ = self._env.reset(seed=seed % 2**32)
        return str(observation)

    def step(self, action: str) -> StepResult:
        """Play the action.

        Raises:
            EnvError: no episode is being played.
        """
        if self._env is None:
            raise EnvError("no episode is being played; call reset first")
        with self._global_rng.install():
            observation, reward, terminated, truncated, _ = self._env.step(action)
        reward, terminated, truncated = float(reward), bool(terminated), bool(truncated)
        if terminated or truncated:
            self._env = None
        return (
            str(observation),
            reward,
            terminated,
            truncated,
            {"success": terminated and at_least(reward, 1)},
        )

    def close(self) -> None:
        """Drop the environment."""
        self._env = None


@contextmanager
def _keep_root_logger() -> Iterator[None]:
    """Restore the root logger after the block. Importing gem reconfigures the logging of the whole
    process, which belongs to the program.
    """
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
