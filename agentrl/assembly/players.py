"""The players of a run's episodes: its environments or program, and each role's policy; in this
process, or in rollout workers.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from agentrl import plugins
from agentrl.cluster.fork_server import forking_context
from agentrl.cluster.workers import Cluster
from agentrl.config.from_file import parse_config
from agentrl.config.run_config import RunConfig
from agentrl.conversation.config import RendererConfig
from agentrl.conversation.renderer import TemplateRenderer, renderer_of
from agentrl.gateway.address import SCHEME as AGENT_SCHEME
from agentrl.gateway.address import scheme as agent_scheme
from agentrl.gateway.containment import check_containment
from agentrl.gateway.episode import AgentEpisodeRunner
from agentrl.gateway.remote_agents import RemoteAgents
from agentrl.gateway.sandboxed_agent import SandboxedAgent
from agentrl.gateway.server import serving
from agentrl.gateway.session_registry import SessionRegistry
from agentrl.hosting.factory import env_factory
from agentrl.hosting.pool import EnvPool
from agentrl.hosting.wrappers import address
from agentrl.models.source import vocabulary_size
from agentrl.net.interfaces import LOOPBACK, own_address
from agentrl.protocols import Engine, EngineSettingsOffers, Renderer, TrainerSettingsOffers
from agentrl.remote.env_worker import EnvWorker, env_workers, worker_limits
from agentrl.remote.sessions import ServerLimits
from agentrl.rollout.agents import FrozenRoute, ScriptedRoute
from agentrl.rollout.config import WorkerRange
from agentrl.rollout.engine_policy import EnginePolicy
from agentrl.rollout.episode import EnvEpisodeRunner, Role, ScriptedPolicy
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.workers.host import MakeRunner
from agentrl.rollout.workers.messages import PlayedPolicy
from agentrl.rollout.workers.pool import RolloutWorkers
from agentrl.rollout.workers.scaling import WorkerScaling
from agentrl.scoring.config import name_of
from agentrl.settings.sampling import SamplingParams


@asynccontextmanager
async def env_host(
    config: RunConfig, cluster: Cluster | None = None, *, shown: bool = True
) -> AsyncIterator[EnvPool]:
    """Host the run's environments in this process or on workers of the cluster, and close them at
    the end.

    Without `shown`, the environments draw no pictures: nobody will look at these episodes.
    """
    made = {
        name: partial(
            env_factory,
            address(env.name, env.all_wrappers),
            env.isolation,
            env.python,
            env.requires,
        )
        for name, env in config.envs.items()
    }
    pictures = shown and config.observe.picture_kib > 0
    async with AsyncExitStack() as stack:
        if cluster is None or not cluster.config.env_workers:
            host = EnvPool(
                {name: make() for name, make in made.items()},
                config.rollout.deadlines,
                {name: env.isolation for name, env in config.envs.items()},
                pictures=pictures,
            )
        else:
            limits = worker_limits(ServerLimits(max_sessions=config.rollout.live_episodes().most))
            at = own_address() if cluster.spans_machines else "127.0.0.1"
            served = {}
            for name, make in made.items():  # of a mixture, each environment has as many workers
                isolation = config.envs[name].isolation
                worker = partial(
                    EnvWorker, make, limits, at, isolation=isolation, pictures=pictures
                )
                workers = env_workers(
                    cluster.start_one,
                    cluster.config.env_workers,
                    worker,
                    restarts=cluster.config.restarts,
                )
                served[name] = await stack.enter_async_context(workers)
            host = EnvPool(served, config.rollout.deadlines)
        stack.push_async_callback(host.close)
        yield host


@asynccontextmanager
async def episode_player(
    config: RunConfig, cluster: Cluster | None, renderer: TemplateRenderer
) -> AsyncIterator[
    Callable[[EnginePolicy, Mapping[str, Role]], EnvEpisodeRunner | AgentEpisodeRunner]
]:
    """A factory of the episodes' runner, from a policy and from the roles of the agents that it
    does not play.
    """
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
            [suite.label for suite in config.evaluation.suites if suite.env is not None],
        )


@asynccontextmanager
async def agent_player(
    config: RunConfig, renderer: TemplateRenderer
) -> AsyncIterator[Callable[[EnginePolicy], AgentEpisodeRunner]]:
    """Serve the gateway to the run's program, and yield what makes the episodes' runner of a
    policy.

    Raises:
        ConfigError: there is no such program, the gateway cannot be served, or the program cannot
            be kept from the network, as `gateway.network` or `env.agent` wants.
    """
    registry, rollout = SessionRegistry(config.gateway), config.rollout
    program = agent_scheme(config.env.name.removeprefix(AGENT_SCHEME)).program(
        registry, config.env.isolation, config.env.python, config.env.folder, config.env.agent
    )
    rewarded = any(name_of(part) == "environment" for part in config.reward.parts)
    async with AsyncExitStack() as stack:
        remote = program if isinstance(program, RemoteAgents) else None
        await stack.enter_async_context(serving(registry, remote))
        if isinstance(program, SandboxedAgent):
            await stack.enter_async_context(program)
        elif config.gateway.network == "gateway":
            await check_containment(registry)
        yield lambda policy: AgentEpisodeRunner(
            policy,
            renderer,
            registry,
            program,
            rollout.budget,
            rollout.deadlines.episode,
            needs_reward=rewarded,
            own_budgets=config.own_budgets(),
        )


def engine_policy(
    config: RunConfig,
    engine: Engine,
    model: Path,
    renderer: Renderer,
    sampling: SamplingParams,
    *,
    trained: bool,
    apart: bool = False,
) -> EnginePolicy:
    """The `model` that an engine serves, as a policy that stops where the model's template ends a
    message. `apart`: it is not the engine of the run's policy.
    """
    stops = tuple(dict.fromkeys((*renderer.stop_token_ids, *sampling.stop_token_ids)))
    params = sampling.model_copy(update={"stop_token_ids": stops})
    return EnginePolicy(
        engine,
        params,
        config.rollout.deadlines.generate,
        trained,
        config.own_max_tokens(),
        TrainerSettingsOffers.of(config.trainer.settings).routing != "off",
        EngineSettingsOffers.of(config.engine.settings).structured_outputs,
        vocabulary_size(model),
        config.rollout.deadlines.seconds_per_context_token,
        apart,
    )


def other_roles(
    config: RunConfig, model: Path, renderer: TemplateRenderer, frozen: Mapping[FrozenRoute, Engine]
) -> dict[str, Role]:
    """The roles of the agents that the policy does not play."""
    roles = {}
    for agent, route in config.env.agents.items():
        if isinstance(route, ScriptedRoute):
            policy = ScriptedPolicy(plugins.load("players", route.player), renderer)
            roles[agent] = Role(policy, renderer, trained=False)
        elif isinstance(route, FrozenRoute):
            own = renderer if route.model is None else renderer_of(route.model, RendererConfig())
            served = engine_policy(
                config,
                frozen[route],
                route.model or model,
                own,
                config.rollout.sampling,
                trained=False,
                apart=True,
            )
            roles[agent] = Role(served, own, config.rollout.context, trained=False)
    return roles


_WORKER_IMPORTS = (
    "agentrl.assembly.players",
    "transformers.models.auto.tokenization_auto",
    "renderers.base",
)
"""Modules that take seconds to import, and that every rollout worker needs."""


def prepare_rollout_workers(config: RunConfig, cluster: Cluster) -> None:
    """Begin to import what the rollout workers of a run need, in the process that they will be
    forked from, if they run on this machine. Does not wait.
    """
    if config.rollout.worker_range and not cluster.spans_machines:
        forking_context(_WORKER_IMPORTS).begin()


def rollout_workers(
    config: RunConfig, bounds: WorkerRange, cluster: Cluster, model: Path
) -> RolloutWorkers:
    """The rollout workers of a run, so many, not yet entered."""
    deadlines = config.rollout.deadlines
    # An environment in the worker's process may block its event loop for as long as it may take.
    blocked = max(deadlines.reset, deadlines.step, deadlines.tool)
    return RolloutWorkers(
        cluster.start_one,
        # A config does not pickle, as classes of settings are made for its plug-ins.
        partial(worker_parts, config.to_yaml(), model),
        bounds.min,
        scaling=WorkerScaling(bounds.min, bounds.max) if bounds.min < bounds.max else None,
        host=own_address() if cluster.spans_machines else LOOPBACK,
        silence=cluster.config.lease + blocked,
        restarts=cluster.config.restarts,
        imports=_WORKER_IMPORTS,
    )


def frozen_names(config: RunConfig) -> Iterator[tuple[FrozenRoute, str]]:
    """The engines of frozen agents, with the names by which workers ask them."""
    routes = dict.fromkeys(
        route for route in config.env.agents.values() if isinstance(route, FrozenRoute)
    )
    for number, route in enumerate(routes):
        yield route, f"frozen {number}"


@asynccontextmanager
async def worker_parts(
    settings: str, model: Path, engine: Callable[[str], Engine]
) -> AsyncIterator[MakeRunner]:
    """The parts with which a worker plays, from a config as YAML: environments or the gateway, the
    renderer, and the agents that the policy does not play. `engine` finds an engine of the
    controller by its name.

    Raises:
        ConfigError: see `episode_player`.
    """
    config = parse_config(settings)
    # It imports what knows the families of models, which takes seconds the first time.
    renderer = await asyncio.to_thread(renderer_of, model, config.model)
    frozen = {route: engine(name) for route, name in frozen_names(config)}
    others = other_roles(config, model, renderer, frozen)
    async with episode_player(config, None, renderer) as player:

        def policy_of(
            name: str, sampling: SamplingParams, *, trained: bool, apart: bool = False
        ) -> EnginePolicy:
            return engine_policy(
                config, engine(name), model, renderer, sampling, trained=trained, apart=apart
            )

        def make_runner(policy: PlayedPolicy) -> EpisodeRunner:
            served = policy_of(policy.engine, policy.sampling, trained=policy.trained)
            if not policy.opponent:
                return player(served, others)
            sampling = config.rollout.sampling
            opposed = policy_of(policy.opponent, sampling, trained=False, apart=True)
            role = Role(opposed, renderer, config.rollout.context, trained=False)
            return player(served, {**others, **dict.fromkeys(policy.opposing, role)})

        yield make_runner
