"""From nested values to a validated config. All errors are reported together, before anything starts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from agentrl import plugins
from agentrl.config.components import component_of, entries_of, helper_of, rewards_of, trackers_of
from agentrl.config.problems import explained
from agentrl.config.run_config import COMPONENTS, HELPERS, RunConfig
from agentrl.config.source import LISTS
from agentrl.credentials import refuse_credentials
from agentrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A validated config, and the origin of each value that is not a default."""

    config: RunConfig
    origins: Mapping[str, str]

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        """(dotted key, value, origin) of every setting."""
        for key, value in _leaves(self.config.model_dump(mode="json")):
            yield key, value, self._origin(key)

    def _origin(self, key: str) -> str:
        """Where a setting was written, which may be in a list."""
        while key and key not in self.origins:
            key = key.rpartition(".")[0]
        return self.origins.get(key) or "default"


def validate_config(values: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> LoadedConfig:
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
            sections[at[0]] = entries_of(sections.get(at[0], {}), at, sections.get("algorithm"), origins)
        except ConfigError as error:
            problems.append(str(error))
            del sections[at[0]]
    if not problems:
        try:
            sections |= {helper: helper_of(helper, sections, values, origins) for helper in HELPERS}
        except ConfigError as error:
            problems.append(str(error))
    try:
        config = RunConfig.model_validate(sections)
    except ValidationError as error:
        failed = {problem.split(":")[0].split(".")[0] for problem in problems}
        problems += [
            line
            for line, at in explained(RunConfig, error, (), origins)
            if at not in failed or at not in (*COMPONENTS, "reward", "trackers", "env", "evaluation")
        ]
    if problems:
        raise ConfigError("\n".join(problems))
    for env in config.envs.values():
        if not env.foreign:
            plugins.load("envs", env.name)
    return LoadedConfig(config, origins)


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and value and all(isinstance(inner, dict) for inner in value):
        yield from _leaves({str(number): inner for number, inner in enumerate(value)}, prefix)
    else:
        yield prefix, value
