"""The number of rollout workers: as many as the load needs, within bounds.

A worker takes any number of episodes, so none waits for a place in it. But an episode waits for its
turn in the worker's event loop, the longer the busier that is. So the share of time in which the
loop is busy decides, whatever the loop is busy with: rendering, tokenising, or an environment that
computes in the worker's process.
"""

import math
from collections import deque

TARGET_SHARE = 0.6
"""The share of time in which an event loop should be busy. At 0.6 the next callback waits for one
and a half others on average (a queue with random arrivals and one server: 0.6 / (1 - 0.6))."""
TOLERANCE = 0.1
"""The number stays as it is while the share is within this part of its target."""
PERIOD_SECONDS = 15.0
"""Between two decisions, each of which is about the time since the last one."""
PERIODS_TO_SHRINK = 20
"""Consecutive periods that must ask for fewer workers: five minutes in which episodes are played.
A worker costs seconds to start, and one too many costs only its memory."""


class WorkerScaling:
    """The number of workers between two bounds, by the rule of Kubernetes' horizontal autoscaler:
    the number of event loops that are busy, divided by the share to which each should be. It grows
    at once, by two thirds at most, and shrinks to the largest number of the last
    `periods_to_shrink` decisions.
    """

    def __init__(
        self,
        fewest: int,
        most: int,
        *,
        period: float = PERIOD_SECONDS,
        periods_to_shrink: int = PERIODS_TO_SHRINK,
    ) -> None:
        self.fewest = fewest
        """Workers with which a run begins."""
        self.most = most
        self.period = period
        """Seconds between two decisions."""
        self._asked_for = deque[int](maxlen=periods_to_shrink)

    def decide(self, count: int, busy: float) -> int:
        """The number of workers from now on.

        `count`: how many there are now. `busy`: the busy event loops since the last decision, on
        average. Periods without any episode are skipped by the caller: they carry no information.
        """
        needed = math.ceil(busy / TARGET_SHARE)
        if abs(busy / TARGET_SHARE / count - 1) <= TOLERANCE:
            needed = count
        needed = min(max(needed, self.fewest), self.most)
        self._asked_for.append(needed)
        if needed >= count:
            return needed
        is_certain = len(self._asked_for) == self._asked_for.maxlen
        return min(count, max(self._asked_for)) if is_certain else count


__all__ = ["WorkerScaling"]
