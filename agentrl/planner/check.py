"""Refuses a run before it starts, if it cannot run on this machine."""

from dataclasses import replace

from agentrl.config.compatibility import check_stage
from agentrl.config.run_config import RunConfig
from agentrl.errors import ConfigError
from agentrl.placement.devices import GIB
from agentrl.placement.footprint import trainer_footprint, usable_bytes, weight_bytes
from agentrl.placement.inventory import Inventory
from agentrl.placement.probe import visible
from agentrl.planner.advice import what_fits
from agentrl.planner.run_facts import layouts, model_of, placement_request_of, with_defaults
from agentrl.protocols.component_settings import (
    ClusterOffers,
    EngineSettingsOffers,
    TrainerSettingsOffers,
)


def check_placement(config: RunConfig, inventory: Inventory | None = None) -> None:
    """Check a run whose cluster is this machine, with everything on the first device.

    Only certain needs are counted: weights of engines and trainer, gradients and optimizer.
    `agentrl plan` counts the rest too. If engine or trainer has no `layout`, memory is not checked.

    Raises:
        ConfigError: the run is not possible; says what would fit.
    """
    if not ClusterOffers.of(config.cluster.factory).one_device:
        return
    check_stage(config, "start")
    engine = EngineSettingsOffers.of(config.engine.settings)
    trainer = TrainerSettingsOffers.of(config.trainer.settings)
    if engine.layout is None or trainer.layout is None:
        return
    inventory = inventory or visible()
    facts, kind = model_of(config), inventory.kind
    config = with_defaults(config, facts, kind)
    (engine_layout, trainer_layout), request = layouts(config), placement_request_of(config)
    if not kind.is_gpu:  # what is offloaded lies in the same memory
        trainer_layout = replace(trainer_layout, offload=False)
    size = trainer_footprint(facts, trainer_layout, request.ranks)
    kept_bytes = sum(size.parts.get(part, 0) for part in ("weights", "gradients", "optimizer"))
    kept_bytes *= request.ranks
    kept_bytes += engine_layout.here * request.engines * weight_bytes(facts, engine_layout)
    usable = usable_bytes(kind)
    if kept_bytes > usable:
        listed = "\n".join(f"  {way}" for way in what_fits(config, inventory, facts))
        raise ConfigError(
            f"weights, gradients and optimizer of {facts.name} need {kept_bytes / GIB:.1f} GiB on"
            f" {inventory}, of which {usable / GIB:.1f} are usable. What would"
            f" fit:\n{listed or '  a smaller model'}"
        )
