"""`env_factory`: the factory of a named environment, in this process or in its own."""

from collections.abc import Callable, Sequence
from functools import partial

from agentrl import plugins
from agentrl.hosting.interpreter import find_interpreter
from agentrl.hosting.process_env import ProcessEnv
from agentrl.protocols.env import Env, Isolation, isolation_of


def env_factory(
    name: str,
    isolation: Isolation | None = None,
    python: str | None = None,
    requires: Sequence[str] = (),
) -> Callable[[], Env]:
    """A factory of the environment `name`. It runs in its own process if `isolation` or the
    environment asks for that, or if it has its own interpreter (`python`, `requires`).

    Raises:
        ConfigError: there is no such environment or interpreter.
    """
    if python is not None or requires:
        found = find_interpreter(python, requires)
        preload = ProcessEnv(name, found).check()
        if preload:
            ProcessEnv(name, found, preload).check()  # so that no reset's deadline includes it
        return partial(ProcessEnv, name, found, preload)
    factory = plugins.load("envs", name)
    if (isolation or isolation_of(factory)) == "process":
        return partial(ProcessEnv, name)
    return partial(factory)
