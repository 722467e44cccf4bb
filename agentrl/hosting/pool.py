"""`EnvPool`: makes environments by name, and keeps idle instances for the next episode."""

from collections.abc import Callable, Mapping

from agentrl.errors import RAISED_BY_CODE, ConfigError, EnvError, PluginError, describe
from agentrl.flow import Flow
from agentrl.hosting.calls import recorded
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.live_env import LiveEnv
from agentrl.hosting.pictures import pictured
from agentrl.hosting.process_env import ProcessEnv
from agentrl.hosting.snapshots import rewindable
from agentrl.protocols.env import Env, Isolation, check_env_methods


class EnvPool:
    """The instances of a run's environments.

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
            ConfigError: it needs its own process and is not a `ProcessEnv`, or lacks a method, or
            this run has no such environment.
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
            check_env_methods(name, env)
        except PluginError:
            raise
        except RAISED_BY_CODE as error:
            raise EnvError(f"making the environment {name!r} raised {describe(error)}") from error
        # Pictures, calls and ways back are added where the environment runs, so that they cross
        # every transport.
        if isinstance(env, ProcessEnv):
            env.pictures = self._pictures
            env.records_calls = True
        else:
            env = rewindable(recorded(pictured(env) if self._pictures else env))
        return LiveEnv(env, self._deadlines, isolation=self._isolation.get(name))

    async def release(self, name: str, env: LiveEnv) -> None:
        """Keep a working instance for the next episode; close a broken one."""
        if env.broken:
            await env.close()
        else:
            self.keep(name, env)

    def keep(self, name: str, env: LiveEnv) -> None:
        """Keep an instance that works, or was never used, for the next episode."""
        self._idle[name].append(env)

    async def close(self) -> None:
        """Close every idle instance, all at the same time: one that hangs costs its deadline and
        not its neighbours'.
        """
        idle = [env for envs in self._idle.values() for env in envs]
        self._idle = {name: [] for name in self._idle}
        async with Flow("environments.close") as flow:
            for number, env in enumerate(idle):
                flow.start(env.close(), name=str(number))
