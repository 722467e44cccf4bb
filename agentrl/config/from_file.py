"""A config from a YAML file and overrides.

The `config.yaml` of a run holds every setting: those that somebody has written, and those that
followed from them, such as all settings of the chosen trainer. Overrides work on it as on the
config that was written: what followed is as if it were not there, so that with `trainer=fsdp` the
settings that only `local` has are gone. What the overrides do not change stays as it was saved,
even where another version of agentrl has another default.
"""

import json
from collections.abc import Iterable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from agentrl.config.loading import LoadedConfig, validate_config
from agentrl.config.run_config import RunConfig
from agentrl.config.source import Source, read_settings, read_text
from agentrl.errors import ConfigError

ORIGINS = "origins.json"
"""The file beside the config of a run with the origin of each setting."""


def load_config(path: Path, overrides: Iterable[str] = ()) -> LoadedConfig:
    """Read a YAML file, apply `a.b=c` overrides, validate everything.

    Raises:
        ConfigError: something is wrong. Names every problem, where it was written, and the nearest
        valid name.
    """
    saved, overrides = read_settings(path), list(overrides)
    origins, moves = (
        saved_origins(path),
        all(override.startswith("run_dir=") for override in overrides),
    )
    if moves or not (origins or RunConfig.model_fields.keys() <= saved.values.keys()):
        source = read_settings(path, overrides)
        return validate_config(source.values, source.origins)
    followed = (
        {key for key, origin in origins.items() if origin == "default"}
        if origins
        else set(_redundant(saved))
    )
    fresh = read_settings(path, overrides, without=followed)
    kept = _kept(path, saved, fresh, followed)
    for key, value in kept.items():
        fresh.set(key.split("."), value, "default")
    return validate_config(fresh.values, fresh.origins)


def parse_config(text: str) -> RunConfig:
    """The config that `RunConfig.to_yaml` has written, as another process needs it.

    Raises:
        ConfigError: it is wrong here, for example because a plug-in is not installed.
    """
    source = read_text(text)
    return validate_config(source.values, source.origins).config


def saved_origins(path: Path) -> dict[str, str]:
    """The origins of the settings in a run's config; empty if none lie beside it."""
    try:
        found = json.loads(path.with_name(ORIGINS).read_text())
    except (OSError, ValueError):
        return {}
    return (
        {str(key): str(origin) for key, origin in found.items()} if isinstance(found, dict) else {}
    )


def _kept(path: Path, saved: Source, fresh: Source, followed: set[str]) -> dict[str, Any]:
    """The saved values of settings that would get other values now, and not because of overrides,
    but because defaults differ between versions.
    """
    after = _rows(fresh)
    others = {
        key: saved.value(key.split("."))
        for key in followed
        if key in after and key in saved.origins
    }
    others = {key: value for key, value in others.items() if value != after[key]}
    if not others:
        return {}
    try:
        before = _rows(read_settings(path, without=followed))
    except ConfigError:  # it needs the overrides
        return {}
    return {key: value for key, value in others.items() if after[key] == before.get(key)}


def _redundant(saved: Source) -> Iterator[str]:
    """The settings without which the config is the same, for a config without recorded origins."""
    rows, left = _rows(saved), Source(deepcopy(saved.values), dict(saved.origins))

    def removed(path: tuple[str, ...], node: dict[str, Any]) -> Iterator[str]:
        nonlocal left
        for key, inner in node.items():
            fewer = Source(deepcopy(left.values), dict(left.origins))
            gone = fewer.remove((*path, key))
            try:
                same = _rows(fewer) == rows
            except ConfigError:
                same = False
            if same:
                left = fewer
                yield from gone
            elif isinstance(inner, dict):
                yield from removed((*path, key), inner)

    yield from removed((), saved.values)


def _rows(source: Source) -> dict[str, Any]:
    return {key: value for key, value, _ in validate_config(source.values, source.origins).rows()}
