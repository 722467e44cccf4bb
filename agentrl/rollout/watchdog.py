"""The last line: everything has a deadline, and still nothing moves. Say where, and end it."""

import asyncio
from collections.abc import Callable, Hashable

from agentrl.errors import StallError
from agentrl.flow import now, waits


async def watch(
    seconds: float, progress: Callable[[], Hashable], busy: Callable[[], bool], rescue: Callable[[], bool]
) -> None:
    """Look whether `progress()` changes while there is something to do; never returns.

    When it has not for `seconds` of loop time, `rescue()` is tried, which says whether it could do anything.

    Raises:
        StallError: it could not. Names every stage that is waited for, how many wait, and for how long.
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
    return (
        f"nothing has moved for {seconds:g} s (rollout.deadlines.stall). Waiting:\n"
        f"{stages or '  nothing outside: episodes wait for a slot, or the scheduler itself hangs'}\n"
        "`agentrl ledger RUN` lists the open episodes; `agentrl train --resume RUN` takes them up again"
    )
