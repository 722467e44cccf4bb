"""The facts of a run's config for a plan: model, stages, requested placement."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.config.components import component_like, in_dtype_of
from agentrl.config.run_config import RunConfig
from agentrl.errors import ConfigError
from agentrl.estimation.teacher import TeacherConfig
from agentrl.models.facts import PUBLISHED, ModelFacts, facts_of, model_facts
from agentrl.models.overrides import overridden_folder
from agentrl.models.source import description_folder
from agentrl.models.tiny import SIZES, model_config
from agentrl.placement.device_map import PlacementRequest
from agentrl.placement.devices import DeviceKind
from agentrl.placement.footprint import EngineLayout, TrainerLayout
from agentrl.plugins import Component
from agentrl.protocols import EngineOffers
from agentrl.protocols.component_settings import (
    ClusterOffers,
    EngineSettingsOffers,
    TrainerSettingsOffers,
)
from agentrl.protocols.recipe import RecipeOffers
from agentrl.rollout.agents import FrozenRoute
from agentrl.rollout.config import OpponentsConfig
from agentrl.simulate.stages import SentWeights, Stages


def model_of(config: RunConfig) -> ModelFacts:
    """The shape of a run's model; a randomly initialised one counts with the largest vocabulary
    that it can have.

    Of some published models, the package has the configs, so that a plan needs no network.

    Raises:
        ConfigError: there is no such model.
    """
    name, overrides = config.model.name, config.model.hf_overrides
    if name in SIZES:
        return facts_of(model_config(SIZES[name]), name)
    known = PUBLISHED / name
    if (
        not Path(name).exists()
        and config.model.revision is None
        and (known / "config.json").is_file()
    ):
        return replace(model_facts(overridden_folder(known, overrides)), name=name)
    facts = model_facts(description_folder(name, config.model.revision, overrides))
    return replace(facts, name=name) if overrides else facts


def with_defaults(config: RunConfig, facts: ModelFacts, kind: DeviceKind) -> RunConfig:
    """The config with what its trainers and its engine choose by the model and the devices, where
    the settings say nothing.
    """
    context = min(
        EngineSettingsOffers.of(config.engine.settings).max_context or facts.max_positions,
        facts.max_positions,
    )
    sections: dict[str, Component] = {}
    for section in ("trainer", "reference", "critic"):
        component: Component | None = getattr(config, section)
        if component is None:
            continue
        choose = TrainerSettingsOffers.of(component.settings).chosen
        if choose is not None:
            settings = choose(parameters=facts.parameters, context=context, gpu=kind.is_gpu)
            sections[section] = replace(component, settings=settings)
    choose = EngineSettingsOffers.of(config.engine.settings).chosen
    if choose is not None:
        trainer = TrainerSettingsOffers.of(sections.get("trainer", config.trainer).settings)
        settings = choose(kind=kind, context=context, trainer_dtype=trainer.dtype)
        sections["engine"] = replace(config.engine, settings=settings)
    return config.model_copy(update=sections)


def chosen_settings(written: RunConfig, chosen: RunConfig) -> Mapping[str, Any]:
    """The settings of engine and trainers that differ in the second config, by their dotted
    names.
    """
    settings: dict[str, Any] = {}
    for section in ("engine", "trainer", "reference", "critic"):
        before: Component | None = getattr(written, section)
        if before is None:
            continue
        values = before.settings.model_dump()
        after = getattr(chosen, section).settings.model_dump()
        settings |= {
            f"{section}.{name}": value for name, value in after.items() if value != values[name]
        }
    return settings


def stages_of(config: RunConfig, facts: ModelFacts) -> Stages:
    """The stages of a run.

    Raises:
        ConfigError: a component does not declare its layout on devices.
    """
    frozen = {route for route in config.env.agents.values() if isinstance(route, FrozenRoute)}
    recipe = config.recipe.settings
    others = len(frozen) + (recipe.num_engines if isinstance(recipe, OpponentsConfig) else 0)
    others += RecipeOffers.of(recipe).teacher is not None  # its engine counts as one more
    engine, trainer = layouts(config)
    reference, critic = (
        _layout_of("reference", config.reference),
        _layout_of("critic", config.critic),
    )
    return Stages(
        facts,
        engine,
        trainer,
        config.placement.assume,
        reference,
        critic,
        others,
        sent_weights(config),
    )


def sent_weights(config: RunConfig) -> SentWeights:
    """How a run sends new weights to the engines that follow its trainer."""
    updated = [config.engine]
    teacher = RecipeOffers.of(config.recipe.settings).teacher
    if isinstance(teacher, TeacherConfig):
        updated.append(engine_of_teacher(config, teacher))
    engines = [in_dtype_of(engine, config.trainer) for engine in updated]
    settings = [EngineSettingsOffers.of(engine.settings) for engine in engines]
    return SentWeights(
        config.weights.in_format_of(offered.dtype for offered in settings),
        on_devices=config.placement.name != "local"
        and not ClusterOffers.of(config.cluster.factory).one_device,
        reads_arrivals=all(EngineOffers.of(engine.factory).reads_arrivals for engine in engines),
        low_rank=TrainerSettingsOffers.of(config.trainer.settings).lora is not None,
        as_adapters=all(offered.for_adapters is not None for offered in settings),
    )


def engine_of_teacher(config: RunConfig, teacher: TeacherConfig) -> Component:
    """The settings of the teacher's engine, as the config has them."""
    return component_like(config.engine, "recipe.teacher.engine", "engines", teacher.engine)


def layouts(config: RunConfig) -> tuple[EngineLayout, TrainerLayout]:
    """The layouts on devices that engine and trainer declare."""
    return _layout_of("engine", config.engine), _layout_of("trainer", config.trainer)


def _layout_of(section: str, chosen: Component | None) -> Any:
    """The layout that a component declares; None if there is no component."""
    if chosen is None:
        return None
    kind = EngineSettingsOffers if section == "engine" else TrainerSettingsOffers
    layout = kind.of(chosen.settings).layout
    if layout is None:
        raise ConfigError(
            f"{section} {chosen.name!r} does not declare its layout on devices, so nothing can be"
            " planned: give its Config a method `layout`, as agentrl/placement/footprint.py"
            " describes, or write placement=local"
        )
    return layout()


def placement_request_of(config: RunConfig) -> PlacementRequest:
    """The requests of the settings of cluster, engine and trainer to a placement."""
    engine, trainer = layouts(config)
    return PlacementRequest(
        engines=ClusterOffers.of(config.cluster.settings).engines,
        tensor_parallel=engine.tensor_parallel,
        data_parallel=engine.data_parallel,
        ranks=trainer.mesh.world_size,
        has_engine=engine.here,
        trainer_grows=trainer.grows,
        splits=engine.splits,
    )
