"""`ClientOptions`: which options of `reset` the clients of a served environment may choose.

Some options decide what code runs: a module that is imported, a program's limits, arguments of
another library's constructor. An environment marks them in its nested class `Options`, and only the
server's owner sets them:

    class Options(Settings):
        level: int = 1
        opponent: Annotated[str, OwnerOnly()] = "random"

Whatever its mark, a text such as "package.module:name" is refused too.
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from pydantic import Field

from agentrl.errors import ConfigError
from agentrl.hosting.process_env import ProcessEnv
from agentrl.hosting.wrappers import Wrapper, address
from agentrl.plugins import Component
from agentrl.protocols.env import Env, OwnerOnly, ResetResult, options_class_of
from agentrl.settings.base import Settings
from agentrl.trajectory import unshared

_ADDRESS = "agentrl.hosting.client_options:ClientOptions"
_CODE = re.compile(r"file:.+|[^\W\d][\w.-]*:[^\W\d][\w.:-]*", re.DOTALL)
"""A text that names code: `package.module:Name` or `file:PATH:Name`."""


class ClientOptions(Wrapper):
    """Refuses the options that only the server's owner may choose, and adds those that the owner
    has chosen.
    """

    picklable = True

    class Config(Settings):
        """The settings of the server's owner."""

        fixed: dict[str, Any] = Field(default_factory=dict)
        """Options of every episode; a client that sends another value for one is refused."""
        allowed: tuple[str, ...] = ()
        """Options that clients may choose although they can decide what code runs."""

    def __init__(self, config: Config, env: Env) -> None:
        super().__init__(env)
        self._config = config
        self._owner_only = owner_only(self.unwrapped) - set(config.allowed)

    def reset(
        self, *, seed: int, options: Mapping[str, Any]
    ) -> ResetResult | Awaitable[ResetResult]:
        """Reset the inner environment.

        Raises:
            ConfigError: a client may not choose one of these options.
        """
        fixed = self._config.fixed
        for name, value in options.items():
            if name in fixed:
                if value != fixed[name]:
                    raise ConfigError(
                        f"the server's owner has fixed the option {name!r}: leave it out"
                    )
            elif name in self._owner_only or (
                name not in self._config.allowed and names_code(value)
            ):
                raise ConfigError(
                    f"the option {name!r} can decide what code runs, so only the server's owner may"
                    f" set it: agentrl serve ENV --options '{{{name}: VALUE}}', or --allow-options"
                    f" {name} to let clients choose"
                )
        return super().reset(
            seed=seed, options={**options, **unshared(fixed, "the options of the server's owner")}
        )


SAFE_OPTIONS = ClientOptions.Config()
"""Clients choose what is not marked, and the owner nothing."""


def owner_only(env: Env) -> set[str]:
    """The options that the environment's class `Options` marks as `OwnerOnly`."""
    shape = options_class_of(env)
    return set() if shape is None else marked_options(shape)


def marked_options(shape: type[Settings]) -> set[str]:
    """The options that such a class marks as `OwnerOnly`."""
    marked = {
        name: field
        for name, field in shape.model_fields.items()
        if any(isinstance(m, OwnerOnly) for m in field.metadata)
    }
    return set(marked) | {field.alias for field in marked.values() if field.alias}


def names_code(value: Any) -> bool:
    """True if a text in this JSON value, at any depth, is the address of code."""
    match value:
        case str():
            return _CODE.fullmatch(value) is not None
        case Mapping():
            return any(names_code(part) for part in value.values())
        case list() | tuple():
            return any(names_code(part) for part in value)
        case _:
            return False


def for_clients(factory: Callable[[], Env], config: ClientOptions.Config) -> Callable[[], Env]:
    """A factory of the same environments, for clients. In a worker process, the options are checked
    there.
    """
    if isinstance(factory, partial) and factory.func is ProcessEnv:
        name, *rest = factory.args
        return partial(
            ProcessEnv, address(name, [Component(_ADDRESS, ClientOptions, config)]), *rest
        )
    return partial(_make_for_clients, factory, config)


def _make_for_clients(factory: Callable[[], Env], config: ClientOptions.Config) -> Env:
    return ClientOptions(config, factory())
