"""`Turnstile`: lets a few tasks pass in each iteration of the event loop."""

import asyncio


class Turnstile:
    """Lets `width` tasks pass in each iteration of the event loop, in order of arrival.

    For work that never awaits: a thousand tasks that compute for a millisecond each would otherwise
    all do so in one iteration, during which no timer fires and no answer is read. Each iteration
    costs some microseconds.

        turnstile = Turnstile(32)
        await turnstile.passes()
        compute()
    """

    def __init__(self, width: int) -> None:
        self._at_once = asyncio.Semaphore(width)

    async def passes(self) -> None:
        """Wait for the caller's turn, at least until the next iteration."""
        async with self._at_once:
            await asyncio.sleep(0)
