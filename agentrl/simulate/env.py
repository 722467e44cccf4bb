"""Environments that take time and have no content: turns, seconds, rewards and troubles are drawn
from seeds.

    config = SimulatedEnvsConfig(step_seconds=Normal(mean=10, sd=5), hung=0.001)
    envs = SimulatedEnvs(config, seed=0)
    host = EnvPool({"simulated": envs}, deadlines)

An episode follows an `EpisodePlan`, and the plan of (task seed, member) never changes: an episode
that is played again, or under another scheduler, takes the same turns and the same seconds. Only
trouble is drawn again at each attempt.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from agentrl.errors import OutageError
from agentrl.flow import now
from agentrl.protocols import ResetResult, StepResult
from agentrl.rollout.seeds import derive_seed
from agentrl.simulate.config import SimulatedEnvsConfig, SimulatedOutage
from agentrl.simulate.cores import Cores

Trouble = Literal["none", "hung", "crash", "fail_slow", "slow_drip"]

# Tasks whose members are remembered: many more than are ever live, but memory is bounded.
_TASKS = 1 << 16


@dataclass(frozen=True, slots=True)
class EpisodePlan:
    """One episode: the seconds of its reset and of each of its steps, and the reward of the last
    step.
    """

    reset_seconds: float
    step_seconds: tuple[float, ...]
    reward: float


EpisodePlanOf = Callable[[int, int], EpisodePlan]
"""(task seed, member) to plan."""


@dataclass(slots=True)
class _Members:
    """The members of a task: the next one that has not started, and those whose last attempt was
    broken off.
    """

    next: int = 0
    again: list[tuple[int, int]] = field(default_factory=list)  # (member, attempt)


class SimulatedEnvs:
    """Makes environments, as a plug-in's class would, and counts what happens to them.

    The members of a group are reset with the same seed, so the first reset with a seed is member 0,
    the next is member 1, and so on. An episode that is broken off (its environment is closed or
    reset before its end) is played again by the next reset with that seed: the same member, another
    attempt.

    Args:
        config: The settings.
        seed: Seeds every draw, together with task, member and attempt.
        plan_of: Plans the episodes; by default, plans are drawn from the settings.
    """

    def __init__(
        self,
        config: SimulatedEnvsConfig | None = None,
        seed: int = 0,
        plan_of: EpisodePlanOf | None = None,
    ) -> None:
        self._config = config or SimulatedEnvsConfig()
        self._seed = seed
        self._plan_of = plan_of or self._draw_plan
        self._troubled = (
            self._config.hung + self._config.crash + self._config.fail_slow + self._config.slow_drip
            > 0
        )
        self._tasks: OrderedDict[int, _Members] = OrderedDict()
        self.cores = Cores(self._config.cores) if self._config.cores else None
        """Those that compute resets and steps; None if there are enough."""
        self.made = 0
        """Environments made so far."""
        self.closed = 0
        """Environments closed so far. `made - closed` environments are still in use, or leaked."""
        self.playing = 0
        """Live episodes: neither ended nor broken off. One that its player left is broken off by
        the next reset.
        """
        self.hanging = 0
        """Steps that hang now."""
        self.episodes = 0
        """Episodes that ended as planned."""
        self.troubles: dict[Trouble, int] = dict.fromkeys(
            ("hung", "crash", "fail_slow", "slow_drip"), 0
        )
        """Number of attempts that each trouble has hit."""

    def __call__(self) -> "SimulatedEnv":
        """A new environment."""
        self.made += 1
        return SimulatedEnv(self)

    def begin(self, task_seed: int) -> "Attempt":
        """Start an episode of the task: one that was broken off, or else the next member's."""
        members = self._tasks.get(task_seed)
        if members is None:
            members = self._tasks[task_seed] = _Members()
            if len(self._tasks) > _TASKS:
                self._tasks.popitem(last=False)
        if members.again:
            member, attempt = members.again.pop(0)
        else:
            member, attempt = members.next, 0
            members.next += 1
        self.playing += 1
        return self._draw_attempt(task_seed, member, attempt)

    def end(self, attempt: "Attempt", *, whole: bool) -> None:
        """Note that an episode ended as planned (`whole`), or was broken off."""
        self.playing -= 1
        if whole:
            self.episodes += 1
        elif (members := self._tasks.get(attempt.task_seed)) is not None:
            members.again.append((attempt.member, attempt.number + 1))

    def _draw_plan(self, task_seed: int, member: int) -> EpisodePlan:
        config = self._config
        rng = Random(derive_seed(self._seed, task_seed, member))
        turns = max(1, round(config.turns.sample(rng)))
        reset_seconds = config.reset_seconds.sample(rng)
        sample = config.step_seconds.sample
        step_seconds = tuple(sample(rng) for _ in range(turns))
        if config.hopeless or config.trivial:
            # The generator of the task, so that all of its members are of one kind.
            kind = Random(derive_seed(self._seed, task_seed)).random()
            if kind < config.hopeless + config.trivial:
                return EpisodePlan(reset_seconds, step_seconds, float(kind >= config.hopeless))
        return EpisodePlan(reset_seconds, step_seconds, float(rng.random() < config.solve_rate))

    def _draw_attempt(self, task_seed: int, member: int, number: int) -> "Attempt":
        """The member's plan with the trouble of this attempt, if any."""
        config = self._config
        plan = self._plan_of(task_seed, member)
        if not self._troubled:
            return Attempt(task_seed, member, number, plan)
        shares: tuple[tuple[Trouble, float], ...] = (
            ("hung", config.hung),
            ("crash", config.crash),
            ("fail_slow", config.fail_slow),
            ("slow_drip", config.slow_drip),
        )
        rng = Random(derive_seed(self._seed, task_seed, member, "trouble", number))
        # One draw from [0, 1), which the shares divide from 0 on: at most one trouble happens.
        drawn = rng.random()
        for trouble, share in shares:
            if drawn < share:
                self.troubles[trouble] += 1
                return Attempt(
                    task_seed, member, number, plan, trouble, rng.randrange(len(plan.step_seconds))
                )
            drawn -= share
        return Attempt(task_seed, member, number, plan)

    def begin_if_reachable(self) -> float:
        """The present time, of the virtual clock; 0 where there are no outages, and a loop is not
        needed.

        Raises:
            OutageError: the server of the environments does not answer.
        """
        if not self._config.outages:
            return 0.0
        self.check_reachable(now())
        return now()

    def check_reachable(self, began: float) -> None:
        """Check that the server of the environments answers, and still has an episode that began at
        `began`.

        Raises:
            OutageError: it does not answer.
            SimulatedCrashError: it has lost the episode.
        """
        for outage in self._config.outages:
            if outage.hits(began, now()):
                if now() < outage.at + outage.seconds:
                    raise OutageError("the simulated server cannot be reached")
                raise SimulatedCrashError("the simulated server has lost the episode")

    async def take(self, seconds: float) -> None:
        """Let a reset or a step take so long, on a core if they are counted."""
        if self.cores is None:
            await asyncio.sleep(seconds)
        else:
            await self.cores.compute(seconds)

    def seconds(self, attempt: "Attempt", turn: int) -> float:
        """Seconds that a step takes, including its trouble."""
        seconds = attempt.plan.step_seconds[turn]
        if attempt.trouble == "slow_drip":
            return seconds * self._config.slow_drip_factor
        if attempt.trouble == "fail_slow" and turn == attempt.trouble_turn:
            return seconds + self._config.fail_slow_seconds
        return seconds


@dataclass(frozen=True, slots=True)
class Attempt:
    """A live episode: its task and member, its plan, and what goes wrong at which turn."""

    task_seed: int
    member: int
    number: int
    plan: EpisodePlan
    trouble: Trouble = "none"
    trouble_turn: int = 0


class SimulatedCrashError(Exception):
    """Raised by a crashing environment."""


class SimulatedEnv:
    """An `Env` made by `SimulatedEnvs`. A call that takes no time answers at once: no coroutine, no
    timer.
    """

    isolation = "inline"

    def __init__(self, envs: SimulatedEnvs) -> None:
        self._envs = envs
        self._attempt: Attempt | None = None
        self._turn = 0
        self._began = 0.0
        self._closed = False

    def reset(
        self, *, seed: int, options: Mapping[str, Any]
    ) -> ResetResult | Awaitable[ResetResult]:
        """Begin the task's next episode."""
        self._break_off()
        self._began = self._envs.begin_if_reachable()
        self._attempt = self._envs.begin(seed)
        self._turn = 0
        seconds = self._attempt.plan.reset_seconds
        return self._slow_reset(seconds) if seconds > 0 else ("go", {})

    def step(self, action: str) -> StepResult | Awaitable[StepResult]:
        """Take the planned time."""
        attempt = self._attempt
        if attempt is None:
            raise RuntimeError("the episode is over, or never began: call reset first")
        self._envs.check_reachable(self._began)
        if attempt.trouble == "hung" and self._turn == attempt.trouble_turn:
            return self._hang()
        seconds = self._envs.seconds(attempt, self._turn)
        return self._slow_step(attempt, seconds) if seconds > 0 else self._take_turn(attempt)

    def close(self) -> None:
        """Break off the episode, if one is live."""
        self._break_off()
        if not self._closed:
            self._closed = True
            self._envs.closed += 1

    async def _slow_reset(self, seconds: float) -> ResetResult:
        await self._envs.take(seconds)
        return "go", {}

    async def _slow_step(self, attempt: Attempt, seconds: float) -> StepResult:
        await self._envs.take(seconds)
        return self._take_turn(attempt)

    def _take_turn(self, attempt: Attempt) -> StepResult:
        if attempt.trouble == "crash" and self._turn == attempt.trouble_turn:
            raise SimulatedCrashError(f"step {self._turn} crashed, as drawn")
        self._turn += 1
        if self._turn < len(attempt.plan.step_seconds):
            return "go on", 0.0, False, False, {}
        self._attempt = None
        self._envs.end(attempt, whole=True)
        return "over", attempt.plan.reward, True, False, {"success": attempt.plan.reward > 0}

    def _break_off(self) -> None:
        if self._attempt is not None:
            self._envs.end(self._attempt, whole=False)
            self._attempt = None

    async def _hang(self) -> StepResult:
        self._envs.hanging += 1
        try:
            never: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
            return await never
        finally:
            self._envs.hanging -= 1


__all__ = [
    "Attempt",
    "EpisodePlan",
    "EpisodePlanOf",
    "SimulatedCrashError",
    "SimulatedEnv",
    "SimulatedEnvs",
    "SimulatedOutage",
    "Trouble",
]
