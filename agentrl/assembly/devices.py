"""The devices of a run: its cluster, what its parts may use of it, and how engines and trainers
take turns.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.assembly.engines import places_of
from agentrl.assembly.placed import PlacedCluster
from agentrl.cluster.workers import Cluster
from agentrl.config.components import in_dtype_of
from agentrl.config.run_config import RunConfig
from agentrl.engines.router import Router
from agentrl.placement.device_map import DeviceMap
from agentrl.placement.devices import GIB
from agentrl.placement.time_share import (
    DeviceSharing,
    NoSharing,
    Sleeper,
    Tenant,
    TimeSharing,
)
from agentrl.planner.plan import Plan
from agentrl.planner.run_facts import model_of
from agentrl.planner.search import make_plan
from agentrl.protocols import Trainer
from agentrl.protocols.component_settings import EngineSettingsOffers

logger = logging.getLogger(__name__)


@asynccontextmanager
async def open_cluster(config: RunConfig, logs: Path | None = None) -> AsyncIterator[PlacedCluster]:
    """Open the configured cluster. If it has GPUs to assign, assign them by the best device map
    that `placement` allows. `logs`: the folder for the engines' own logs.

    Raises:
        ConfigError: there is no such cluster, or nothing fits on its devices.
    """
    engine = in_dtype_of(config.engine, config.trainer)
    config = _allow_remote_code(config.model_copy(update={"engine": engine}))
    # The engine keeps KV (`engine.kv_on_update`) no longer than a token may be trained on.
    kept = {"kv_max_staleness": config.rollout.max_staleness}
    config = _with_settings(config, {"engine": kept})
    if logs is not None and EngineSettingsOffers.of(engine.settings).log is None:
        file = str(logs / "{role}-{number}.log")
        config = _with_settings(config, {"engine": {"log": file}})
    made: Cluster = config.cluster.make()
    async with made as cluster:
        is_placed = config.placement.name != "local"
        inventory = await asyncio.to_thread(cluster.gpus) if is_placed else None
        if inventory is None:
            yield PlacedCluster(_on_engines(config, cluster.config.engines), cluster)
            return
        # It runs its own event loop.
        plan = await asyncio.to_thread(make_plan, config, inventory, model_of(config))
        async with cluster.placed(plan.devices):
            placed = _on_engines(_on_devices(config, plan.devices), len(plan.devices.of("engine")))
            yield PlacedCluster(placed, cluster, plan)


@asynccontextmanager
async def device_sharing(
    placed: PlacedCluster, engines: Sequence[Router], trainers: Sequence[Trainer]
) -> AsyncIterator[DeviceSharing]:
    """Start the trainer and its advisors, and yield how they share devices with the engines. If
    they take turns on the devices, the engines sleep during the start, and are awake afterwards
    while the trainers sleep.
    """
    plan = placed.plan
    time_shared = plan is not None and plan.devices.time_shared
    sharing: DeviceSharing = NoSharing()
    if plan is not None and time_shared:
        sharing = _time_sharing(placed, plan, engines, trainers)
    async with AsyncExitStack() as entered:
        async with sharing.starting():  # the devices have room for one side only
            for trainer in trainers:
                await entered.enter_async_context(trainer)
                if time_shared:
                    await trainer.sleep()
        yield sharing


def _time_sharing(
    placed: PlacedCluster, plan: Plan, engines: Sequence[Router], trainers: Sequence[Trainer]
) -> TimeSharing:
    def planned(role: str) -> int:
        return max(load.awake[role].to_wake for load in plan.loads if role in load.awake)

    sizes = [load.awake["engine"] for load in plan.loads if "engine" in load.awake]
    weights = max(size.parts.get("weights", 0) for size in sizes)
    obstacle = _transfer_obstacle(placed, plan)
    if obstacle is not None:
        logger.warning("before new weights are sent, the trainer sleeps: %s", obstacle)
    sharing = TimeSharing(
        Tenant("engine", list(map(Sleeper.of_engine, engines)), planned("engine"), weights),
        Tenant("trainer", list(map(Sleeper.of_trainer, trainers)), planned("trainer")),
        trainers[0].free,
        placed.config.placement.switch_seconds,
        weights_fit=obstacle is None,
    )
    for trainer in trainers:
        trainer.take_turns(sharing.training)
    return sharing


def _transfer_obstacle(placed: PlacedCluster, plan: Plan) -> str | None:
    """The reason why new weights cannot be sent while the trainer is awake and the engine asleep
    except for its weights; None if they can.
    """
    if placed.config.weights.update == "drain":
        return "the engines are awake before, for the turns that weights.update=drain waits for"
    tight = plan.tight
    if tight is None or tight.transfer is None:
        return None
    return (
        f"with the engine's weights beside it, device {tight.device} would hold"
        f" {tight.transfer / GIB:.1f} GiB of {tight.limit / GIB:.1f} usable (`agentrl plan`)"
    )


def _allow_remote_code(config: RunConfig) -> RunConfig:
    """The config, in which engine and trainers may run the code that comes with the model, if
    `model.trust_remote_code` says so.
    """
    if not config.model.trust_remote_code:
        return config
    settings = {"trust_remote_code": True}
    return _with_settings(
        config, dict.fromkeys(("engine", "trainer", "reference", "critic"), settings)
    )


def _on_engines(config: RunConfig, replicas: int) -> RunConfig:
    """The config with as many live episodes as fill this number of engines."""
    rollout = config.rollout.with_places(places_of(config, replicas))
    return config.model_copy(update={"rollout": rollout})


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
        known = {
            key: value
            for key, value in settings.items()
            if key in type(chosen.settings).model_fields
        }
        sections[section] = replace(chosen, settings=chosen.settings.model_copy(update=known))
    return config.model_copy(update=sections)
