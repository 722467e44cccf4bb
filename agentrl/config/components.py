"""The components that the sections of a config name, with their validated settings."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from agentrl import plugins
from agentrl.config.problems import explained, written_at
from agentrl.config.run_config import brings_algorithm
from agentrl.errors import RAISED_BY_CODE, AgentRLError, ConfigError, describe
from agentrl.plugins import Component
from agentrl.protocols.algorithm import ActorCritic, AlgorithmOffers
from agentrl.protocols.component_settings import EngineSettingsOffers, TrainerSettingsOffers
from agentrl.protocols.recipe import RecipeOffers
from agentrl.protocols.trainer import check_trainer
from agentrl.scoring.config import RewardsConfig, name_of, settings_of_part

_DEFAULT_NAMES = {
    "reward": "environment",
    "engine": "local",
    "trainer": "local",
    "algorithm": "grpo",
    "cluster": "local",
    "recipe": "policy_gradient",
    "tasks": "seeded",
}
_EXAMPLES = {"rewards": "weight=0.5", "trackers": "project=NAME"}
"""A setting that may be written of a numbered component of a kind."""


def component_of(section: str, kind: str, raw: Any, origins: Mapping[str, str]) -> Component:
    raw = section_of(section, raw, origins)
    kind_of_section = section.rpartition(".")[2]
    by_default = (
        "dataset"
        if kind_of_section == "tasks" and "data" in raw
        else _DEFAULT_NAMES.get(kind_of_section)
    )
    name = raw.pop("name", by_default)
    if name is None:
        installed = ", ".join(dict.fromkeys(plugin.name for plugin in plugins.installed(kind)))
        raise ConfigError(
            f"{section}.name: missing{written_at(origins, section)}. Installed: {installed}"
        )
    if not isinstance(name, str):
        raise ConfigError(
            f"{section}.name: write text, got {name!r}{written_at(origins, f'{section}.name')}"
        )
    try:
        factory = plugins.load(kind, name)
        model = (
            settings_of_part(name, factory) if kind == "rewards" else plugins.settings_of(factory)
        )
        if kind != "rewards":  # of which an instance may be named too
            plugins.check_callable(kind, name, factory)
    except ConfigError as error:
        raise ConfigError(
            f"{section}.name: {error}{written_at(origins, f'{section}.name')}"
        ) from error
    if kind == "trainers" and isinstance(factory, type):
        check_trainer(section, name, factory)
    try:
        made = Component(name, factory, model.model_validate(raw))
    except ValidationError as error:
        lines = (
            line for line, _ in explained(model, error, raw, tuple(section.split(".")), origins)
        )
        raise ConfigError("\n".join(lines)) from error
    if kind == "algorithms":  # the rules between settings ask what it offers
        _check_makes(section, made, origins)
    return made


def _check_makes(section: str, component: Component, origins: Mapping[str, str]) -> None:
    """Check that a component can be made of its settings.

    Raises:
        ConfigError: its class raised something; what says more is passed on.
    """
    try:
        component.make()
    except AgentRLError:
        raise
    except RAISED_BY_CODE as error:
        where = written_at(origins, f"{section}.name")
        raise ConfigError(
            f"{section}.name: making {component.name!r} with its settings raised"
            f" {describe(error)}{where}"
        ) from error


def section_of(section: str, raw: Any, origins: Mapping[str, str]) -> dict[str, Any]:
    """The settings that are written as a section: its name alone, or a mapping, or nothing.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(raw, str):
        return {"name": raw}
    if raw is not None and not isinstance(raw, Mapping):
        raise ConfigError(
            f"{section}: write a name or settings, got {raw!r:.80}{written_at(origins, section)}"
        )
    return {key: value for key, value in (raw or {}).items() if key != "name" or value is not None}


def helper_of(
    section: str, made: Mapping[str, Any], values: Mapping[str, Any], origins: Mapping[str, str]
) -> Component | None:
    """The section `reference` or `critic`, or `None` if the algorithm does not use it."""
    chosen: Component = made["algorithm"]
    algorithm = chosen.make()
    recipe: Component = made["recipe"]
    offers = RecipeOffers.of(recipe.settings)
    learner = None if offers.own_algorithm else algorithm
    needed = (
        isinstance(learner, ActorCritic)
        if section == "critic"
        else offers.uses_reference or AlgorithmOffers.of(learner).uses_reference
    )
    own = section_of(section, values.get(section), origins)
    if not needed:
        if own:
            way_out = "set algorithm=ppo" if section == "critic" else "set algorithm.kl=0.01"
            user, way_out = f"the algorithm {chosen.name!r}", f"{way_out}, or leave the section out"
            if brings_algorithm(recipe):
                user, way_out = f"recipe={recipe.name}", "leave the section out"
            raise ConfigError(
                f"{section}{written_at(origins, section)}: {user}, as configured, uses none;"
                f" {way_out}"
            )
        return None
    trainer: Component = made["trainer"]
    shared = (
        {}
        if own.get("name", trainer.name) != trainer.name
        else trainer.settings.model_dump(exclude_unset=True)
    )
    shared.pop("lora", None)  # a reference is not trained, and a critic must train its head
    shared.pop("routing", None)  # other weights choose other experts
    helper = component_of(section, "trainers", {"name": trainer.name, **shared, **own}, origins)
    if TrainerSettingsOffers.of(helper.settings).lora is not None:
        raise ConfigError(
            f"{section}.lora{written_at(origins, f'{section}.lora')}: a {section} has no adapters;"
            " leave it out"
        )
    return helper


def component_like(other: Component, section: str, kind: str, own: Mapping[str, Any]) -> Component:
    """The component that a section configures, whose settings default to those of `other` if it has
    the same name.

    Raises:
        ConfigError: it does not exist, or a setting is wrong.
    """
    same = own.get("name", other.name) == other.name
    shared = other.settings.model_dump(exclude_unset=True) if same else {}
    return component_of(section, kind, {"name": other.name, **shared, **own}, {})


def in_dtype_of(engine: Component, trainer: Component) -> Component:
    """The engine, in the trainer's precision if the trainer's settings say which and the engine's
    do not. Otherwise both follow from their devices.
    """
    trained = TrainerSettingsOffers.of(trainer.settings).dtype
    if trained is None or EngineSettingsOffers.of(engine.settings).dtype != "auto":
        return engine
    return replace(engine, settings=engine.settings.model_copy(update={"dtype": trained}))


def as_trained_by(engine: Component, trainer: Component) -> Component:
    """The engine, with room for the trainer's adapters if that trains any and the engine can serve
    them, and keeping its choices of experts if the trainer asks for them.
    """
    trained = TrainerSettingsOffers.of(trainer.settings)
    offers = EngineSettingsOffers.of(engine.settings)
    if trained.lora is not None and offers.for_adapters is not None:
        engine = replace(engine, settings=offers.for_adapters(trained.lora))
    if trained.routing != "off" and offers.for_routing is not None:
        routed = EngineSettingsOffers.of(engine.settings).for_routing
        assert routed is not None
        engine = replace(engine, settings=routed())
    return engine


def entries_of(
    raw: Any, at: tuple[str, str], algorithm: Component | None, origins: Mapping[str, str]
) -> Any:
    """A section with a list of sections (`LISTS`), in which the components are made."""
    section, name = at
    if not isinstance(raw, dict) or not isinstance(raw.get(name), dict):
        return raw
    entries, problems = [], []
    for number, entry in raw[name].items():
        path = f"{section}.{name}.{number}"
        try:
            made = section_of(path, entry, origins)
            if made.get("tasks") is not None and section == "env":
                made["tasks"] = component_of(
                    f"{path}.tasks", "task_sources", made["tasks"], origins
                )
            if made.get("reward") is not None:
                made["reward"] = rewards_of(made["reward"], origins, f"{path}.reward")
            if (own := made.pop("algorithm", None)) is not None and algorithm is not None:
                shared = {
                    "name": algorithm.name,
                    **algorithm.settings.model_dump(exclude_unset=True),
                }
                settings = {**shared, **section_of(f"{path}.algorithm", own, origins)}
                made["algorithm"] = component_of(
                    f"{path}.algorithm", "algorithms", settings, origins
                )
            entries.append(made)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return {**raw, name: entries}


def rewards_of(raw: Any, origins: Mapping[str, str], section: str = "reward") -> RewardsConfig:
    """Read the section `reward`: a mapping of settings, or of part numbers to settings."""
    numbers = [key for key in raw if key.isdecimal()] if isinstance(raw, dict) else []
    if not numbers:
        if isinstance(raw, list):
            raise ConfigError(
                f"{section}: the list is empty{written_at(origins, section)}: name at least one"
                " part"
            )
        return RewardsConfig((component_of(section, "rewards", raw, origins),), False)
    found, problems = _numbered(section, "rewards", raw, origins)
    names = [name_of(part) for part in found]
    if twice := {name for name in names if names.count(name) > 1}:
        numbered = ", ".join(
            f"{section}.{number}" for number, name in enumerate(names) if name in twice
        )
        problems.append(
            f"{numbered}: more than one part is called {min(twice)!r}; give each a name with `as:"
            " NAME`"
        )
    if problems:
        raise ConfigError("\n".join(problems))
    return RewardsConfig(tuple(found), True)


def trackers_of(raw: Any, origins: Mapping[str, str]) -> tuple[Component, ...]:
    """Read the section `trackers`: a list of names and mappings of settings, or a mapping of their
    numbers to these.

    Raises:
        ConfigError: there is no such tracker or setting.
    """
    if isinstance(raw, dict) and not any(key.isdecimal() for key in raw):
        return (component_of("trackers", "trackers", raw, origins),)
    if not isinstance(raw, dict | list | tuple):
        raise ConfigError(
            f"trackers: {raw!r} is no list of trackers{written_at(origins, 'trackers')}: write []"
            " for none"
        )
    numbered = (
        raw if isinstance(raw, dict) else {str(number): one for number, one in enumerate(raw)}
    )
    found, problems = _numbered("trackers", "trackers", numbered, origins)
    names = [tracker.name for tracker in found]
    if twice := {name for name in names if names.count(name) > 1}:
        problems.append(
            f"trackers: {min(twice)} is named twice, and each has one run of its own: leave one out"
        )
    if problems:
        raise ConfigError("\n".join(problems))
    return tuple(found)


def _numbered(
    section: str, kind: str, raw: Mapping[str, Any], origins: Mapping[str, str]
) -> tuple[list[Component], list[str]]:
    """The components of a list, which `raw` has by their numbers, and the problems of others."""
    if wrong := [key for key in raw if key not in map(str, range(len(raw)))]:
        known = [
            number
            for number in sorted(raw)
            if number not in wrong and isinstance(raw[number], dict)
        ]
        parts = ", ".join(f"{number} is {raw[number].get('name')}" for number in known)
        raise ConfigError(
            f"{section}.{wrong[0]}{written_at(origins, f'{section}.{wrong[0]}')}: {section} is a"
            f" list here, so name the part, as in {section}.0.{_EXAMPLES[kind]}; there is"
            f" {parts or 'no part 0'}"
        )
    found, problems = list[Component](), list[str]()
    for number in map(str, range(len(raw))):
        try:
            found.append(component_of(f"{section}.{number}", kind, raw[number], origins))
        except ConfigError as error:
            problems.append(str(error))
    return found, problems
