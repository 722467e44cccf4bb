"""Shares one sandbox among all users of the same config: there are hundreds of environments, but
few CPUs.
"""

import asyncio
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from agentrl.sandbox.pool import ProgramSandbox
from agentrl.sandbox.settings import SandboxConfig


@dataclass(eq=False)
class _Entry:
    sandbox: ProgramSandbox
    users: int = 0
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)


_entries: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[SandboxConfig, _Entry]] = (
    WeakKeyDictionary()
)


async def borrow(config: SandboxConfig) -> ProgramSandbox:
    """The running event loop's sandbox for this config, started at the first call. Each `borrow`
    needs a `give_back`.

    Raises:
        ConfigError: the machine cannot isolate.
    """
    entries = _entries.setdefault(asyncio.get_running_loop(), {})
    entry = entries.setdefault(config, _Entry(ProgramSandbox(config)))
    async with entry.starting:
        if not entry.sandbox.backend:
            await entry.sandbox.__aenter__()
        entry.users += 1
    return entry.sandbox


async def give_back(sandbox: ProgramSandbox) -> None:
    """Return a borrowed sandbox. Returning it for the last time ends it."""
    entries = _entries.get(asyncio.get_running_loop(), {})
    entry = entries.get(sandbox.config)
    if entry is None or entry.sandbox is not sandbox:
        return
    entry.users -= 1
    if entry.users == 0:
        del entries[sandbox.config]
        await sandbox.__aexit__()
