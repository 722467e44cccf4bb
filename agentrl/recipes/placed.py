"""Where a run's engine and trainer live: an open cluster, the plan of its devices, and the trainer on it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from agentrl.cluster.placement import DeviceMap
from agentrl.cluster.recovery import RecoveringTrainer
from agentrl.cluster.time_share import AllAwake, Share, TimeShare, Turn
from agentrl.cluster.workers import Cluster
from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.planner.plan import Plan, make_plan
from agentrl.planner.run_facts import model_of
from agentrl.plugins import Component
from agentrl.rollout.router import Router

Learning = Literal["trainer", "reference", "critic"]
_HELPERS: Mapping[str, Mapping[str, str]] = {
    "reference": {"role": "reference"},
    "critic": {"role": "critic", "head": "value"},
}
"""What a trainer is told that helps another."""

LatestCheckpoint = Callable[[], tuple[int, Path] | None]
"""The newest (steps done, folder of the checkpoint) of a run."""


@dataclass(frozen=True, slots=True)
class Placed:
    """An open cluster, and the config with the settings that the plan of its devices means, where there is one."""

    config: RunConfig
    cluster: Cluster
    plan: Plan | None = None


@asynccontextmanager
async def open_cluster(config: RunConfig) -> AsyncIterator[Placed]:
    """The configured cluster. Where it has GPUs to give out, they are given out by the best map that `placement`
    allows.

    Raises:
        ConfigError: there is no such cluster, or nothing fits on its devices.
    """
    made: Cluster = config.cluster.make()
    async with made as cluster:
        inventory = None if config.placement.name == "local" else cluster.gpus()
        if inventory is None:
            yield Placed(config, cluster)
            return
        plan = await asyncio.to_thread(make_plan, config, inventory, model_of(config))  # it runs a loop of its own
        async with cluster.placed(plan.devices):
            yield Placed(_on_devices(config, plan.devices), cluster, plan)


@asynccontextmanager
async def sharing(
    placed: Placed, engines: Sequence[Router], learners: Sequence[RecoveringTrainer]
) -> AsyncIterator[Share]:
    """The trainer and its helpers, entered beside engines that are awake, and how they share their devices."""
    plan = placed.plan
    in_turns = plan is not None and plan.devices.in_turns
    async with AsyncExitStack() as entered:
        for engine in engines if in_turns else ():
            await engine.sleep()  # there is room for one side only
        for learner in learners:
            await entered.enter_async_context(learner)
            if in_turns:
                await learner.sleep()
        for engine in engines if in_turns else ():
            await engine.wake()
        yield AllAwake() if plan is None or not in_turns else _turns(placed, plan, engines, learners)


def _turns(placed: Placed, plan: Plan, engines: Sequence[Router], learners: Sequence[RecoveringTrainer]) -> TimeShare:
    def needs(role: str) -> int:
        return max(load.awake[role].total for load in plan.loads if role in load.awake)

    return TimeShare(
        Turn("engine", engines, needs("engine")),
        Turn("trainer", learners, needs("trainer")),
        learners[0].free,
        placed.config.placement.switch_seconds,
    )


def _on_devices(config: RunConfig, devices: DeviceMap) -> RunConfig:
    """The config with the settings that a map means."""
    ranks = {"world_size": len(devices.of("trainer"))}
    wanted = {
        "engine": {"tensor_parallel": devices.tensor_parallel()},
        "trainer": ranks,
        "reference": ranks,
        "critic": ranks,
    }
    sections = {}
    for section, settings in wanted.items():
        chosen = getattr(config, section)
        if chosen is None:
            continue
        known = {key: value for key, value in settings.items() if key in type(chosen.settings).model_fields}
        sections[section] = replace(chosen, settings=chosen.settings.model_copy(update=known))
    return config.model_copy(update=sections)


def make_trainer(
    placed: Placed,
    model: Path,
    latest: LatestCheckpoint = lambda: None,
    *,
    role: Learning = "trainer",
    steps: int | None = None,
    **settings: Any,
) -> RecoveringTrainer:
    """The configured trainer where it is placed, for `steps` steps, with some settings replaced; it outlives its ranks.
    So are those who help it, by their own settings: each is a trainer of another model.

    Raises:
        ConfigError: it has no such setting.
    """
    config = placed.config
    chosen: Component = getattr(config, role)
    if unknown := settings.keys() - type(chosen.settings).model_fields.keys():
        raise ConfigError(f"the {role} {chosen.name!r} has no setting {', '.join(sorted(unknown))}")
    make = partial(
        replace(chosen, settings=chosen.settings.model_copy(update=settings)).make,
        model,
        total_steps=config.steps if steps is None else steps,
        temperature=config.rollout.sampling.temperature,
        start=placed.cluster.start,
        **_HELPERS.get(role, {}),
    )
    restarts = placed.cluster.config.restarts
    return RecoveringTrainer(make, latest, restarts=restarts, deadline=config.rollout.deadlines.train)
