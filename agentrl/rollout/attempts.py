"""`Attempts`: repeats the episode of a member until it is played and scored, or its retries are
spent.

The layer at fault decides how many retries there are (`rollout.retries`). A failed reward is
retried on the same trajectory (`agentrl/scoring/pipeline.py`); after any other failure the member's
episode is played again, with the same environment seed and new sampling.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from random import Random

from agentrl.errors import Layer
from agentrl.flow import Retries, now
from agentrl.rollout.member import MemberResult
from agentrl.rollout.outage import Outages, jittered

NO_RETRIES = Retries(environment=0, engine=0, reward=0, data=0)
"""Each episode is played once."""


@dataclass(frozen=True, slots=True)
class LastAttempt:
    """The last attempt of a member, with which it ends."""

    result: MemberResult
    failures: int
    """Attempts that have failed, outages not counted."""


@dataclass(frozen=True, slots=True)
class Attempts:
    """The retries that each member of a run or an evaluation has."""

    retries: Retries
    outages: Outages

    async def repeat(
        self,
        play: Callable[[int], Awaitable[MemberResult | None]],
        rng: Random,
        outage_noticed: Callable[[], None] = lambda: None,
    ) -> LastAttempt:
        """Call `play` with 0, 1, 2 ... until the episode is played or its retries are spent. It
        returns None for an episode that was preempted, which costs no retry.

        `rng` spreads the pauses of the members. `outage_noticed` is called for each attempt that an
        outage has failed, before the pause.
        """
        failures: Counter[Layer] = Counter()
        in_outages = 0
        for attempt in count():
            started = now()
            played = await play(attempt)
            if played is None:
                continue
            result = played
            failure = result.failure
            if failure is None:
                self.outages.episode_ended()
                break
            if not failure.final and self.outages.caused(failure, started):
                in_outages += 1
                outage_noticed()
                await self.outages.pause(in_outages, rng)
                continue
            failures[failure.layer] += 1
            spent = failures[failure.layer] > self.retries.of(failure.layer)
            # A failed reward has spent its retries on this trajectory already: `RewardPipeline`.
            if spent or failure.final or failure.layer == "reward":
                break
            if failure.layer in ("engine", "environment"):
                await asyncio.sleep(jittered(failures[failure.layer], rng))
        return LastAttempt(result, failures.total())
