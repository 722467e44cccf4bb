"""Advice for a config that does not fit: changes that would fit, checked with the same count of
memory.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from agentrl import plugins
from agentrl.config.run_config import RunConfig
from agentrl.errors import ConfigError
from agentrl.models.facts import ModelFacts
from agentrl.placement.device_map import device_maps
from agentrl.placement.devices import OFFERED_KINDS
from agentrl.placement.inventory import Inventory
from agentrl.planner.memory import fit_of
from agentrl.planner.meshes import AXES
from agentrl.planner.run_facts import layouts, placement_request_of, stages_of
from agentrl.plugins import Component
from agentrl.protocols.component_settings import TrainerSettingsOffers
from agentrl.settings.yaml_values import in_yaml
from agentrl.simulate.stages import workload

_MOST_TOGETHER = 4
"""Most changes that are proposed together."""
_MAX_TRIED_CHANGES = 2
"""Of the changes that could come next, how many are tried."""


@dataclass(frozen=True, slots=True)
class Change:
    """New settings, as they are written, and the function that applies them: it returns None if
    nothing changes.
    """

    settings: tuple[str, ...]
    apply: Callable[[RunConfig], RunConfig | None]

    @property
    def keys(self) -> set[str]:
        """The names of the settings."""
        return {setting.partition("=")[0] for setting in self.settings}


def what_fits(
    config: RunConfig, inventory: Inventory, facts: ModelFacts, most: int = 7
) -> list[str]:
    """Changes that make a config fit, as overrides: single ones, else several together; and other
    devices.

    Of several values of a setting, it names the first that fits.
    """
    changes = list(_changes(config, inventory))
    alone: list[Change] = []
    for change in changes:
        named = any(other.keys <= change.keys for other in alone)
        if (
            len(alone) < most
            and not named
            and _memory_share(change.apply(config), inventory, facts) <= 1
        ):
            alone.append(change)
    ways = [" ".join(change.settings) for change in alone]
    if not ways:
        together = _drop_unneeded(
            config, inventory, facts, _combine(config, inventory, facts, changes) or []
        )
        ways = (
            [" ".join(setting for change in together for setting in change.settings)]
            if together
            else []
        )
    devices = _other_devices(config, inventory, facts)
    return [*ways, *(devices[:1] if ways else devices)]


def _combine(
    config: RunConfig,
    inventory: Inventory,
    facts: ModelFacts,
    changes: list[Change],
    most: int = _MOST_TOGETHER,
) -> list[Change] | None:
    """At most so many changes of different settings until the config fits; None if they do not
    suffice.

    It takes the one that saves most, then the one that saves most besides; where that leads
    nowhere, the second best.
    """
    filled = _memory_share(config, inventory, facts)
    if filled <= 1:
        return []
    if most == 0:
        return None
    tried = [
        (_memory_share(changed := change.apply(config), inventory, facts), changed, change)
        for change in changes
    ]
    for less, changed, change in sorted(tried, key=lambda entry: entry[0])[:_MAX_TRIED_CHANGES]:
        if changed is not None and less < filled:
            others = [other for other in changes if not other.keys & change.keys]
            rest = _combine(changed, inventory, facts, others, most - 1)
            if rest is not None:
                return [change, *rest]
    return None


def _drop_unneeded(
    config: RunConfig, inventory: Inventory, facts: ModelFacts, changes: list[Change]
) -> list[Change]:
    """Changes that make a config fit, without those that later ones made unnecessary."""
    for change in changes:
        fewer: list[Change] = [other for other in changes if other is not change]
        changed: RunConfig | None = config
        for other in fewer:
            changed = None if changed is None else other.apply(changed)
        if _memory_share(changed, inventory, facts) <= 1:
            return _drop_unneeded(config, inventory, facts, fewer)
    return changes


def _other_devices(config: RunConfig, inventory: Inventory, facts: ModelFacts) -> list[str]:
    """Other kinds of devices, and more of them, from few to many; a machine without GPUs needs
    some.
    """
    kinds = [inventory.kind] if inventory.kind.is_gpu else []
    kinds += [kind for kind in OFFERED_KINDS if kind.name != inventory.kind.name]
    counts = [(1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 4), (8, 8)]
    offers: list[str] = []
    for kind in kinds:
        # The fewest devices of a kind that suffice; two kinds are advice enough.
        for count in counts:
            offer = Inventory.uniform(kind, *count)
            if len(offer) >= len(inventory) and _memory_share(config, offer, facts) <= 1:
                offers.append(str(offer))
                break
        if len(offers) == 2:
            break
    return offers


def _memory_share(config: RunConfig | None, inventory: Inventory, facts: ModelFacts) -> float:
    """Memory use of the fullest device on the best map, as a share of its usable memory; at most 1
    if all fits.
    """
    if config is None:
        return math.inf
    stages, work = stages_of(config, facts), workload(config.rollout, config.simulation)
    try:
        maps = device_maps(config.placement, placement_request_of(config), inventory)
    except ConfigError:
        return math.inf
    return min(fit_of(stages, work, devices).share for devices in maps)


def _changes(config: RunConfig, inventory: Inventory) -> Iterator[Change]:
    """Settings that save memory, the cheapest first."""
    engine, trainer = layouts(config)
    # What a component does not have is no change (`_setting`), so all are proposed to all.
    growing = [n for n in (2, 4, 8, 16, 32, 64) if n <= len(inventory)]
    yield _setting("trainer", activation_checkpointing="selective")
    yield _setting("trainer", activation_checkpointing="full")
    yield _setting("trainer", activation_offload=True)
    yield _setting("trainer", activation_checkpointing="full", activation_offload=True)
    yield _setting("trainer", moments="bfloat16")
    yield _setting("trainer", moments="int8")
    yield from (
        _setting("trainer", micro_batch_tokens=trainer.micro_batch_tokens // n) for n in (2, 4, 8)
    )
    yield _setting("engine", dtype="bfloat16")
    yield _setting("trainer", dtype="bfloat16")
    yield from (
        _setting("engine", max_context=n)
        for n in (32768, 16384, 8192)
        if n < (engine.max_context or 2**31)
    )
    yield from (_setting("engine", memory_fraction=n) for n in (0.6, 0.4, 0.3))
    yield _setting("engine", kv_cache_gib=None)
    yield _setting("engine", sleep_mode=True)
    yield from (
        _setting("engine", tensor_parallel=n) for n in (1, *growing) if n <= max(inventory.sizes)
    )
    yield from (_setting("trainer", world_size=n) for n in growing)
    for axis in AXES[1:]:
        yield from (_setting("trainer", world_size=len(inventory), **{axis: n}) for n in growing)
    if config.placement.lists or config.placement.name != "auto":
        placement = config.placement.model_copy(
            update={"name": "auto", "engine": None, "trainer": None}
        )
        lists = [f"placement.{role}=null" for role in config.placement.lists]
        yield Change(
            ("placement=auto", *lists),
            lambda config: config.model_copy(update={"placement": placement}),
        )
    yield _setting("trainer", optimizer_offload=True)
    yield _setting("trainer", offload=True, zero_stage=3)
    others = [name for name, _ in plugins.usable("trainers") if name != config.trainer.name]
    for name in others:
        yield _trainer(name)
        yield from (_trainer(name, world_size=n) for n in growing)
        yield _trainer(name, optimizer_offload=True)
        yield _trainer(name, offload=True, zero_stage=3)


def _setting(section: str, **update: Any) -> Change:
    """Other values in one section; no change if the section has no such setting, or rejects the
    value.
    """

    def apply(config: RunConfig) -> RunConfig | None:
        chosen: Component = getattr(config, section)
        model = type(chosen.settings)
        values = chosen.settings.model_dump()
        if not update.keys() <= model.model_fields.keys() or {**values, **update} == values:
            return None
        try:
            settings = model.model_validate({**values, **update})
        except ValidationError:
            return None
        return config.model_copy(update={section: replace(chosen, settings=settings)})

    return Change(_format_settings(section, update), apply)


def _trainer(name: str, **update: Any) -> Change:
    """Another trainer that can have several ranks, with all settings that both share."""

    def apply(config: RunConfig) -> RunConfig | None:
        factory = plugins.load("trainers", name)
        model: Any = plugins.nested_settings(factory)
        if (
            model is None
            or TrainerSettingsOffers.of(model).layout is None
            or not update.keys() <= model.model_fields.keys()
        ):
            return None
        shared = {
            key: value
            for key, value in config.trainer.settings.model_dump().items()
            if key in model.model_fields
        }
        try:
            settings = model.model_validate({**shared, **update})
        except ValidationError:
            return None
        if not settings.layout().grows:
            return None
        return config.model_copy(update={"trainer": Component(name, factory, settings)})

    return Change((f"trainer={name}", *_format_settings("trainer", update)), apply)


def _format_settings(section: str, update: dict[str, Any]) -> tuple[str, ...]:
    return tuple(f"{section}.{key}={in_yaml(value)}" for key, value in update.items())
