"""`Outages`: while the environments' server is unreachable, episodes wait for it instead of
spending their retries.

attempt ──▶ OutageError ──▶ pause, doubled, with jitter ──▶ attempt ...

It ends after at most `rollout.deadlines.outage` seconds.
"""

import asyncio
import logging
import math
from dataclasses import dataclass
from random import Random

from agentrl.flow import now, waiting_for
from agentrl.flow.retries import Retries
from agentrl.trajectory import Failed

logger = logging.getLogger(__name__)

LONGEST_PAUSE = 10.0
"""Seconds between two attempts of a member to reach the server."""
_OVER_AFTER = 3 * LONGEST_PAUSE
"""Seconds without a failed attempt after which an outage is over."""


@dataclass(slots=True)
class Outages:
    """All outages of a run. `longest` is how many seconds one of them may take."""

    longest: float
    seconds: float = 0.0
    """Seconds of all outages so far."""
    _began: float = -math.inf
    _last: float = -math.inf
    _why: str = ""

    def caused(self, failed: Failed, started: float) -> bool:
        """True if an outage failed an attempt that began at `started`: such a failure counts in no
        retry budget.

        A server that is back has lost its sessions, so a failure of the environment also counts as
        caused by an outage if the attempt began before the end of one.
        """
        if not failed.outage:
            return failed.layer == "environment" and started <= self._last
        if now() - self._last > _OVER_AFTER:
            self._began = self._last = now()
            logger.warning(
                "%s; episodes wait for up to %g s (rollout.deadlines.outage)",
                failed.error,
                self.longest,
            )
        self._why = failed.error
        self.seconds += now() - self._last
        self._last = now()
        return now() - self._began <= self.longest

    def episode_ended(self) -> None:
        """Record that an episode was played to its end: the server answers at least some requests,
        so `longest` counts from here again.
        """
        if self._began > -math.inf:
            self._began = now()

    async def pause(self, failures: int, rng: Random) -> None:
        """Wait after so many attempts in a row that failed because of an outage."""
        with waiting_for(self._why):
            await asyncio.sleep(min(jittered(failures, rng), LONGEST_PAUSE))


def jittered(failures: int, rng: Random) -> float:
    """Seconds to wait after so many failures in a row: doubled each time, with jitter, so that the
    members of a run do not all come back at the same moment.
    """
    return Retries.pause(failures) * rng.uniform(0.5, 1.0)
