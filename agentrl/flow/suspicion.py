"""`Suspicion`: finds the request that workers die of, so that it does not kill one after the other.

A worker that dies works on several requests, and one of them may be the reason. The one that was
there at two deaths is set aside: it fails, and so does every later request with the same content.
Where several were there at both, they are asked one at a time (`turn`), until one of them kills
alone. A caller that cannot ask one at a time sets aside those that were there at four deaths.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING

from agentrl.errors import RolloutError
from agentrl.flow.deadline import pause_deadlines

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LETHAL_DEATHS = 2
"""Deaths at which a request is set aside."""
_MAX_SUSPECTS = 1000
"""Suspects that are remembered. Most of them are asked again soon, and then answered."""
_FREELY = nullcontext()


class Suspect:
    """A request. `content` returns what it is known by; it is only called after a death."""

    __slots__ = ("content", "deaths", "name")

    def __init__(self, name: str, content: Callable[[], bytes]) -> None:
        self.name = name
        self.content = content
        self.deaths = 0
        """The number of workers that died while they worked on it, perhaps because of it."""


class Suspicion:
    """The suspects of one kind of work. `failure` is the error of what is set aside; `workers`
    names who dies.
    """

    def __init__(self, failure: type[RolloutError], workers: str) -> None:
        self._failure = failure
        self._workers = workers
        self._set_aside: dict[bytes, str] = {}
        self._suspects: dict[Suspect, None] = {}
        self._one_at_a_time = asyncio.Lock()

    @property
    def set_aside(self) -> int:
        """The number of requests that have been set aside."""
        return len(self._set_aside)

    @property
    def is_open(self) -> bool:
        """True while somebody is suspected of a death."""
        return bool(self._suspects)

    def suspect(self, name: str, content: Callable[[], bytes]) -> Suspect:
        """The suspect of this content, for one that is asked about in several calls."""
        if self._suspects:
            known = content()
            found = next((one for one in self._suspects if one.content() == known), None)
            if found is not None:
                return found
        return Suspect(name, content)

    def check(self, suspect: Suspect) -> None:
        """Raise the reason why it, or one of the same content, has been set aside.

        Raises:
            RolloutError: it has; of the kind `failure`.
        """
        if self._set_aside and (why := self._set_aside.get(suspect.content())) is not None:
            raise self._failure(why)

    def died(self, at_work: Iterable[Suspect], why: object) -> None:
        """A worker died while it worked on these."""
        present = set(at_work)
        for suspect in present:
            suspect.deaths += 1
        self._suspects |= dict.fromkeys(present)
        # It is not asked again.
        for oldest in list(self._suspects)[: max(0, len(self._suspects) - _MAX_SUSPECTS)]:
            del self._suspects[oldest]
        lethal = {
            suspect.content(): suspect for suspect in present if suspect.deaths >= LETHAL_DEATHS
        }
        if len(lethal) > 1:  # it may be any of them, unless they have been there too often
            lethal = {
                content: one for content, one in lethal.items() if one.deaths >= 2 * LETHAL_DEATHS
            }
        for content, culprit in lethal.items():
            self._set_aside[content] = (
                f"{self._workers} died {culprit.deaths} times while they worked on {culprit.name}, "
                f"so it is set aside and not tried again; the last time: {why}"
            )
            logger.warning("%s", self._set_aside[content])
        if lethal:
            for suspect in self._suspects:  # that explains those deaths
                suspect.deaths = 0
            self._suspects.clear()

    def ended(self, suspect: Suspect) -> None:
        """It was answered, or is not asked any more."""
        if suspect.deaths:
            suspect.deaths = 0
            self._suspects.pop(suspect, None)

    def turn(self, suspect: Suspect) -> AbstractAsyncContextManager[None]:
        """Inside the block, no other request is asked that is suspected as much."""
        return self._alone(suspect) if suspect.deaths >= LETHAL_DEATHS else _FREELY

    @asynccontextmanager
    async def _alone(self, suspect: Suspect) -> "AsyncIterator[None]":
        with pause_deadlines():  # the others may take long
            await self._one_at_a_time.acquire()
        try:
            if suspect.deaths >= LETHAL_DEATHS:
                yield
                return
        finally:
            self._one_at_a_time.release()
        yield  # meanwhile another one was found to be the reason
