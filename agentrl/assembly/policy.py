"""The policy without its trainer: parts of an evaluation, and of a served model."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from agentrl.assembly.devices import open_cluster
from agentrl.assembly.engines import engine_router
from agentrl.assembly.players import engine_policy
from agentrl.assembly.rollouts import RolloutAssembly, rollouts_on
from agentrl.config.run_config import RunConfig
from agentrl.conversation.renderer import TemplateRenderer, renderer_of
from agentrl.flow import freeze_gc
from agentrl.rollout.engine_policy import EnginePolicy


@asynccontextmanager
async def assemble_rollouts(config: RunConfig, model: Path) -> AsyncIterator[RolloutAssembly]:
    """Start an engine that serves `model`, the environments and the reward."""
    async with open_cluster(config) as placed, rollouts_on(placed, model) as rollouts:
        freeze_gc()
        yield rollouts


@asynccontextmanager
async def assemble_policy(
    config: RunConfig, model: Path
) -> AsyncIterator[tuple[EnginePolicy, TemplateRenderer]]:
    """Start an engine that serves `model`, alone: the policy as evaluations sample it, and its
    renderer.
    """
    async with open_cluster(config) as placed:
        renderer = await asyncio.to_thread(renderer_of, model, placed.config.model)
        async with engine_router(placed.config, placed.cluster, model) as engine:
            sampling = config.evaluation.sampling(config.rollout.sampling)
            yield engine_policy(config, engine, model, renderer, sampling, trained=False), renderer
