"""`env_factory`: from an environment's name to what makes it, in this process or in one of its own."""

from collections.abc import Callable, Sequence
from functools import partial

from agentrl import plugins
from agentrl.hosting.interpreter import find_interpreter
from agentrl.hosting.process import ProcessEnv
from agentrl.protocols import Env, Isolation


def env_factory(
    name: str, isolation: Isolation | None = None, python: str | None = None, requires: Sequence[str] = ()
) -> Callable[[], Env]:
    """What makes an environment of this name: one in a process of its own where `isolation` or the environment says
    so, or where it has an interpreter of its own (`python`, `requires`).

    Raises:
        ConfigError: there is no such environment or interpreter.
    """
    if python is not None or requires:
        found = find_interpreter(python, requires)
        preload = ProcessEnv(name, found).check()
        if preload:
            ProcessEnv(name, found, preload).check()  # before the deadline of a reset counts
        return partial(ProcessEnv, name, found, preload)
    factory = plugins.load("envs", name)
    if (isolation or getattr(factory, "isolation", "thread")) == "process":
        return partial(ProcessEnv, name)
    return partial(factory)
