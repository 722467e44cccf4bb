"""The progress of a run, for its display."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from agentrl.rollout.accounts import SchedulerStatus
from agentrl.trajectory import Group, columns_of

_STEPS_FOR_PACE = 10
_SLOWEST = 3


class EnvPace(NamedTuple):
    """The mean and the longest duration of an environment's steps in the last batch, in seconds."""

    env: str
    mean: float
    longest: float


@dataclass(slots=True)
class RunProgress:
    """The state of a run of `steps` steps. `clock` counts seconds.

    The event loop's thread writes it, and a display's thread reads it, so each field is replaced as
    a whole.
    """

    steps: int
    name: str = ""
    clock: Callable[[], float] = time.monotonic
    done: int = 0
    phase: str = ""
    phase_since: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    rewards: tuple[float, ...] = ()
    held_out: tuple[int, float] | None = None
    """Steps, and success on held-out tasks after them, of the newest evaluation."""
    held_out_failed: int = 0
    """Its episodes that failed."""
    slowest: tuple[EnvPace, ...] = ()
    warnings: tuple[tuple[int, str], ...] = ()
    underway: Callable[[], SchedulerStatus] | None = None
    began: float = 0.0
    _paces: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS_FOR_PACE))
    _last: float | None = None

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return self.clock() - self.began

    @property
    def remaining(self) -> float | None:
        """Seconds for the steps that are left, at the pace of the last ones; None if unknown."""
        paces = tuple(self._paces)
        if not paces or self.done >= self.steps:
            return None
        since = 0.0 if self._last is None else self.clock() - self._last
        return max(0.0, fmean(paces) * (self.steps - self.done) - since)

    def begin_phase(self, phase: str) -> None:
        """A phase of a step begins. The first one begins the first step, from which the pace is
        measured.
        """
        self.phase_since, self.phase = self.clock(), phase
        if self._last is None:
            self._last = self.phase_since

    def step(self, step: int, metrics: Mapping[str, float], groups: Iterable[Group] = ()) -> None:
        """A step, counted from 0, has ended."""
        now = self.clock()
        if self._last is not None:
            self._paces.append(now - self._last)
        self._last = now
        self.done = step + 1
        self.metrics = dict(metrics)
        self.rewards = (*self.rewards, metrics["reward"])
        self.slowest = slowest_envs(groups) or self.slowest

    def warn(self, step: int, text: str) -> None:
        """The run warns of something."""
        self.warnings = (*self.warnings, (step, text))


def slowest_envs(groups: Iterable[Group]) -> tuple[EnvPace, ...]:
    """The environments whose steps took longest on average."""
    seconds = defaultdict[str, list[float]](list)
    for group in groups:
        for trajectory in group.trajectories:
            seconds[group.task.env] += columns_of(trajectory.turns).env_seconds_K.tolist()
    paces = [EnvPace(env, fmean(found), max(found)) for env, found in seconds.items() if found]
    return tuple(sorted(paces, key=lambda pace: -pace.mean)[:_SLOWEST])
