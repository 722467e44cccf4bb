"""What a recipe works with: engine, trainer, environments and reward of a run, started and stopped together."""

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from agentrl import plugins
from agentrl.cluster.time_share import Share
from agentrl.cluster.weights import WeightPublisher
from agentrl.cluster.workers import Cluster, own_address
from agentrl.config import RunConfig
from agentrl.durable import finish_folder, new_unfinished
from agentrl.protocols import Algorithm, Curriculum, Engine, Env, Renderer, SamplingParams, TaskSource
from agentrl.recipes.learner import Learner, make_learner
from agentrl.recipes.placed import LatestCheckpoint, open_cluster, sharing
from agentrl.remote.sessions import Limits
from agentrl.remote.workers import EnvWorker, env_workers
from agentrl.rollout.agents import Frozen, Scripted
from agentrl.rollout.composite import Composite
from agentrl.rollout.env_host import EnvHost, Isolation
from agentrl.rollout.env_process import ProcessEnv
from agentrl.rollout.episode import EnginePolicy, Player, Role, Sampling, ScriptedPolicy
from agentrl.rollout.interpreter import find_interpreter
from agentrl.rollout.renderer import TemplateRenderer
from agentrl.rollout.router import Router
from agentrl.rollout.rule_pool import RulePool
from agentrl.rollout.rule_workers import RuleWorkers
from agentrl.rollout.scheduler import Rollouts
from agentrl.rollout.tasks import SeededTasks
from agentrl.rollout.wrappers import address
from agentrl.run import Run
from agentrl.tiny_model import SIZES, create_tiny_model


@dataclass(frozen=True, slots=True)
class Players:
    """The served policy as a player of episodes, and the reward that scores them."""

    config: RunConfig
    engine: Router
    player: Player
    reward: Composite
    frozen: Mapping[Frozen, Router]

    def at_temperature(self, temperature: float) -> Player:
        """The same player, sampling at another temperature."""
        sampling = self.config.rollout.sampling.model_copy(update={"temperature": temperature})
        return replace(self.player, policy=_policy(self.config, self.engine, self.player.renderer, sampling))


@dataclass(frozen=True, slots=True)
class Workers(Players):
    """All of it: the players, the learner, and the way of the weights from one to the other."""

    learner: Learner
    weights: WeightPublisher
    share: Share

    async def take_up(self, run: Run) -> int:
        """Load the newest checkpoint, if there is one, bring the engine to it, and return how many steps are done."""
        newest = run.checkpoints.latest() if run.resumed else None
        if newest is None:
            return 0
        step, folder = newest
        await self.learner.load(folder)
        if step > 0:
            await self.weights.publish(self.learner.trainer, version=step)
        return step

    def rollouts(self, run: Run, step: int) -> Rollouts:
        """The scheduler of the steps from `step` on; tasks that an earlier launch left open come first."""
        run.metrics.rewind(step)
        pending = run.ledger.rewind(step)
        tasks: TaskSource = tasks_of(self.config, "train")
        if isinstance(tasks, Curriculum):
            for number, task, rewards_G in run.ledger.outcomes():
                tasks.saw(number, task, rewards_G)
        return Rollouts(
            self.config.rollout,
            tasks=tasks,
            player=self.player,
            reward=self.reward,
            engine=self.engine,
            rescue=self.engine.abandon_silent,
            ledger=run.ledger,
            seed=self.config.seed,
            groups=(self.config.steps - step) * self.config.rollout.groups_per_step,
            version=step,
            pending=pending,
            next_number=run.ledger.next_number(),
        )


def tasks_of(config: RunConfig, split: str) -> SeededTasks:
    """The tasks of one split ("train", "held-out", "demonstrations"): no seed is in two of them."""
    return SeededTasks(config.env.name, config.seed, split, config.env.options)


@asynccontextmanager
async def start_players(config: RunConfig, model: Path) -> AsyncIterator[Players]:
    """An engine that serves `model`, with environments and reward around it."""
    async with open_cluster(config) as placed, _players(placed.config, placed.cluster, model) as players:
        yield players


@asynccontextmanager
async def _players(config: RunConfig, cluster: Cluster, model: Path) -> AsyncIterator[Players]:
    renderer = TemplateRenderer.of_model(model)
    async with (
        env_host(config, cluster) as envs,  # first: what is wrong with them is said before a model is loaded
        _router(config, cluster, model) as engine,
        config.reward.make(_rules(config, cluster)) as reward,
        _frozen_engines(config, cluster, model) as frozen,
    ):
        policy = _policy(config, engine, renderer, config.rollout.sampling)
        player = Player(
            policy,
            renderer,
            envs,
            config.rollout.max_turns,
            config.rollout.deadlines.episode,
            config.rollout.context,
            _other_roles(config, model, renderer, frozen),
        )
        yield Players(config, engine, player, reward, frozen)


@asynccontextmanager
async def start_workers(
    config: RunConfig, algorithm: Algorithm, model: Path, latest: LatestCheckpoint = lambda: None
) -> AsyncIterator[Workers]:
    """`start_players`, and a learner that starts from the same model; `latest`: what it goes on from after a death."""
    async with open_cluster(config) as placed, _players(placed.config, placed.cluster, model) as players:
        learner = make_learner(placed, algorithm, model, latest)
        async with sharing(placed, [players.engine, *players.frozen.values()], learner.all) as share:
            followers = tuple((engine, route.refresh) for route, engine in players.frozen.items() if route.refresh)
            async with WeightPublisher(
                players.engine, config.rollout.deadlines.update_weights, followers, config.weights
            ) as publisher:
                yield Workers(
                    config, players.engine, players.player, players.reward, players.frozen, learner, publisher, share
                )


@asynccontextmanager
async def env_host(config: RunConfig, cluster: Cluster | None = None) -> AsyncIterator[EnvHost]:
    """The run's environments, in this process or on workers of the cluster; closed at the end."""
    env = config.env
    make = partial(env_factory, address(env.name, env.wrappers), env.isolation, env.python, env.requires)
    async with AsyncExitStack() as stack:
        if cluster is None or not cluster.config.env_workers:
            host = EnvHost({env.name: make()}, config.rollout.deadlines, env.isolation)
        else:
            sessions = Limits(max_sessions=config.rollout.max_live_episodes)
            workers = env_workers(
                cluster.start_one,
                cluster.config.env_workers,
                partial(EnvWorker, make, sessions, own_address() if cluster.spans_machines else "127.0.0.1"),
            )
            host = EnvHost({env.name: await stack.enter_async_context(workers)}, config.rollout.deadlines)
        stack.push_async_callback(host.close)
        yield host


def env_factory(
    name: str, isolation: Isolation | None = None, python: str | None = None, requires: Sequence[str] = ()
) -> Callable[[], Env]:
    """What makes an environment of this name; one of processes, where `isolation` or the environment says so, or where
    it has an interpreter of its own (`python`, `requires`).

    Raises:
        ConfigError: there is no such environment or interpreter.
    """
    if python is not None or requires:
        found = find_interpreter(python, requires)
        preload = ProcessEnv(name, found).check()
        if preload:
            ProcessEnv(name, found, preload).check()  # before the deadline of a reset counts
        return partial(ProcessEnv, name, found, preload)
    factory = plugins.load("envs", name)
    if (isolation or getattr(factory, "isolation", "thread")) == "process":
        return partial(ProcessEnv, name)
    return partial(factory)


async def base_model(run: Run) -> Path:
    """The folder of the model to start from, which is made first where the config names a size and not a folder.

    One that is made learns its tokenizer from what the environment says, so that its words are single tokens.
    """
    name = run.config.model.name
    if name not in SIZES:
        return Path(name)
    folder = run.folder / "model"
    if not folder.exists():
        corpus = await opening_texts(run.config)
        create_tiny_model(new_unfinished(folder), corpus=corpus, size=SIZES[name], seed=run.config.seed)
        finish_folder(folder)
    return folder


async def opening_texts(config: RunConfig, episodes: int = 64) -> list[str]:
    """What the environment says at the start of some episodes of the split "corpus"."""
    source = tasks_of(config, "corpus")
    texts: list[str] = []
    async with env_host(config) as envs:
        for index in range(episodes):
            env = envs.take(config.env.name)
            observation, _ = await env.reset(source.task(index).seed, config.env.options)
            texts += [env.system_prompt, observation, *(json.dumps(tool) for tool in env.tools)]
            await envs.give_back(config.env.name, env)
    return texts


def _router(config: RunConfig, cluster: Cluster, model: Path) -> Router:
    """The replicas of the engine as one."""
    makes = cluster.engines(config.engine, model)
    return Router(
        [make() for make in makes],
        update=config.rollout.weight_update,
        again=lambda number: makes[number](),
        lease=cluster.config.lease,
    )


def _rules(config: RunConfig, cluster: Cluster) -> RulePool:
    """The processes that rules run in."""
    count = cluster.config.reward_workers
    return RuleWorkers(cluster.start_one, count, config.rollout.rules) if count else RulePool(config.rollout.rules)


@asynccontextmanager
async def _frozen_engines(config: RunConfig, cluster: Cluster, model: Path) -> AsyncIterator[Mapping[Frozen, Router]]:
    """An engine for each kind of frozen agent; agents of one kind share it."""
    engines: dict[Frozen, Router] = {}
    async with AsyncExitStack() as stack:
        for route in config.env.agents.values():
            if isinstance(route, Frozen) and route not in engines:
                engines[route] = await stack.enter_async_context(_router(config, cluster, route.model or model))
        yield engines


def _other_roles(
    config: RunConfig, model: Path, renderer: TemplateRenderer, frozen: Mapping[Frozen, Router]
) -> dict[str, Role]:
    """How the agents are played that are not the policy's."""
    roles = {}
    for agent, route in config.env.agents.items():
        if isinstance(route, Scripted):
            policy = ScriptedPolicy(plugins.load("players", route.player), renderer)
            roles[agent] = Role(policy, renderer, trained=False)
        elif isinstance(route, Frozen):
            own = renderer if route.model is None else TemplateRenderer.of_model(route.model)
            served = _policy(config, frozen[route], own, config.rollout.sampling)
            roles[agent] = Role(served, own, config.rollout.context, trained=False)
    return roles


def _policy(config: RunConfig, engine: Engine, renderer: Renderer, sampling: Sampling) -> EnginePolicy:
    params = SamplingParams(sampling.max_tokens, sampling.temperature, renderer.stop_token_ids)
    return EnginePolicy(engine, params, config.rollout.deadlines.generate)
