"""`Turnstile`: lets a few tasks pass in each iteration of the event loop."""

import asyncio


class Turnstile:
    """Lets `width` tasks pass in each iteration of the event loop, in the order in which they come.

    For work that waits for nothing: a thousand tasks that compute for a millisecond each would otherwise all do so in
    one iteration, in which no timer fires and no answer is read. Each iteration costs some microseconds.

        turnstile = Turnstile(32)
        await turnstile.passes()
        compute()
    """

    def __init__(self, width: int) -> None:
        self._at_once = asyncio.Semaphore(width)

    async def passes(self) -> None:
        """Wait for the caller's turn, until the next iteration at least."""
        async with self._at_once:
            await asyncio.sleep(0)
