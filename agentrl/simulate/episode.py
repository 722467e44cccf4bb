"""Episodes as one span of time, to study the scheduler alone at a fraction of the cost of turns."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from random import Random

import numpy as np

from agentrl.errors import DeadlineError
from agentrl.flow import deadline, now
from agentrl.rollout.assignment import Assignment, Report, ignore_reports
from agentrl.simulate.engine import FILLER
from agentrl.simulate.latency import Latency
from agentrl.tokens.arrays import floats, ints
from agentrl.trajectory import Completion, Failed, Terminated, Trajectory, Turn

_POPULATION = 1 << 16


@dataclass(frozen=True, slots=True)
class SpanEpisodeRunner:
    """An `EpisodeRunner` that only waits. Lengths are drawn in advance: seeding a generator for
    each would cost more.

    A trajectory has one token for each policy version that was served while it was played, so its
    staleness is exact.
    """

    lengths: tuple[float, ...]
    version: Callable[[], int]
    deadline: float

    @staticmethod
    def drawing(
        seconds: Latency, seed: int, version: Callable[[], int], deadline: float
    ) -> "SpanEpisodeRunner":
        """Episodes of lengths drawn from `seconds`; `version` is the policy version now."""
        rng = Random(seed)
        return SpanEpisodeRunner(
            tuple(seconds.sample(rng) for _ in range(_POPULATION)), version, deadline
        )

    async def play(
        self, assignment: Assignment, report: Report = ignore_reports
    ) -> tuple[Trajectory]:
        """Wait as long as the episode takes."""
        started, first = now(), self.version()
        length = self.lengths[assignment.seed % _POPULATION]
        try:
            with deadline("environment", "episode", self.deadline):
                await asyncio.sleep(length)
        except DeadlineError as error:
            failed = Failed.by(error)
            return (Trajectory(assignment.id, assignment.task, (), failed, (), now() - started),)
        turns = (_turn(first, self.version(), assignment.seed & 1),)
        return (
            Trajectory(assignment.id, assignment.task, turns, Terminated(), (), now() - started),
        )


@lru_cache(maxsize=4096)
def _turn(first: int, last: int, reward: int) -> Turn:
    versions = ints(range(first, last + 1))
    fillers, certain = ints(np.full(len(versions), FILLER)), floats(np.zeros(len(versions)))
    return Turn(fillers[:1], Completion(fillers, certain, versions, "stop"), float(reward), {})
