"""A training run as a whole: `assemble_training`."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from agentrl.assembly.devices import device_sharing, open_cluster
from agentrl.assembly.engines import (
    asked_teacher,
    evaluation_engine,
    opponent_engines,
    places_of,
    teacher_served,
)
from agentrl.assembly.exact_metrics import ExactMetrics
from agentrl.assembly.placed import PlacedCluster
from agentrl.assembly.players import engine_policy
from agentrl.assembly.rollouts import RolloutAssembly, rollouts_on
from agentrl.assembly.scaling import EngineScaling
from agentrl.assembly.trainers import make_advisors, make_trainer
from agentrl.config.compatibility import check_stage
from agentrl.config.run_config import RunConfig
from agentrl.engines.router import Router
from agentrl.errors import ConfigError
from agentrl.estimation.advisors import ON_NEWEST, Advisors, CriticTraining
from agentrl.estimation.teacher import TeacherConfig
from agentrl.flow import freeze_gc
from agentrl.gateway.episode import AgentEpisodeRunner
from agentrl.placement.time_share import DeviceSharing
from agentrl.planner.run_facts import sent_weights
from agentrl.protocols import (
    Algorithm,
    Curriculum,
    LatestCheckpoint,
    Trainer,
)
from agentrl.rollout.disagreement import Disagreement
from agentrl.rollout.episode import Role
from agentrl.rollout.mixture import Mixture
from agentrl.rollout.opponents import Matches, Opponent, SelfPlay
from agentrl.rollout.scheduler import Rollouts
from agentrl.runs.checkpoint import Checkpoints
from agentrl.runs.old_state import state_in_metrics
from agentrl.runs.run import Run
from agentrl.runs.state import RunState, read_state, write_state
from agentrl.runs.task_sources import task_source
from agentrl.trajectory import Group
from agentrl.weights.config import WeightsConfig
from agentrl.weights.publisher import WeightPublisher
from agentrl.weights.snapshots import Snapshots
from agentrl.weights.transport import Transport
from agentrl.weights.transports.choice import auto


@dataclass(frozen=True, slots=True)
class TrainingAssembly(RolloutAssembly):
    """All parts of a training run: those of `RolloutAssembly`, the trainers, and the publisher of
    the weights.
    """

    trainer: Trainer
    advisors: Advisors
    exact: ExactMetrics
    weights: WeightPublisher
    sharing: DeviceSharing
    scaling: EngineScaling
    self_play: SelfPlay | None = None
    evaluation_engine: Router | None = None
    """Engine for evaluations beside training, if the evaluation has engines of its own."""
    state: RunState = field(default_factory=RunState)
    """The state of the other parts, kept in each checkpoint."""

    async def save(self, folder: Path) -> None:
        """Save all parts into a checkpoint."""
        await self.begin_save(folder)
        await self.saved()

    async def begin_save(self, folder: Path) -> None:
        """Copy the state of all parts, and begin to write it into a checkpoint."""
        state = self.state.snapshot()  # first of all, so that it is of these steps alone
        await self.trainer.begin_save(folder)
        await self.advisors.begin_save(folder)
        await asyncio.to_thread(write_state, folder, state)

    async def saved(self) -> None:
        """Wait until what `begin_save` began is written."""
        await self.trainer.saved()
        await self.advisors.saved()

    async def resume(self, run: Run) -> int:
        """Load a resumed run's newest checkpoint, if any, publish its weights, and return the
        number of steps done.
        """
        newest = run.checkpoints.latest() if run.resumed else None
        if newest is not None:
            states = read_state(newest[1])
            if states is None:  # a checkpoint of an earlier version
                states = state_in_metrics(run.metrics.rows(), newest[0])
            self.state.load(states)
        if self.self_play is not None:
            # Before the weights are published, as that draws the first opponents by these results.
            self.state.add("opponents", self.self_play)
            await self.self_play.begin(newest[0] if newest else 0)
        if newest is None:
            return 0
        step, folder = newest
        await self.trainer.load(folder)
        await self.advisors.load(folder)
        if step > 0:
            async with self.sharing.updating():
                await self.weights.publish(self.trainer, version=step)
        return step

    def changing_engines(self, run: Run) -> AbstractAsyncContextManager[None]:
        """While the block lasts, `agentrl engines` adds engines to the run, and removes them."""
        return self.scaling.handling_requests(run, self.engine)

    def rollouts(self, run: Run, step: int, teaches: Callable[[Group], bool]) -> Rollouts:
        """A scheduler for the steps from `step` on, of a run whose metrics have been rewound to it.

        Tasks that an earlier launch left open come first. `teaches`: whether anything can be
        learned from a group.
        """
        run.display.resume(step, (row["reward"] for row in run.metrics.rows() if "reward" in row))
        pending = run.open_tasks(step)
        tasks, gives_up = task_source(self.config, "train"), self.config.env.exhausted == "others"
        if isinstance(tasks, Mixture):
            tasks.replay(run.ledger.fates_by_env(), gives_up=gives_up)
            self.state.add("tasks", tasks)
        if isinstance(tasks, Curriculum):
            for number, task, rewards_G in run.ledger.outcomes(before=step):
                tasks.observe(number, task, rewards_G)
        disagreement, branches = None, self.config.rollout.branches
        if branches is not None and branches.at == "disagreement":
            disagreement = self.state.add("disagreement", Disagreement())
        rollouts = Rollouts(
            self.config.rollout,
            tasks=tasks,
            runner=self.self_play or self.runner,
            reward=self.reward,
            engine=self.engine,
            rescue=self.engine.evict_unresponsive,
            ledger=run.ledger,
            seed=self.config.seed,
            groups=(self.config.steps - step) * self.config.rollout.groups_per_step,
            version=step,
            pending=pending,
            next_number=run.ledger.next_number(),
            gives_up=gives_up,
            keep_untrained=self.config.observe.untrained_episodes,
            teaches=teaches,
            places=lambda: places_of(self.config, self.engine.worker_count().alive),
            tokens=self.tokens,
            disagreement=disagreement,
            filtered=run.ledger.filtered_since(step),
        )
        run.status.watch(rollouts.status)
        return rollouts


@asynccontextmanager
async def assemble_training(
    config: RunConfig,
    algorithm: Algorithm,
    model: Path,
    latest: LatestCheckpoint = lambda: None,
    teacher: TeacherConfig | None = None,
    *,
    matches: Matches | None = None,
    updates: int | None = None,
    training: CriticTraining = ON_NEWEST,
) -> AsyncIterator[TrainingAssembly]:
    """`assemble_rollouts`, plus a trainer that starts from the same model, and a teacher if the run
    has one. If a rank dies, its trainer restarts from the checkpoint that `latest` returns, with
    the number of updates made until then. `updates`: most updates of the whole run, by default one
    for each step; the learning rate's schedule ends there. With `matches`, the policy plays against
    itself and earlier versions.

    Raises:
        ConfigError: the engine cannot take new weights, or something does not fit the devices.
    """
    check_stage(config, "training")
    async with (
        open_cluster(config, config.run_dir / "logs") as placed,
        EngineScaling(placed, model) as scaling,
        rollouts_on(placed, model) as rollouts,
        teacher_served(placed, model, teacher, rollouts.engine.max_context) as served,
        opponent_engines(placed, model, matches) as opponents,
        evaluation_engine(placed, model) as evaluating,
    ):
        trainer = make_trainer(placed, model, latest, steps=updates)
        advisors = make_advisors(placed, algorithm, model, latest, training)
        others = [(engine, route.refresh) for route, engine in rollouts.frozen.items()]
        if teacher is not None and served is not None:
            others.append((served, teacher.refresh))
            advisors = replace(advisors, teacher=asked_teacher(config, teacher, served))
        self_play = _self_play(rollouts, opponents, model, matches) if matches else None
        trainers = [trainer, *advisors.all]
        engines = [rollouts.engine, *(engine for engine, _ in others), *opponents]
        weights = sent_weights(config).config.for_model(model)
        weights = weights.over_machines(placed.cluster.spans_machines)
        async with device_sharing(placed, engines, trainers) as sharing:
            followers = tuple((engine, refresh) for engine, refresh in others if refresh)
            listener = self_play.take_version if self_play else None
            async with WeightPublisher(
                rollouts.engine,
                followers,
                weights,
                listener,
                _transport(placed, weights) if weights.transport == "auto" else None,
            ) as publisher:
                freeze_gc()
                yield TrainingAssembly(
                    config,
                    rollouts.model,
                    rollouts.engine,
                    rollouts.runner,
                    rollouts.reward,
                    rollouts.frozen,
                    rollouts.tokens,
                    trainer,
                    advisors,
                    ExactMetrics.of_run(config, rollouts.runner.renderer, trainer, advisors.critic),
                    publisher,
                    sharing,
                    scaling,
                    self_play,
                    evaluating,
                )


def _transport(placed: PlacedCluster, weights: WeightsConfig) -> Transport:
    """The transport that `weights.transport=auto` stands for."""
    devices = None if placed.plan is None else placed.plan.devices
    return auto(weights, sent_weights(placed.config).placed(devices))


def _self_play(
    rollouts: RolloutAssembly, engines: Sequence[Router], model: Path, matches: Matches
) -> SelfPlay:
    config, runner, rules = rollouts.config, rollouts.runner, matches.config
    if isinstance(runner, AgentEpisodeRunner):
        raise ConfigError(
            f"recipe=self_play needs an environment of several agents, and {config.env.name} is a"
            " program"
        )
    snapshots = Snapshots(config.run_dir.absolute() / "opponents", rules.every, rules.pool)
    opponents = []
    for engine in engines:
        sampling = config.rollout.sampling
        served = engine_policy(
            config, engine, model, runner.renderer, sampling, trained=False, apart=True
        )
        role = Role(served, runner.renderer, config.rollout.context, trained=False)
        opponents.append(Opponent(role, engine, snapshots, config.weights.for_model(model).seconds))
    resumable = Checkpoints(config.run_dir / "checkpoints").all
    return SelfPlay(matches, config.seed, runner, opponents, snapshots, model, resumable)
