"""The CPU time that episodes cost the controller and the rollout workers of a simulated run.

The controller and each rollout worker are one event loop, so one core each: a turn that is ready
waits until what came before it has been computed.

    controller   begin an episode ─▶                     ─▶ take its trajectories, score, record
    a player     ─────▶ turn ─▶ engine ─▶ environment ─▶ turn ...

The player is the controller itself, or the worker with the fewest episodes (`rollout.workers`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.hosting.live_env import LiveEnv
from agentrl.protocols import Prompt
from agentrl.rollout.assignment import Assignment, Report, ignore_reports
from agentrl.rollout.episode import Policy
from agentrl.rollout.runner import Episode, EpisodeRunner
from agentrl.simulate.config import SimulatedCpuConfig
from agentrl.simulate.cores import Cores
from agentrl.trajectory import Completion, Trajectory


@dataclass(frozen=True, slots=True)
class PolicyOnCore:
    """A `Policy` whose turns cost CPU time of the process that plays."""

    policy: Policy
    core: Cores
    seconds: float

    @property
    def max_context(self) -> int:
        """That of the policy."""
        return self.policy.max_context

    async def answer(self, episode: Episode, turn: int, prompt: Prompt, env: LiveEnv) -> Completion:
        """Render and tokenise, and answer."""
        await self.core.compute(self.seconds)
        return await self.policy.answer(episode, turn, prompt, env)


@dataclass(eq=False, slots=True)
class _Player:
    """A process that plays, and how many episodes."""

    runner: EpisodeRunner
    live: int = 0


class RunnerOnCores:
    """An `EpisodeRunner` whose episodes cost CPU time of the controller and of those that play.

    `make_runner` makes the runner of a process by its core. `workers`: rollout workers; with none,
    the controller plays.
    """

    def __init__(
        self,
        cpu: SimulatedCpuConfig,
        workers: int,
        controller: Cores,
        make_runner: Callable[[Cores], EpisodeRunner],
    ) -> None:
        self._cpu = cpu
        self._has_workers = workers > 0
        self._controller = controller
        self.cores = [Cores(1) for _ in range(workers)]
        """Those of the workers."""
        self._players = [_Player(make_runner(core)) for core in self.cores or [controller]]

    async def play(
        self, assignment: Assignment, report: Report = ignore_reports
    ) -> Sequence[Trajectory]:
        """Play an episode, and compute what it costs."""
        await self._controller.compute(self._cpu.controller_episode_seconds / 2)
        player = min(self._players, key=lambda player: player.live)
        player.live += 1
        try:
            played = await player.runner.play(assignment, report)
        finally:
            player.live -= 1
        seconds = self._cpu.controller_episode_seconds / 2
        if self._has_workers:
            turns = sum(len(trajectory.turns) for trajectory in played)
            seconds += turns * self._cpu.controller_turn_seconds
        await self._controller.compute(seconds)
        return played


__all__ = ["PolicyOnCore", "RunnerOnCores"]
