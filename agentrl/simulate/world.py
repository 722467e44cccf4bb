"""`simulate`: the production scheduler on latency models, under the virtual clock.

Everything between the trainer and the engine is the production code: `Rollouts`, the staleness
rule, the router, the episode, the deadlines, the retries, the ledger. Only the ends are models: an
engine and environments that take time but compute nothing, and a trainer that sleeps.
"""

import asyncio
import gc
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from agentrl.engines.router import Router
from agentrl.flow import EventLog, Flow, now, run_virtual, span
from agentrl.hosting.pool import EnvPool
from agentrl.ledger.ledger import Fates, Ledger
from agentrl.placement.time_share import DeviceSharing, NoSharing, Sleeper, Tenant, TimeSharing
from agentrl.plugins import NoSettings
from agentrl.protocols import Reward, TaskSource
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.engine_policy import EnginePolicy
from agentrl.rollout.episode import EnvEpisodeRunner, Policy
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.scheduler import Rollouts
from agentrl.rollout.seeds import derive_seed
from agentrl.settings.sampling import SamplingParams
from agentrl.simulate.config import SimulatedCpuConfig, SimulationConfig
from agentrl.simulate.cores import Cores
from agentrl.simulate.cpu_time import PolicyOnCore, RunnerOnCores
from agentrl.simulate.engine import LengthOf, SimulatedEngine
from agentrl.simulate.env import EpisodePlanOf, SimulatedEnvs
from agentrl.simulate.episode import SpanEpisodeRunner
from agentrl.simulate.renderer import SimulatedRenderer
from agentrl.tasks.seeded import SeededTasks
from agentrl.trajectory import Group, Score, Trajectory
from agentrl.weights.config import WeightUpdate

_MAX_TIMELINE_POINTS = 128
"""Most points of the timeline; when it is full, every other point is dropped."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A point of the timeline: live episodes, running and waiting requests, and whether the trainer
    is busy.
    """

    second: float
    live: int
    running: int
    waiting: int
    training: bool


@dataclass(slots=True)
class Report:
    """The results of a simulation. Seconds are virtual, except `cpu_seconds`, the CPU time that it
    took to simulate.
    """

    steps: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    train_seconds: float = 0.0
    blocked_seconds: float = 0.0
    slot_utilisation: float = 0.0
    episodes: int = 0
    tokens: int = 0
    staleness_groups: Counter[int] = field(default_factory=Counter)
    staleness_tokens: Counter[int] = field(default_factory=Counter)
    metrics: dict[str, float] = field(default_factory=dict)
    task_fates: Fates = field(default_factory=lambda: Fates(0, 0, 0, 0, 0, 0, 0, 0))
    episode_fates: Fates = field(default_factory=lambda: Fates(0, 0, 0, 0, 0, 0, 0, 0))
    events: int = 0
    event_hash: str = ""
    leaked_envs: int = 0
    leaked_requests: int = 0
    leaked_slots: int = 0
    timeline: list[Moment] = field(default_factory=list)
    controller_load: float = 0.0
    """Share of the time in which the controller computed (`simulation.cpu`)."""
    worker_load: float = 0.0
    """The same of the rollout workers, on average."""
    env_core_load: float = 0.0
    """The same of the environments' cores (`simulation.env.cores`)."""

    @property
    def largest_staleness(self) -> int:
        """Versions between the oldest token that was trained on and the weights it trained."""
        return max(self.staleness_groups, default=0)


@dataclass(frozen=True, slots=True)
class ReturnReward:
    """The reward of a simulation: the environment's return."""

    async def score(self, trajectory: Trajectory) -> Score:
        """The sum of the rewards of all turns."""
        return Score(trajectory.env_return)


@dataclass(frozen=True, slots=True)
class World:
    """One simulation to run. `plan_of` and `length_of` replace the draws from the settings."""

    rollout: RolloutConfig
    simulation: SimulationConfig
    steps: int
    seed: int = 0
    reward: Reward = field(default_factory=ReturnReward)
    tasks: TaskSource | None = None
    plan_of: EpisodePlanOf | None = None
    length_of: LengthOf | None = None
    ledger: Path | str = ":memory:"
    weight_update: WeightUpdate = "keep"
    goes_on: bool = False
    """Stop after the last step as if more followed: live groups remain, and their fates stay open.
    """

    def run(
        self, on: Callable[[Callable[[], Coroutine[Any, Any, Report]]], Report] = run_virtual
    ) -> Report:
        """Run the simulation to its end. `on` runs it: under the virtual clock, or for as long as
        it really takes.
        """
        started = time.process_time()
        with _less_garbage_collection():
            report = on(self._main)
        report.cpu_seconds = time.process_time() - started
        return report

    async def _main(self) -> Report:
        simulation, report, events = self.simulation, Report(steps=self.steps), EventLog()
        served = simulation.engine.model_copy(
            update={"kv_max_staleness": self.rollout.max_staleness}
        )
        engines = [SimulatedEngine(served, self.length_of) for _ in range(simulation.engines)]
        envs = SimulatedEnvs(simulation.env, self.seed, self.plan_of)
        host = EnvPool({"simulated": envs}, self.rollout.deadlines)
        controller = Cores(1)
        with Ledger(self.ledger) as ledger:
            async with Router(engines, update=self.weight_update) as router:
                runner, workers = self._runner(router, host, controller)
                rollouts = self._rollouts(router, runner, ledger, events)
                async with rollouts, _record_timeline(report, rollouts, router):
                    sharing = self._device_sharing(router)
                    await self._train(report, rollouts, router, sharing, controller)
                    report.metrics = rollouts.metrics()
                stats = router.stats()
                report.leaked_requests = stats.running + stats.waiting
                report.leaked_slots = int(rollouts.metrics()["live_episodes"])
                report.tokens = stats.generated_tokens
                slots = simulation.engine.slots * simulation.engines
                report.slot_utilisation = sum(engine.slot_seconds for engine in engines) / (
                    slots * now()
                )
            await host.close()
            report.seconds = now()
            report.controller_load = controller.load()
            report.worker_load = fmean(core.load() for core in workers) if workers else 0.0
            report.env_core_load = envs.cores.load() if envs.cores else 0.0
            report.leaked_envs = envs.made - envs.closed
            report.task_fates, report.episode_fates = ledger.task_fates(), ledger.episode_fates()
            report.episodes = report.episode_fates.total
        report.events, report.event_hash = events.count, events.digest()
        report.blocked_seconds = report.metrics["blocked_seconds"]
        return report

    def _runner(
        self, router: Router, host: EnvPool, controller: Cores
    ) -> tuple[EpisodeRunner, list[Cores]]:
        """The runner of the episodes, and the cores of the rollout workers."""
        cpu, workers = self.simulation.cpu, self.rollout.worker_range
        if cpu == SimulatedCpuConfig():
            return self._runner_on(None, router, host), []
        runner = RunnerOnCores(
            cpu,
            workers.max if workers else 0,
            controller,
            lambda core: self._runner_on(core, router, host),
        )
        return runner, runner.cores

    def _runner_on(self, core: Cores | None, router: Router, host: EnvPool) -> EpisodeRunner:
        """The runner in a process with this core; without one, turns cost no CPU time."""
        simulation, config = self.simulation, self.rollout
        if simulation.episode_seconds is not None:
            return SpanEpisodeRunner.drawing(
                simulation.episode_seconds,
                self.seed,
                lambda: router.policy_version,
                config.deadlines.episode,
            )
        renderer = SimulatedRenderer(simulation.prompt_tokens, simulation.observation_tokens)
        params = SamplingParams(
            max_tokens=config.sampling.max_tokens,
            temperature=config.sampling.temperature,
            stop_token_ids=renderer.stop_token_ids,
        )
        policy: Policy = EnginePolicy(
            router,
            params,
            config.deadlines.generate,
            seconds_per_context_token=config.deadlines.seconds_per_context_token,
        )
        if core is not None:
            policy = PolicyOnCore(policy, core, simulation.cpu.turn_seconds)
        return EnvEpisodeRunner(policy, renderer, host, config.budget, config.deadlines.episode)

    def _rollouts(
        self, router: Router, runner: EpisodeRunner, ledger: Ledger, events: EventLog
    ) -> Rollouts:
        simulation, config = self.simulation, self.rollout
        steps = self.steps + (config.max_staleness + 1 if self.goes_on else 0)
        return Rollouts(
            config,
            tasks=self.tasks or SeededTasks(NoSettings(), "simulated", self.seed),
            runner=runner,
            reward=self.reward,
            engine=router,
            rescue=router.evict_unresponsive,
            ledger=ledger,
            seed=self.seed,
            groups=steps * config.groups_per_step,
            events=events,
            places=lambda: router.worker_count().alive * simulation.engine.slots,
        )

    def _device_sharing(self, router: Router) -> DeviceSharing:
        if not self.simulation.time_shared:
            return NoSharing()
        seconds = self.simulation.switch_seconds
        # Each way takes half of the time of a step's switches.
        move = partial(asyncio.sleep, seconds / 2, None)
        return TimeSharing(
            Tenant("engine", [Sleeper.of_engine(router)], 0),
            Tenant("trainer", [Sleeper(sleep=move, wake=move)], 0),
            _free,
            2 * seconds + 60,
        )

    async def _train(
        self,
        report: Report,
        rollouts: Rollouts,
        router: Router,
        sharing: DeviceSharing,
        controller: Cores,
    ) -> None:
        of_batch = self.simulation.cpu.batch_episode_seconds
        rng = Random(derive_seed(self.seed, "trainer"))
        for step in range(self.steps):
            began = now()
            groups = await rollouts.next_batch()
            _count_staleness(report, groups, step)
            episodes = sum(len(group.trajectories) for group in groups)
            await controller.compute(of_batch * episodes)
            seconds = self.simulation.train_seconds.sample(rng)
            report.train_seconds += seconds
            async with sharing.training():
                with span("trainer", "step", 0):
                    await asyncio.sleep(seconds)
                async with rollouts.new_weights(step + 1), sharing.updating():
                    with span("weights", "commit"):
                        await asyncio.sleep(self.simulation.update_seconds.sample(rng))
                        await router.update_weights({}, step + 1)
            report.step_seconds.append(now() - began)


async def _free() -> int:
    """A simulated device is never full: layouts that do not fit were rejected before."""
    return 0


def _count_staleness(report: Report, groups: list[Group], step: int) -> None:
    for group in groups:
        turns = (turn for trajectory in group.trajectories for turn in trajectory.new_turns)
        versions = Counter(
            chain.from_iterable(turn.completion.policy_versions.tolist() for turn in turns)
        )
        report.staleness_groups[step - min(versions, default=step)] += 1
        for version, tokens in versions.items():
            report.staleness_tokens[step - version] += tokens


@contextmanager
def _less_garbage_collection() -> Iterator[None]:
    """Collect garbage less often: here are few cycles and many objects, and the default costs a
    fifth of the time.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(50_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


@asynccontextmanager
async def _record_timeline(
    report: Report, rollouts: Rollouts, router: Router
) -> AsyncIterator[None]:
    """Record the timeline while the block runs, at ever longer intervals."""

    async def sample() -> None:
        interval = 1.0
        while True:
            stats, metrics = router.stats(), rollouts.metrics()
            training = not rollouts.blocked
            report.timeline.append(
                Moment(now(), int(metrics["live_episodes"]), stats.running, stats.waiting, training)
            )
            if len(report.timeline) == _MAX_TIMELINE_POINTS:
                # Half as many points, twice as far apart: memory is bounded, and they stay even.
                del report.timeline[1::2]
                interval *= 2
            await asyncio.sleep(interval)

    async with Flow("timeline") as flow:
        flow.start(sample(), name="sampler")
        try:
            yield
        finally:
            flow.cancel()
