"""From nested values to a validated config. All errors are reported together, before anything
starts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agentrl import plugins
from agentrl.config.compatibility import first_problem
from agentrl.config.components import component_of, entries_of, helper_of, rewards_of, trackers_of
from agentrl.config.environments import envs_of
from agentrl.config.problems import explained, written_at
from agentrl.config.run_config import COMPONENTS, HELPERS, RunConfig
from agentrl.config.source import LISTS
from agentrl.conversation.eyes import seeing_family
from agentrl.errors import ConfigError, PluginError
from agentrl.models.tiny import SEEING, SIZES
from agentrl.models.tiny_vision import FAMILY
from agentrl.models.vision_families import FAMILIES
from agentrl.net.credentials import refuse_credentials
from agentrl.protocols import EngineOffers, EngineSettingsOffers, options_class_of, shows_images
from agentrl.protocols.component_settings import ClusterOffers
from agentrl.protocols.env import check_env_methods
from agentrl.tasks.env_config import OneEnv


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A validated config, and the origin of each value that is not a default."""

    config: RunConfig
    origins: Mapping[str, str]

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        """(dotted key, value, origin) of every setting."""
        for key, value in _leaves(self.config.model_dump(mode="json")):
            # A setting in a list that was written as a whole has the origin of the list.
            at = key
            while at and at not in self.origins:
                at = at.rpartition(".")[0]
            yield key, value, self.origins.get(at) or "default"


def validate_config(
    values: Mapping[str, Any], origins: Mapping[str, str] | None = None
) -> LoadedConfig:
    """Validate nested settings.

    Raises:
        ConfigError: something is wrong. Names every problem.
    """
    origins = origins or {}
    refuse_credentials(values, "")
    sections = dict(values)
    problems: list[str] = []
    for section in (*COMPONENTS, "reward"):
        raw = sections.get(section, {})
        try:
            sections[section] = (
                rewards_of(raw, origins)
                if section == "reward"
                else component_of(section, COMPONENTS[section], raw, origins)
            )
        except ConfigError as error:
            problems.append(str(error))
            sections.pop(section, None)
    try:
        sections["trackers"] = trackers_of(sections.get("trackers", ["tensorboard"]), origins)
    except ConfigError as error:
        problems.append(str(error))
        sections.pop("trackers", None)
    for at in LISTS:
        try:
            sections[at[0]] = entries_of(
                sections.get(at[0], {}), at, sections.get("algorithm"), origins
            )
        except ConfigError as error:
            problems.append(str(error))
            del sections[at[0]]
    if not problems:
        try:
            sections |= {helper: helper_of(helper, sections, values, origins) for helper in HELPERS}
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        # These sections were not made, so nothing is known of them.
        sections = {name: raw for name, raw in sections.items() if name not in HELPERS}
    try:
        config = RunConfig.model_validate(sections)
        problems += filter(None, [first_problem(config)])
    except ValidationError as error:
        failed = {problem.split(":")[0].split(".")[0] for problem in problems}
        problems += [
            line
            for line, at in explained(RunConfig, error, sections, (), origins)
            if at not in failed
            or at not in (*COMPONENTS, "reward", "trackers", "env", "evaluation")
        ]
    if problems:
        raise ConfigError("\n".join(problems))
    _check_plugin_names(config, origins)
    return LoadedConfig(config, origins)


def _check_plugin_names(config: RunConfig, origins: Mapping[str, str]) -> None:
    """Check the names of plug-ins that have no section."""
    for _, env in envs_of(config):
        factory = plugins.load("envs", env.name)
        plugins.check_callable("envs", env.name, factory)
        made_by = factory.made_by if isinstance(factory, plugins.FileEnv) else factory
        if isinstance(made_by, type):
            check_env_methods(env.name, made_by)
    try:
        plugins.load("weight_transports", config.weights.transport)
    except PluginError as error:
        where = written_at(origins, "weights.transport")
        raise ConfigError(f"weights.transport: {error}{where}") from error


def check_options(loaded: LoadedConfig) -> None:
    """Check the options of environments that say which they take, as far as these stand in the
    config.

    Raises:
        ConfigError: an environment takes no such option, or not this value, or would show pictures
            that the model or the engine cannot read.
    """
    named, blind = envs_of(loaded.config), blind_part(loaded.config)
    if problems := [
        line
        for section, env in named
        for line in _options_problems(section, env, loaded.origins, blind)
    ]:
        raise ConfigError("\n".join(problems))


def check_installed(config: RunConfig) -> None:
    """Check that what the cluster, the engine and the trainers import is installed.

    The engine and the trainers are not looked at where the cluster may have them on machines of
    others.

    Raises:
        ConfigError: something is not; says what to write.
    """
    chosen = [("cluster", config.cluster)]
    if not ClusterOffers.of(config.cluster.settings).has_others:
        sections = ("engine", "trainer", *HELPERS)
        chosen += [
            (name, found) for name in sections if (found := getattr(config, name)) is not None
        ]
    missing = {
        module: f"{section}={component.name} needs the package {module}, which is not installed: "
        f"{remedy}"
        for section, component in chosen
        for module, remedy in component.settings.needs().items()
        if find_spec(module) is None
    }
    if missing:
        raise ConfigError("\n".join(missing.values()))
    check_by_modules(config)


def check_by_modules(config: RunConfig) -> None:
    """Check the settings that only the modules of engine and trainers can judge, where these are
    installed. Elsewhere, the workers check them when they start.

    Raises:
        ConfigError: one is wrong.
    """
    for section in ("engine", "trainer", *HELPERS):
        component = getattr(config, section)
        if component is not None and all(map(find_spec, component.settings.needs())):
            component.settings.check_installed()


def blind_part(config: RunConfig) -> str:
    """The part of a run that reads text alone, and what to take instead; empty if all see.

    A model on the hub is not there yet: its renderer refuses pictures when an episode shows some.
    """
    name = config.model.name
    is_blind = name in SIZES and name not in SEEING
    if is_blind or (Path(name).is_dir() and seeing_family(Path(name)) not in FAMILIES):
        known = ", ".join(FAMILIES)
        return f"model={name} reads text alone: take a model of {known}, or model=tiny_vision"
    engine = config.engine
    if not EngineOffers.of(engine.factory).reads_images:
        return f"engine={engine.name} reads text alone: write engine=local"
    why_blind = EngineSettingsOffers.of(engine.settings).why_blind
    sees = name in SEEING or Path(name).is_dir()
    if why_blind is not None and sees and (why := why_blind(_model_config(name))):
        return f"engine={engine.name} cannot read them: {why}"
    return ""


def _model_config(model: str) -> Any:
    """transformers' config of a model that sees: in a folder, or made at the start."""
    from transformers import AutoConfig

    if model in SEEING:
        return AutoConfig.for_model(FAMILY)
    return AutoConfig.from_pretrained(model, local_files_only=True)


def _options_problems(
    section: tuple[str, ...], env: OneEnv, origins: Mapping[str, str], blind: str
) -> Iterator[str]:
    """The faults in the options of an environment. Tasks may add some, and wrappers may take some
    away. `blind`: the part of the run that reads no pictures.
    """
    shape = options_class_of(plugins.load("envs", env.name))
    if env.wrappers or shape is None:
        return
    try:
        options = shape.model_validate(env.options)
        if blind and shows_images(options):
            yield (
                f"{'.'.join((*section, 'options'))}: {env.name} would show pictures, and {blind};"
                " or choose what it says in words, such as view: grid"
            )
    except ValidationError as error:
        yield from (
            line
            for line, _ in explained(
                shape, error, env.options, (*section, "options"), origins, partial=True
            )
        )


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and value and all(isinstance(inner, dict) for inner in value):
        yield from _leaves({str(number): inner for number, inner in enumerate(value)}, prefix)
    else:
        yield prefix, value
