"""Assembles the parts of a run from its config: cluster, environments, engine, reward, trainer.

    assemble_rollouts: cluster ─▶ environments, engine, reward ─▶ RolloutAssembly     (to evaluate)
    assemble_training: the same, plus a trainer and a publisher of its weights ─▶ TrainingAssembly

The parts are started here and stopped in reverse order.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from agentrl import plugins
from agentrl.advisors import CRITIC_FOLDER, ON_NEWEST, Advisors, CriticTraining
from agentrl.checkpoint import Checkpoints, begin_save, saved
from agentrl.cluster.workers import Cluster, own_address
from agentrl.config import RunConfig, component_like
from agentrl.engines.router import Router
from agentrl.errors import ConfigError
from agentrl.exact_metrics import ExactMetrics
from agentrl.flow import spare_what_lives
from agentrl.gateway.address import SCHEME as AGENT_SCHEME
from agentrl.gateway.address import scheme as agent_scheme
from agentrl.gateway.containment import check_containment
from agentrl.gateway.desk import Desk
from agentrl.gateway.episode import AgentEpisodeRunner
from agentrl.gateway.remote_agents import RemoteAgents
from agentrl.gateway.server import serving
from agentrl.hosting.factory import env_factory
from agentrl.hosting.host import EnvHost
from agentrl.hosting.wrappers import address
from agentrl.placement.device_map import DeviceMap
from agentrl.placement.time_share import DeviceSharing, NoSharing, SleepingTrainer, Tenant, TimeSharing
from agentrl.planner.plan import Plan, make_plan
from agentrl.planner.run_facts import model_of
from agentrl.plugins import Component
from agentrl.protocols import (
    Algorithm,
    Curriculum,
    Engine,
    LatestCheckpoint,
    Recovery,
    Renderer,
    SamplingParams,
    SupportsPredict,
    SupportsScore,
    Trainer,
)
from agentrl.remote.env_worker import EnvWorker, env_workers
from agentrl.remote.sessions import ServerLimits
from agentrl.rollout.agents import FrozenRoute, ScriptedRoute
from agentrl.rollout.episode import EnginePolicy, EnvEpisodeRunner, Role, ScriptedPolicy
from agentrl.rollout.model_tokenizer import check_same_tokens
from agentrl.rollout.opponents import Matches, Opponent, SelfPlay
from agentrl.rollout.renderer import RendererConfig, TemplateRenderer, renderer_of
from agentrl.rollout.scheduler import Rollouts
from agentrl.run import Run
from agentrl.scoring.config import name_of
from agentrl.scoring.pipeline import RewardPipeline
from agentrl.scoring.rule_pool import RulePool
from agentrl.scoring.rule_workers import RuleWorkers
from agentrl.task_sources import task_source
from agentrl.tasks.mixture import Mixture
from agentrl.tasks.suites import EvaluationSampling
from agentrl.teacher import Teacher, TeacherConfig
from agentrl.weights.publisher import TakesWeights, WeightPublisher
from agentrl.weights.snapshots import Snapshots

TrainerRole = Literal["trainer", "reference", "critic"]
_ROLE_SETTINGS: Mapping[str, Mapping[str, str]] = {
    "reference": {"role": "reference"},
    "critic": {"role": "critic", "head": "value"},
}
"""Extra arguments for making a reference or a critic."""


@dataclass(frozen=True, slots=True)
class RolloutAssembly:
    """The parts that play and score episodes: the policy's engine, the episode runner, the reward, and the engines of
    frozen agents.
    """

    config: RunConfig
    engine: Router
    runner: EnvEpisodeRunner | AgentEpisodeRunner
    reward: RewardPipeline
    frozen: Mapping[FrozenRoute, Router]

    def evaluating(self, how: EvaluationSampling) -> EnvEpisodeRunner | AgentEpisodeRunner:
        """The same runner, sampling as an evaluation does."""
        sampling = how.sampling(self.config.rollout.sampling)
        policy = _policy(self.config, self.engine, self.runner.renderer, sampling, trained=False)
        return replace(self.runner, policy=policy)


@dataclass(frozen=True, slots=True)
class TrainingAssembly(RolloutAssembly):
    """All parts of a training run: those of `RolloutAssembly`, the trainers, and the publisher of the weights."""

    trainer: Trainer
    advisors: Advisors
    exact: ExactMetrics
    weights: WeightPublisher
    sharing: DeviceSharing
    self_play: SelfPlay | None = None
    evaluation_engine: Router | None = None
    """What evaluates beside training, if the evaluation has engines of its own."""

    async def save(self, folder: Path) -> None:
        """Save the trainer and the critic into a checkpoint."""
        await self.begin_save(folder)
        await self.saved()

    async def begin_save(self, folder: Path) -> None:
        """Copy the state of the trainer and the critic, and begin to write it into a checkpoint."""
        await begin_save(self.trainer, folder)
        await self.advisors.begin_save(folder)

    async def saved(self) -> None:
        """Wait until what `begin_save` began is written."""
        await saved(self.trainer)
        await self.advisors.saved()

    async def resume(self, run: Run) -> int:
        """Load a resumed run's newest checkpoint, if any, publish its weights, and return the number of steps done."""
        newest = run.checkpoints.latest() if run.resumed else None
        if self.self_play is not None:
            await self.self_play.restore(newest[0] if newest else 0, run.metrics.rows())
        if newest is None:
            return 0
        step, folder = newest
        await self.trainer.load(folder)
        await self.advisors.load(folder)
        if step > 0:
            await self.weights.publish(self.trainer, version=step)
        return step

    def rollouts(self, run: Run, step: int) -> Rollouts:
        """A scheduler for the steps from `step` on. Tasks that an earlier launch left open come first."""
        run.metrics.rewind(step)
        run.display.resume(step, (row["reward"] for row in run.metrics.rows() if "reward" in row))
        pending = run.ledger.rewind(step)
        tasks, gives_up = task_source(self.config, "train"), self.config.env.exhausted == "others"
        if isinstance(tasks, Mixture):
            tasks.restore(run.ledger.fates_by_env(), run.metrics.rows(), gives_up=gives_up)
        if isinstance(tasks, Curriculum):
            for number, task, rewards_G in run.ledger.outcomes():
                tasks.observe(number, task, rewards_G)
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
        )
        run.display.watch(rollouts.underway)
        return rollouts


@dataclass(frozen=True, slots=True)
class PlacedCluster:
    """An open cluster, its placement plan if any, and the config with the settings that follow from the plan."""

    config: RunConfig
    cluster: Cluster
    plan: Plan | None = None


@asynccontextmanager
async def assemble_rollouts(config: RunConfig, model: Path) -> AsyncIterator[RolloutAssembly]:
    """Start an engine that serves `model`, the environments and the reward."""
    async with open_cluster(config) as placed, _rollouts_on(placed, model) as rollouts:
        spare_what_lives()
        yield rollouts


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
    """`assemble_rollouts`, plus a trainer that starts from the same model, and a teacher if the run has one. If a rank
    dies, its trainer restarts from the checkpoint that `latest` returns, with the number of updates made until then.
    `updates`: most updates of the whole run, by default one for each step; the learning rate's schedule ends there.
    With `matches`, the policy plays against itself and earlier versions.

    Raises:
        ConfigError: the engine cannot take new weights, or something does not fit the devices.
    """
    _check_takes_weights(config)
    _check_compares_routing(config)
    async with (
        open_cluster(config) as placed,
        _rollouts_on(placed, model) as rollouts,
        _teacher_on(placed, model, teacher, rollouts.engine.max_context) as served,
        _opponent_engines(placed, model, matches) as opponents,
        _evaluation_engine(placed, model) as evaluating,
    ):
        trainer = make_trainer(placed, model, latest, steps=updates)
        advisors = make_advisors(placed, algorithm, model, latest, training)
        others = [(engine, route.refresh) for route, engine in rollouts.frozen.items()]
        if teacher is not None and served is not None:
            others.append((served, teacher.refresh))
            advisors = replace(advisors, teacher=_asked(config, teacher, served))
        self_play = _self_play(rollouts, opponents, model, matches) if matches else None
        trainers, engines = [trainer, *advisors.all], [rollouts.engine, *(engine for engine, _ in others), *opponents]
        weights = config.weights.for_model(model)
        async with device_sharing(placed, engines, trainers) as sharing:
            followers: list[tuple[TakesWeights, int]] = [(engine, refresh) for engine, refresh in others if refresh]
            followers += [(self_play, 1)] if self_play else []
            async with WeightPublisher(rollouts.engine, tuple(followers), weights) as publisher:
                spare_what_lives()
                yield TrainingAssembly(
                    config,
                    rollouts.engine,
                    rollouts.runner,
                    rollouts.reward,
                    rollouts.frozen,
                    trainer,
                    advisors,
                    ExactMetrics.of_run(config, rollouts.runner.renderer, trainer, advisors.critic),
                    publisher,
                    sharing,
                    self_play,
                    evaluating,
                )


@asynccontextmanager
async def _teacher_on(
    placed: PlacedCluster, model: Path, teacher: TeacherConfig | None, longest: int
) -> AsyncIterator[Router | None]:
    """Start the engine of the teacher, if there is one. It must take sequences of `longest` tokens."""
    if teacher is None:
        yield None
        return
    config = placed.config.model_copy(update={"engine": teacher_engine(placed.config, teacher)})
    async with _router(config, placed.cluster, teacher.model or model) as served:
        if served.max_context < longest:
            raise ConfigError(
                f"the teacher's engine takes at most {served.max_context} tokens, and the policy's {longest}: write "
                f"engine.max_context={served.max_context}, or another recipe.teacher.engine.max_context"
            )
        yield served


def _asked(config: RunConfig, teacher: TeacherConfig, served: Router) -> Teacher:
    return Teacher(
        served,
        temperature=config.rollout.sampling.temperature,
        seconds=config.rollout.deadlines.score,
        concurrency=teacher.concurrency,
    )


def teacher_engine(config: RunConfig, teacher: TeacherConfig) -> Component:
    """The engine that serves the teacher.

    Raises:
        ConfigError: there is no such engine, or it cannot score the tokens that the run samples.
    """
    chosen = component_like(config.engine, "recipe.teacher.engine", "engines", teacher.engine)
    way_out = "with engine=local or engine=vllm, or train with algorithm=distill, whose teacher a trainer computes"
    if not (isinstance(chosen.factory, type) and issubclass(chosen.factory, SupportsScore)):
        raise ConfigError(
            f"recipe.teacher.engine.name: engine {chosen.name!r} has no method `score`, so it cannot say how likely "
            f"given tokens are: serve the teacher {way_out}"
        )
    temperature = config.rollout.sampling.temperature
    if getattr(chosen.factory, "scores_at_one_only", False) and temperature != 1:
        raise ConfigError(
            f"recipe.teacher.engine.name: engine {chosen.name!r} scores tokens at temperature 1 only, and "
            f"rollout.sampling.temperature is {temperature:g}: set it to 1, or serve the teacher with engine=local"
        )
    return chosen


def _check_compares_routing(config: RunConfig) -> None:
    if config.rollout.compare_routing and not getattr(config.engine.factory, "reports_experts", False):
        raise ConfigError(
            f"rollout.compare_routing: engine {config.engine.name!r} does not say which experts it chose. Leave the "
            "setting out, or write engine=local"
        )


def _check_takes_weights(config: RunConfig) -> None:
    layout = getattr(config.engine.settings, "layout", None)
    if layout is not None and not layout().here:
        raise ConfigError(
            f"engine={config.engine.name} samples from a model that is served elsewhere: it can neither take new "
            "weights nor say what truncated sampling left to sample from. Train with engine=vllm or engine=local, and "
            f"evaluate with engine={config.engine.name} (`agentrl eval`)"
        )


@asynccontextmanager
async def env_host(config: RunConfig, cluster: Cluster | None = None) -> AsyncIterator[EnvHost]:
    """Host the run's environments in this process or on workers of the cluster, and close them at the end."""
    made = {
        name: partial(env_factory, address(env.name, env.all_wrappers), env.isolation, env.python, env.requires)
        for name, env in config.envs.items()
    }
    pictures = config.observe.picture_kib > 0
    async with AsyncExitStack() as stack:
        if cluster is None or not cluster.config.env_workers:
            isolation = {name: env.isolation for name, env in config.envs.items()}
            host = EnvHost(
                {name: make() for name, make in made.items()},
                config.rollout.deadlines,
                isolation,
                pictures=pictures,
            )
        else:
            sessions = ServerLimits(max_sessions=config.rollout.max_live_episodes)
            at = own_address() if cluster.spans_machines else "127.0.0.1"
            served = {}
            for name, make in made.items():  # of a mixture, each environment has as many workers
                worker = partial(EnvWorker, make, sessions, at, pictures=pictures)
                workers = env_workers(cluster.start_one, cluster.config.env_workers, worker)
                served[name] = await stack.enter_async_context(workers)
            host = EnvHost(served, config.rollout.deadlines)
        stack.push_async_callback(host.close)
        yield host


@asynccontextmanager
async def _rollouts_on(placed: PlacedCluster, model: Path) -> AsyncIterator[RolloutAssembly]:
    config, cluster = placed.config, placed.cluster
    renderer = renderer_of(model, config.model)
    async with (
        _player(config, cluster, renderer) as player,  # first, so that its errors come before a model is loaded
        _router(config, cluster, model) as engine,
        config.reward.make(
            _rules(config, cluster),
            config.rollout.deadlines.reward,
            config.rollout.retries,
            config.rewards_by_env(),
        ) as reward,
        _frozen_engines(config, cluster, model) as frozen,
    ):
        policy = _policy(config, engine, renderer, config.rollout.sampling, trained=True)
        yield RolloutAssembly(
            config, engine, player(policy, _other_roles(config, model, renderer, frozen)), reward, frozen
        )


@asynccontextmanager
async def assemble_policy(config: RunConfig, model: Path) -> AsyncIterator[tuple[EnginePolicy, TemplateRenderer]]:
    """Start an engine that serves `model`, alone: the policy as evaluations sample it, and its renderer."""
    async with open_cluster(config) as placed:
        renderer = renderer_of(model, placed.config.model)
        async with _router(placed.config, placed.cluster, model) as engine:
            sampling = config.evaluation.sampling(config.rollout.sampling)
            yield _policy(config, engine, renderer, sampling, trained=False), renderer


@asynccontextmanager
async def _player(
    config: RunConfig, cluster: Cluster, renderer: TemplateRenderer
) -> AsyncIterator[Callable[[EnginePolicy, Mapping[str, Role]], EnvEpisodeRunner | AgentEpisodeRunner]]:
    """What makes the episodes' runner of a policy, and of the roles of the agents that it does not play."""
    rollout = config.rollout
    if config.env.is_agent:
        async with agent_player(config, renderer) as agents:
            yield lambda policy, others: agents(policy)
        return
    async with env_host(config, cluster) as envs:
        yield lambda policy, others: EnvEpisodeRunner(
            policy,
            renderer,
            envs,
            rollout.budget,
            rollout.deadlines.episode,
            rollout.context,
            others,
            config.own_budgets(),
            1024 * config.observe.picture_kib,
        )


@asynccontextmanager
async def agent_player(
    config: RunConfig, renderer: TemplateRenderer
) -> AsyncIterator[Callable[[EnginePolicy], AgentEpisodeRunner]]:
    """Serve the gateway to the run's program, and yield what makes the episodes' runner of a policy.

    Raises:
        ConfigError: there is no such program, the gateway cannot be served, or the program cannot be kept from the
            network, as `gateway.network` wants.
    """
    desk, rollout = Desk(config.gateway), config.rollout
    program = agent_scheme(config.env.name.removeprefix(AGENT_SCHEME)).program(
        desk, config.env.isolation, config.env.python, config.env.folder
    )
    rewarded = any(name_of(part) == "environment" for part in config.reward.parts)
    async with serving(desk, program if isinstance(program, RemoteAgents) else None):
        if config.gateway.network == "gateway":
            await check_containment(desk)
        yield lambda policy: AgentEpisodeRunner(
            policy,
            renderer,
            desk,
            program,
            rollout.budget,
            rollout.deadlines.episode,
            needs_reward=rewarded,
            own_budgets=config.own_budgets(),
        )


def _router(config: RunConfig, cluster: Cluster, model: Path) -> Router:
    """A router over the engine's replicas."""
    factories = cluster.engines(config.engine, model)
    return Router(
        [make() for make in factories],
        update=config.weights.update,
        factory=lambda number: factories[number](),
        lease=cluster.config.lease,
    )


def _rules(config: RunConfig, cluster: Cluster) -> RulePool:
    """The pool of processes that rules run in."""
    count = cluster.config.reward_workers
    return RuleWorkers(cluster.start_one, count, config.rollout.rules) if count else RulePool(config.rollout.rules)


@asynccontextmanager
async def _frozen_engines(
    config: RunConfig, cluster: Cluster, model: Path
) -> AsyncIterator[Mapping[FrozenRoute, Router]]:
    """Start an engine for each distinct frozen route; agents with equal routes share one."""
    engines: dict[FrozenRoute, Router] = {}
    async with AsyncExitStack() as stack:
        for route in config.env.agents.values():
            if isinstance(route, FrozenRoute) and route not in engines:
                engines[route] = await stack.enter_async_context(_router(config, cluster, route.model or model))
        yield engines


@asynccontextmanager
async def _evaluation_engine(placed: PlacedCluster, model: Path) -> AsyncIterator[Router | None]:
    """Start the engines that evaluate beside training, if there are any, as one.

    Raises:
        ConfigError: the placement has no devices for them.
    """
    config, count = placed.config, placed.config.evaluation.engines
    if not count:
        yield None
        return
    if placed.plan is not None:
        raise ConfigError(
            "evaluation.engines asks for engines of its own, and the planned placement has no devices for them: leave "
            "it out, or assign devices yourself with placement=local"
        )
    factories = [factory for _ in range(count) for factory in placed.cluster.engines(config.engine, model)]
    lease = placed.cluster.config.lease
    async with Router(
        [make() for make in factories], factory=lambda number: factories[number](), lease=lease
    ) as engine:
        yield engine


@asynccontextmanager
async def _opponent_engines(
    placed: PlacedCluster, model: Path, matches: Matches | None
) -> AsyncIterator[Sequence[Router]]:
    """Start the engines of self-play's opponents."""
    async with AsyncExitStack() as stack:
        count = matches.config.num_engines if matches else 0
        yield [await stack.enter_async_context(_router(placed.config, placed.cluster, model)) for _ in range(count)]


def _self_play(rollouts: RolloutAssembly, engines: Sequence[Router], model: Path, matches: Matches) -> SelfPlay:
    config, runner, rules = rollouts.config, rollouts.runner, matches.config
    if not isinstance(runner, EnvEpisodeRunner):
        raise ConfigError(
            f"recipe=self_play needs an environment of several agents, and {config.env.name} is a program"
        )
    snapshots = Snapshots(config.run_dir.absolute() / "opponents", rules.every, rules.pool)
    opponents = []
    for engine in engines:
        served = _policy(config, engine, runner.renderer, config.rollout.sampling, trained=False)
        role = Role(served, runner.renderer, config.rollout.context, trained=False)
        opponents.append(Opponent(role, engine, snapshots, config.weights.for_model(model).seconds))
    resumable = Checkpoints(config.run_dir / "checkpoints").all
    return SelfPlay(matches, config.seed, runner, opponents, snapshots, model, resumable)


def _other_roles(
    config: RunConfig, model: Path, renderer: TemplateRenderer, frozen: Mapping[FrozenRoute, Router]
) -> dict[str, Role]:
    """The roles of the agents that the policy does not play."""
    roles = {}
    for agent, route in config.env.agents.items():
        if isinstance(route, ScriptedRoute):
            policy = ScriptedPolicy(plugins.load("players", route.player), renderer)
            roles[agent] = Role(policy, renderer, trained=False)
        elif isinstance(route, FrozenRoute):
            own = renderer if route.model is None else renderer_of(route.model, RendererConfig())
            served = _policy(config, frozen[route], own, config.rollout.sampling, trained=False)
            roles[agent] = Role(served, own, config.rollout.context, trained=False)
    return roles


def _policy(
    config: RunConfig, engine: Engine, renderer: Renderer, sampling: SamplingParams, *, trained: bool
) -> EnginePolicy:
    stops = tuple(dict.fromkeys((*renderer.stop_token_ids, *sampling.stop_token_ids)))
    params = sampling.model_copy(update={"stop_token_ids": stops})
    return EnginePolicy(
        engine,
        params,
        config.rollout.deadlines.generate,
        trained,
        config.own_max_tokens(),
        config.rollout.compare_routing,
    )


@asynccontextmanager
async def open_cluster(config: RunConfig) -> AsyncIterator[PlacedCluster]:
    """Open the configured cluster. If it has GPUs to assign, assign them by the best device map that `placement`
    allows.

    Raises:
        ConfigError: there is no such cluster, or nothing fits on its devices.
    """
    config = _trusting(config)
    made: Cluster = config.cluster.make()
    async with made as cluster:
        inventory = None if config.placement.name == "local" else cluster.gpus()
        if inventory is None:
            yield PlacedCluster(config, cluster)
            return
        plan = await asyncio.to_thread(make_plan, config, inventory, model_of(config))  # it runs its own event loop
        async with cluster.placed(plan.devices):
            yield PlacedCluster(_on_devices(config, plan.devices), cluster, plan)


@asynccontextmanager
async def device_sharing(
    placed: PlacedCluster, engines: Sequence[Router], trainers: Sequence[Trainer]
) -> AsyncIterator[DeviceSharing]:
    """Start the trainer and its advisors, and yield how they share devices with the engines. If they take turns on the
    devices, the engines sleep during the start, and are awake afterwards while the trainers sleep.
    """
    plan = placed.plan
    time_shared = plan is not None and plan.devices.time_shared
    async with AsyncExitStack() as entered:
        for engine in engines if time_shared else ():
            await engine.sleep()  # the devices have room for one side only
        for trainer in trainers:
            await entered.enter_async_context(trainer)
            if time_shared:
                await cast(SleepingTrainer, trainer).sleep()  # a time-shared plan has only trainers that can
        for engine in engines if time_shared else ():
            await engine.wake()
        yield NoSharing() if plan is None or not time_shared else _time_sharing(placed, plan, engines, trainers)


def _time_sharing(
    placed: PlacedCluster, plan: Plan, engines: Sequence[Router], trainers: Sequence[Trainer]
) -> TimeSharing:
    def needs(role: str) -> int:
        return max(load.awake[role].total for load in plan.loads if role in load.awake)

    sleepers = cast(Sequence[SleepingTrainer], trainers)
    return TimeSharing(
        Tenant("engine", engines, needs("engine")),
        Tenant("trainer", sleepers, needs("trainer")),
        sleepers[0].free,
        placed.config.placement.switch_seconds,
    )


def _trusting(config: RunConfig) -> RunConfig:
    """The config whose engine and trainers may run the code that comes with the model, if the user has written that."""
    if not config.model.trust_remote_code:
        return config
    settings = {"trust_remote_code": True}
    return _with_settings(config, dict.fromkeys(("engine", "trainer", "reference", "critic"), settings))


def _on_devices(config: RunConfig, devices: DeviceMap) -> RunConfig:
    """The config with the settings that follow from a device map."""
    ranks = {"world_size": len(devices.of("trainer"))}
    wanted: dict[str, dict[str, Any]] = {
        "engine": {"tensor_parallel": devices.tensor_parallel()},
        "trainer": ranks,
        "reference": ranks,
        "critic": ranks,
    }
    return _with_settings(config, wanted)


def _with_settings(config: RunConfig, wanted: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    """The config with `wanted` settings of its sections, as far as they have them."""
    sections = {}
    for section, settings in wanted.items():
        chosen = getattr(config, section)
        if chosen is None:
            continue
        known = {key: value for key, value in settings.items() if key in type(chosen.settings).model_fields}
        sections[section] = replace(chosen, settings=chosen.settings.model_copy(update=known))
    return config.model_copy(update=sections)


def make_advisors(
    placed: PlacedCluster,
    algorithm: Algorithm,
    model: Path,
    latest: LatestCheckpoint,
    training: CriticTraining = ON_NEWEST,
) -> Advisors:
    """Make the configured reference and critic. They start from the same model as the trainer, unless the algorithm
    names another reference. The critic has as many steps as `training` has updates.

    Raises:
        ConfigError: the other reference has other tokens.
    """

    def latest_critic() -> tuple[int, Path] | None:
        newest = latest()
        return None if newest is None else (newest[0] * training.updates, newest[1] / CRITIC_FOLDER)

    config = placed.config
    teacher: Path | None = getattr(algorithm, "reference_model", None)
    if teacher is not None:
        check_same_tokens(model, teacher)
    reference = make_trainer(placed, teacher or model, role="reference") if config.reference else None
    steps = config.steps * training.updates
    critic = make_trainer(placed, model, latest_critic, role="critic", steps=steps) if config.critic else None
    # The config's validation has checked that both have `predict`.
    return Advisors(
        algorithm, cast("SupportsPredict | None", reference), cast("SupportsPredict | None", critic), training
    )


def make_trainer(
    placed: PlacedCluster,
    model: Path,
    latest: LatestCheckpoint = lambda: None,
    *,
    role: TrainerRole = "trainer",
    steps: int | None = None,
    **settings: Any,
) -> Trainer:
    """Make the configured trainer on its devices, for `steps` steps, with `settings` replaced. It survives the death of
    its ranks. `role` may also name an advisor, which is a trainer of another model with its own settings.

    Raises:
        ConfigError: the trainer has no such setting.
    """
    config = placed.config
    chosen: Component = getattr(config, role)
    if unknown := settings.keys() - type(chosen.settings).model_fields.keys():
        raise ConfigError(f"the {role} {chosen.name!r} has no setting {', '.join(sorted(unknown))}")
    own = chosen.settings.model_copy(update=settings)
    context: int | None = getattr(config.engine.settings, "max_context", None)
    if context is not None and hasattr(own, "within"):
        own = own.within(context)
    made: Trainer = replace(chosen, settings=own).make(
        model,
        total_steps=config.steps if steps is None else steps,
        temperature=config.rollout.sampling.temperature,
        start=placed.cluster.start,
        recovery=Recovery(latest, placed.cluster.config.restarts, config.rollout.deadlines.train),
        **_ROLE_SETTINGS.get(role, {}),
    )
    return made
