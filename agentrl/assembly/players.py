"""The players of a run's episodes: its environments or program, and each role's policy."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from agentrl import plugins
from agentrl.cluster.workers import Cluster
from agentrl.config.run_config import RunConfig
from agentrl.conversation.config import RendererConfig
from agentrl.conversation.renderer import TemplateRenderer, renderer_of
from agentrl.engines.router import Router
from agentrl.gateway.address import SCHEME as AGENT_SCHEME
from agentrl.gateway.address import scheme as agent_scheme
from agentrl.gateway.containment import check_containment
from agentrl.gateway.episode import AgentEpisodeRunner
from agentrl.gateway.remote_agents import RemoteAgents
from agentrl.gateway.server import serving
from agentrl.gateway.session_registry import SessionRegistry
from agentrl.hosting.factory import env_factory
from agentrl.hosting.pool import EnvPool
from agentrl.hosting.wrappers import address
from agentrl.models.source import vocabulary_size
from agentrl.net.interfaces import own_address
from agentrl.protocols import Engine, EngineSettingsOffers, Renderer
from agentrl.remote.env_worker import EnvWorker, env_workers, worker_limits
from agentrl.rollout.agents import FrozenRoute, ScriptedRoute
from agentrl.rollout.engine_policy import EnginePolicy
from agentrl.rollout.episode import EnvEpisodeRunner, Role, ScriptedPolicy
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
            isolation = {name: env.isolation for name, env in config.envs.items()}
            host = EnvPool(
                {name: make() for name, make in made.items()},
                config.rollout.deadlines,
                isolation,
                pictures=pictures,
            )
        else:
            sessions = worker_limits(config.rollout.live_episodes().most)
            at = own_address() if cluster.spans_machines else "127.0.0.1"
            served = {}
            for name, make in made.items():  # of a mixture, each environment has as many workers
                worker = partial(EnvWorker, make, sessions, at, pictures=pictures)
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
    config: RunConfig, cluster: Cluster, renderer: TemplateRenderer
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
            be kept from the network, as `gateway.network` wants.
    """
    registry, rollout = SessionRegistry(config.gateway), config.rollout
    program = agent_scheme(config.env.name.removeprefix(AGENT_SCHEME)).program(
        registry, config.env.isolation, config.env.python, config.env.folder
    )
    rewarded = any(name_of(part) == "environment" for part in config.reward.parts)
    async with serving(registry, program if isinstance(program, RemoteAgents) else None):
        if config.gateway.network == "gateway":
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
) -> EnginePolicy:
    """The `model` that an engine serves, as a policy that stops where the model's template ends a
    message.
    """
    stops = tuple(dict.fromkeys((*renderer.stop_token_ids, *sampling.stop_token_ids)))
    params = sampling.model_copy(update={"stop_token_ids": stops})
    return EnginePolicy(
        engine,
        params,
        config.rollout.deadlines.generate,
        trained,
        config.own_max_tokens(),
        config.rollout.compare_routing,
        EngineSettingsOffers.of(config.engine.settings).structured_outputs,
        vocabulary_size(model),
        config.rollout.deadlines.seconds_per_context_token,
    )


def other_roles(
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
            served = engine_policy(
                config,
                frozen[route],
                route.model or model,
                own,
                config.rollout.sampling,
                trained=False,
            )
            roles[agent] = Role(served, own, config.rollout.context, trained=False)
    return roles
