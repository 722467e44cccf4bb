"""The parts that play and score episodes: `assemble_rollouts`."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.assembly.engines import engine_router, frozen_engines
from agentrl.assembly.placed import PlacedCluster
from agentrl.assembly.players import (
    engine_policy,
    episode_player,
    frozen_names,
    other_roles,
    prepare_rollout_workers,
    rollout_workers,
)
from agentrl.cluster.workers import Cluster
from agentrl.config.run_config import RunConfig
from agentrl.conversation.renderer import TemplateRenderer, renderer_of
from agentrl.engines.router import Router
from agentrl.gateway.episode import AgentEpisodeRunner
from agentrl.rollout.agents import FrozenRoute
from agentrl.rollout.episode import EnvEpisodeRunner
from agentrl.rollout.token_budget import TokenBudget
from agentrl.rollout.workers.messages import PlayedPolicy
from agentrl.rollout.workers.pool import WorkerRunner
from agentrl.scoring.build import build_pipeline
from agentrl.scoring.pipeline import RewardPipeline
from agentrl.scoring.rule_pool import RulePool
from agentrl.scoring.rule_workers import RuleWorkers
from agentrl.tasks.suites import EvaluationSampling


@dataclass(frozen=True, slots=True)
class RolloutAssembly:
    """The parts that play and score episodes: the policy's engine, the episode runner, the reward,
    and the engines of frozen agents.
    """

    config: RunConfig
    model: Path
    engine: Router
    runner: EnvEpisodeRunner | AgentEpisodeRunner | WorkerRunner
    reward: RewardPipeline
    frozen: Mapping[FrozenRoute, Router]
    tokens: TokenBudget
    """Of the engine's KV caches, for all episodes that its policy plays."""

    def evaluating(
        self, how: EvaluationSampling
    ) -> EnvEpisodeRunner | AgentEpisodeRunner | WorkerRunner:
        """The same runner, sampling as an evaluation does."""
        sampling = how.sampling(self.config.rollout.sampling)
        if isinstance(self.runner, WorkerRunner):
            return self.runner.asking(self.engine, sampling)
        policy = engine_policy(
            self.config, self.engine, self.model, self.runner.renderer, sampling, trained=False
        )
        return replace(self.runner, policy=policy)


@asynccontextmanager
async def rollouts_on(placed: PlacedCluster, model: Path) -> AsyncIterator[RolloutAssembly]:
    """`assemble_rollouts` on an open cluster."""
    config, cluster = placed.config, placed.cluster
    prepare_rollout_workers(config, cluster)
    # It imports what knows the families of models, which takes seconds the first time.
    renderer = await asyncio.to_thread(renderer_of, model, config.model)
    async with (
        # First, so that its errors come before a model is loaded.
        _runner_factory(placed, model, renderer) as make_runner,
        engine_router(config, cluster, model) as engine,
        reward_of(config, _rule_pool(config, cluster)) as reward,
        frozen_engines(config, cluster, model) as frozen,
    ):
        runner, tokens = make_runner(engine, frozen), token_budget(config, engine)
        yield RolloutAssembly(config, model, engine, runner, reward, frozen, tokens)


def token_budget(config: RunConfig, engine: Router) -> TokenBudget:
    """The budget of an engine's KV caches, for all episodes that its policy plays."""
    budgets = [config.rollout.budget, *config.own_budgets().values()]
    return TokenBudget(engine, max(budget.turns for budget in budgets))


@asynccontextmanager
async def _runner_factory(
    placed: PlacedCluster, model: Path, renderer: TemplateRenderer
) -> AsyncIterator[
    Callable[
        [Router, Mapping[FrozenRoute, Router]],
        EnvEpisodeRunner | AgentEpisodeRunner | WorkerRunner,
    ]
]:
    """A factory of the episodes' runner, in this process or on rollout workers, from the policy's
    engine and those of frozen agents.
    """
    config, sampling = placed.config, placed.config.rollout.sampling
    if bounds := config.rollout.worker_range:
        async with rollout_workers(config, bounds, placed.cluster, model) as workers:

            def on_workers(engine: Router, frozen: Mapping[FrozenRoute, Router]) -> WorkerRunner:
                for route, name in frozen_names(config):
                    workers.engines.name_of(frozen[route], name)
                name = workers.engines.name_of(engine)
                policy = PlayedPolicy(name, sampling, trained=True)
                return WorkerRunner(workers, policy, renderer)

            yield on_workers
        return
    async with episode_player(config, placed.cluster, renderer) as player:

        def here(
            engine: Router, frozen: Mapping[FrozenRoute, Router]
        ) -> EnvEpisodeRunner | AgentEpisodeRunner:
            policy = engine_policy(config, engine, model, renderer, sampling, trained=True)
            return player(policy, other_roles(config, model, renderer, frozen))

        yield here


def reward_of(config: RunConfig, rules: RulePool | None = None) -> RewardPipeline:
    """The run's reward, not yet entered; its rules run in `rules`, by default in processes of this
    machine.
    """
    rollout = config.rollout
    rules = rules or RulePool(rollout.rules)
    needed = {
        constraint.part.partition("/")[0] for constraint in config.batch_processing.constraints
    }
    return build_pipeline(
        config.reward,
        rules,
        deadline=rollout.deadlines.reward,
        retries=rollout.retries,
        by_env=config.rewards_by_env(),
        needed=needed,
    )


def _rule_pool(config: RunConfig, cluster: Cluster) -> RulePool:
    """The pool of processes that rules run in."""
    count, rules = cluster.config.reward_workers, config.rollout.rules
    if not count:
        return RulePool(rules)
    return RuleWorkers(cluster.start_one, count, rules, restarts=cluster.config.restarts)
