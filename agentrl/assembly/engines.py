"""The engines of a run: that of the policy, and those of its opponents, its teacher, and evaluation
beside training.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from agentrl.assembly.placed import PlacedCluster
from agentrl.cluster.engine_logs import with_log_of
from agentrl.cluster.worker_registry import register_workers
from agentrl.cluster.workers import Cluster, EngineFactory
from agentrl.config.components import as_trained_by, in_dtype_of
from agentrl.config.run_config import RunConfig
from agentrl.engines.router import Router
from agentrl.errors import ConfigError
from agentrl.estimation.teacher import Teacher, TeacherConfig
from agentrl.planner.run_facts import engine_of_teacher
from agentrl.protocols import EngineSettingsOffers
from agentrl.rollout.agents import FrozenRoute
from agentrl.rollout.opponents import Matches
from agentrl.weights.config import WeightUpdate

_STALL_LEASES = 4
"""The least time without progress, in leases, after which an engine with requests counts as dead.
"""


@asynccontextmanager
async def engine_router(
    config: RunConfig,
    cluster: Cluster,
    model: Path,
    role: str = "engine",
    *,
    frozen: bool = False,
    answer_seconds: float | None = None,
) -> AsyncIterator[Router]:
    """Start the engine's replicas, and a router over them. `role`: what displays call them.
    `frozen`: they get no new weights. `answer_seconds`: the deadline of what they are asked, by
    default that of a completion.
    """
    engine = config.engine if frozen else as_trained_by(config.engine, config.trainer)
    factories = cluster.engines(with_log_of(engine, role=role), model)
    router = _router_over(
        factories,
        config,
        cluster,
        model,
        update=config.weights.update,
        answer_seconds=answer_seconds,
    )
    with register_workers(partial(router.worker_count, role)):
        async with router:
            yield router


def _router_over(
    factories: Sequence[EngineFactory],
    config: RunConfig,
    cluster: Cluster,
    model: Path,
    *,
    update: WeightUpdate = "keep",
    answer_seconds: float | None = None,
) -> Router:
    """A router over new engines that serve `model`, supervised as the cluster's settings say."""
    # However short the deadline of an answer is, a step that compiles kernels is no death.
    stall_seconds = _STALL_LEASES * cluster.config.lease
    return Router(
        [make() for make in factories],
        update=update,
        factory=lambda number: factories[number](),
        lease=cluster.config.lease,
        restarts=cluster.config.restarts,
        start_seconds=cluster.config.start_seconds,
        update_seconds=config.weights.for_model(model).seconds,
        answer_seconds=max(answer_seconds or config.rollout.deadlines.generate, stall_seconds),
        seconds_per_context_token=config.rollout.deadlines.seconds_per_context_token,
        nodes=[factory.node for factory in factories],
        starts_per_node=cluster.config.starts_per_node,
    )


def places_of(config: RunConfig, replicas: int) -> int:
    """Requests that so many replicas of the engine serve at once; 0 if that is not known."""
    return replicas * EngineSettingsOffers.of(config.engine.settings).max_batch


@asynccontextmanager
async def frozen_engines(
    config: RunConfig, cluster: Cluster, model: Path
) -> AsyncIterator[Mapping[FrozenRoute, Router]]:
    """Start an engine for each distinct frozen route; agents with equal routes share one."""
    engines: dict[FrozenRoute, Router] = {}
    async with AsyncExitStack() as stack:
        for route in config.env.agents.values():
            if isinstance(route, FrozenRoute) and route not in engines:
                served = engine_router(
                    config, cluster, route.model or model, "frozen engine", frozen=True
                )
                engines[route] = await stack.enter_async_context(served)
        yield engines


@asynccontextmanager
async def evaluation_engine(placed: PlacedCluster, model: Path) -> AsyncIterator[Router | None]:
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
            "evaluation.engines asks for engines of its own, and the planned placement has no"
            " devices for them: leave it out, or assign devices yourself with placement=local"
        )
    engine = as_trained_by(config.engine, config.trainer)
    engine = with_log_of(engine, role="evaluation engine")
    factories = [factory for _ in range(count) for factory in placed.cluster.engines(engine, model)]
    router = _router_over(factories, config, placed.cluster, model)
    with register_workers(partial(router.worker_count, "evaluation engine")):
        async with router:
            yield router


@asynccontextmanager
async def opponent_engines(
    placed: PlacedCluster, model: Path, matches: Matches | None
) -> AsyncIterator[Sequence[Router]]:
    """Start the engines of self-play's opponents."""
    async with AsyncExitStack() as stack:
        count = matches.config.num_engines if matches else 0
        served = [
            engine_router(placed.config, placed.cluster, model, "opponent") for _ in range(count)
        ]
        yield [await stack.enter_async_context(engine) for engine in served]


@asynccontextmanager
async def teacher_served(
    placed: PlacedCluster, model: Path, teacher: TeacherConfig | None, longest: int
) -> AsyncIterator[Router | None]:
    """Start the teacher's engine, if there is one. It must take sequences of `longest` tokens."""
    if teacher is None:
        yield None
        return
    engine = in_dtype_of(engine_of_teacher(placed.config, teacher), placed.config.trainer)
    config = placed.config.model_copy(update={"engine": engine})
    async with engine_router(
        config,
        placed.cluster,
        teacher.model or model,
        "teacher",
        frozen=True,
        answer_seconds=config.rollout.deadlines.score,
    ) as served:
        if served.max_context < longest:
            raise ConfigError(
                f"the teacher's engine takes at most {served.max_context} tokens, and the policy's"
                f" {longest}: write engine.max_context={served.max_context}, or another"
                " recipe.teacher.engine.max_context"
            )
        yield served


def asked_teacher(config: RunConfig, teacher: TeacherConfig, served: Router) -> Teacher:
    """The teacher that an engine serves, asked as the run samples."""
    return Teacher(
        served,
        temperature=config.rollout.sampling.temperature,
        seconds=config.rollout.deadlines.score,
        concurrency=teacher.concurrency,
    )
