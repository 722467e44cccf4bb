"""Shares one provider of sandboxes among all environments of an event loop that choose the same."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from pydantic import ValidationError

from agentrl.errors import ConfigError, SandboxOutageError
from agentrl.flow import has_played
from agentrl.plugins import load, settings_of
from agentrl.protocols import SandboxProvider
from agentrl.sandbox.sandbox_pool import SandboxPool
from agentrl.settings.base import Settings
from agentrl.settings.faults import faults

_Choice = tuple[str, Settings]


@dataclass(eq=False)
class _Entry:
    pool: SandboxPool | None = None
    users: int = 0
    has_opened: bool = False
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)


# By event loop, since the providers belong to theirs.
_entries: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Choice, _Entry]] = WeakKeyDictionary()


def read_choice(choice: Mapping[str, Any]) -> _Choice:
    """The name and the settings in `{name: docker, image: ...}`; the name is `jail` by default.

    Raises:
        ConfigError: no provider has this name, or it has no such setting.
    """
    name = str(choice.get("name", "jail"))
    shape = settings_of(load("sandboxes", name))
    rest = {key: value for key, value in choice.items() if key != "name"}
    try:
        return name, shape.model_validate(rest)
    except ValidationError as error:
        wrong = "; ".join(f"{fault.where!r}: {fault.what}" for fault in faults(error, rest))
        raise ConfigError(
            f"sandbox: {wrong}. The settings of {name!r} are: {', '.join(shape.model_fields)}"
        ) from error


async def open_provider(choice: Mapping[str, Any]) -> SandboxProvider:
    """Open a provider for yourself; close it at the end.

    Raises:
        ConfigError: there is none of this name, or it does not work on this machine.
    """
    name, settings = read_choice(choice)
    provider: SandboxProvider = await load("sandboxes", name).open(settings)
    return provider


async def borrow_provider(choice: Mapping[str, Any]) -> SandboxProvider:
    """The running event loop's provider for this choice, opened at the first call. Each call needs
    a `give_back_provider`.

    Raises:
        ConfigError: as `open_provider`.
        SandboxOutageError: it has been open before, here or elsewhere in the run (`has_played`),
            and cannot be opened again now.
    """
    loop = asyncio.get_running_loop()
    entries = _entries.setdefault(loop, {})
    entry = entries.setdefault(read_choice(choice), _Entry())
    async with entry.opening:
        if entry.pool is None:
            try:
                entry.pool = SandboxPool(await open_provider(choice))
            except ConfigError as error:
                if not entry.has_opened and not has_played():
                    raise
                # Its settings are right, then, and what it needs is away for a while.
                raise SandboxOutageError(str(error)) from error
            entry.has_opened = True
        entry.users += 1
        return entry.pool


async def give_back_provider(provider: SandboxProvider) -> None:
    """Return a borrowed provider. Returning it for the last time closes it, with all sandboxes."""
    for entry in _entries.get(asyncio.get_running_loop(), {}).values():
        if entry.pool is provider:
            entry.users -= 1
            if entry.users == 0:
                entry.pool = None
                await provider.close()
            return
