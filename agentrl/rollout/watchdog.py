"""The last line of defence: ends a run that makes no progress in spite of all deadlines, and says
where it waits.
"""

import asyncio
from collections.abc import Callable, Hashable

from agentrl.errors import StallError
from agentrl.flow import now, waits


async def watch(
    seconds: float,
    progress: Callable[[], Hashable],
    busy: Callable[[], bool],
    rescue: Callable[[], bool],
) -> None:
    """Watch whether `progress()` changes while `busy()`; never returns.

    If it has not changed for `seconds` of loop time, call `rescue()`, which returns whether it
    could help.

    Raises:
        StallError: `rescue()` could not help. Names every stage with waiting calls, how many wait,
        and for how long.
    """
    seen, since = progress(), now()
    while True:
        await asyncio.sleep(seconds / 4)
        current = progress()
        if current != seen or not busy():
            seen, since = current, now()
        elif now() - since >= seconds:
            if not rescue():
                raise StallError(_describe(seconds))
            since = now()


def _describe(seconds: float) -> str:
    stages = "\n".join(
        f"  {wait.count} in {wait.phase} ({wait.layer}), the first for {wait.longest:.0f} s"
        for wait in waits()
        if wait.phase not in ("episode", "group")
    )
    idle = "  nothing outside: episodes wait for a slot, or the scheduler itself hangs"
    return (
        f"nothing has moved for {seconds:g} s (rollout.deadlines.stall). Waiting:\n"
        f"{stages or idle}\n"
        "`agentrl ledger RUN` lists the open episodes; `agentrl train --resume RUN` plays them "
        "again"
    )
