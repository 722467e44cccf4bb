"""Settings as they are written: a YAML file and `a.b=c` overrides, with the origin of every value.

`engine: local` is short for `engine: {name: local}`, in the file and on the command line.
"""

import difflib
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from agentrl.config.overrides import read_override
from agentrl.config.run_config import COMPONENTS, HELPERS
from agentrl.errors import ConfigError
from agentrl.net.credentials import refuse_credentials
from agentrl.settings.yaml_values import read_yaml, value_of
from agentrl.tasks.rows import is_data

_NAMED = (*COMPONENTS, *HELPERS, "reward", "trackers", "env", "model", "placement")
_MIXTURE, _SUITES = LISTS = (("env", "mixture"), ("evaluation", "suites"))
"""Sections that are lists of sections, of which some are components."""


def _is_named(path: tuple[str, ...]) -> bool:
    """True if a name alone may stand for the section at `path`."""
    if len(path) == 1:
        return path[0] in _NAMED
    if path[:2] == _SUITES:
        return (len(path) == 4 and path[3] == "reward") or _is_part(path)
    if path[:2] == _MIXTURE:
        return (
            len(path) == 3
            or (len(path) == 4 and path[3] in ("tasks", "reward", "algorithm"))
            or _is_part(path)
        )
    return path == ("rollout", "context") or path[:-1] == ("env", "agents") or _is_part(path)


def _as_listed(path: tuple[str, ...]) -> tuple[str, ...] | None:
    """The path under which the items of a list are kept by their numbers, if a list at `path` is of
    sections.
    """
    if path in (("env",), _MIXTURE):
        return _MIXTURE
    return (
        path
        if path in (("reward",), ("trackers",), _SUITES)
        or (path[:2] in LISTS and path[3:] == ("reward",))
        else None
    )


@dataclass(slots=True)
class Source:
    """A nested mapping under construction, and where each of its leaves was written."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def set(self, path: Sequence[str], value: Any, origin: str) -> None:
        refuse_credentials(value, f"{'.'.join(path)} ({origin})")
        listed = _as_listed(tuple(path))
        # An override of a list replaces all of its old items.
        if listed is not None and isinstance(value, list | str):
            self._forget(tuple(path), keep_one=isinstance(value, str))
        if listed is not None and isinstance(value, list) and value:
            path, value = listed, {str(number): part for number, part in enumerate(value)}
        if isinstance(value, str) and _is_tasks(tuple(path)) and is_data(value):
            value = {"name": "dataset", "data": value}
        if isinstance(value, str) and _is_named(tuple(path)):
            path = (*path, "name")
        is_template = path[-1] in ("prompt", "answer") and _is_tasks(tuple(path[:-1]))
        if is_template and isinstance(value, dict) and [*value.values()] == [None]:
            value = f"{{{next(iter(value))}}}"  # YAML takes the template `{question}` for a mapping
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                self.set((*path, str(key)), inner, origin)
            return
        node = self.values
        for i, key in enumerate(path[:-1]):
            inner = node.setdefault(key, {})
            if inner is None:  # a section that was written without settings
                inner = node[key] = {}
            if not isinstance(inner, dict):
                raise ConfigError(
                    f"{'.'.join(path)} ({origin}): {'.'.join(path[: i + 1])} is {inner!r}, not a"
                    " section"
                )
            node = inner
        node[path[-1]] = value
        self.origins[".".join(path)] = origin

    def value(self, path: Sequence[str]) -> Any:
        """The value at a path; None if there is none."""
        node: Any = self.values
        for part in path:
            node = node.get(part) if isinstance(node, dict) else None
        return node

    def remove(self, path: Sequence[str]) -> list[str]:
        """Remove what stands at a path, and the sections that are empty then; returns the leaves
        that there were.
        """
        for depth in range(len(path), 0, -1):
            holder = self.value(path[: depth - 1])
            if not isinstance(holder, dict) or (depth < len(path) and holder.get(path[depth - 1])):
                break
            holder.pop(path[depth - 1], None)
        at = ".".join(path)
        gone = [key for key in self.origins if f"{key}.".startswith(f"{at}.")]
        for key in gone:
            del self.origins[key]
        return gone

    def _forget(self, path: tuple[str, ...], *, keep_one: bool) -> None:
        """Remove the old settings of a list that is written again, unless only one component gets a
        new name.
        """
        node: Any = self.values
        for key in path[:-1]:
            node = node.get(key) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            return
        old = node.get(path[-1])
        several = {"0", "mixture"} & old.keys() if isinstance(old, dict) else set()
        if keep_one and not several:
            return
        # What stands beside the list is kept.
        if path == ("env",) and "mixture" in several and not keep_one:
            path, node = _MIXTURE, old
        node.pop(path[-1], None)
        gone = f"{'.'.join(path)}."
        self.origins = {
            key: origin for key, origin in self.origins.items() if not f"{key}.".startswith(gone)
        }


def _is_part(path: tuple[str, ...]) -> bool:
    """True if this is the path of a tracker, or of a part of a reward: `reward.1`,
    `env.mixture.0.reward.1`.
    """
    inside = len(path) == 2 or (len(path) == 5 and path[:2] in LISTS)
    is_listed = (inside and path[-2] == "reward") or (len(path) == 2 and path[0] == "trackers")
    return is_listed and path[-1].isdigit()


def _is_tasks(path: tuple[str, ...]) -> bool:
    """True if this is the path of a section that says where tasks come from."""
    return path == ("tasks",) or (len(path) == 4 and path[:2] == _MIXTURE and path[3] == "tasks")


def read_settings(
    path: Path, overrides: Iterable[str] = (), *, without: Iterable[str] = ()
) -> Source:
    """Read a YAML file, leave out the leaves `without` of it, and apply `a.b=c` overrides.

    Raises:
        ConfigError: the file or an override cannot be read.
    """
    source = Source()
    source.set(("run_dir",), f"runs/{path.stem}", "the config's file name")
    _read_file(path, source)
    for key in without:
        source.remove(key.split("."))
    for override in overrides:
        keys, value = read_override(override)
        source.set(keys, value, "command line")
    _find_programs_near(path, source)
    return source


def read_text(text: str) -> Source:
    """Read a whole config, as `RunConfig.to_yaml` writes it.

    Raises:
        ConfigError: it is no mapping in YAML.
    """
    source, root = Source(), read_yaml(text, "config")
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError("a config must be a mapping of settings, such as `steps: 100`")
    _read_node(root, (), Path("config"), source)
    return source


def _find_programs_near(path: Path, source: Source) -> None:
    """Let the modules of a program (`agent:...`) be found in the folder of the config file too,
    after all other places.

    The folder becomes a setting: a resumed run reads its own config file, which lies elsewhere.
    """
    env = source.values.get("env")
    if not isinstance(env, dict) or not str(env.get("name")).startswith("agent:"):
        return
    if not env.get("folder"):
        source.set(("env", "folder"), str(path.absolute().parent), "the config's folder")
    if (folder := str(env["folder"])) not in sys.path:
        sys.path.append(folder)


def _read_file(path: Path, source: Source) -> None:
    try:
        root = read_yaml(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise ConfigError(f"no config file {str(path)!r}.{_advice_for_missing(path)}") from None
    except IsADirectoryError:
        if (path / "config.yaml").is_file():
            raise ConfigError(
                f"{path} is the folder of a run. `agentrl train --resume"
                f" {shlex.quote(str(path))}` goes on with it; {path / 'config.yaml'} is its"
                " config, for another run"
            ) from None
        raise ConfigError(f"{path} is a folder, not a config file.{_configs_in(path)}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read as a config: {error}") from error
    if not isinstance(root, yaml.MappingNode) or not root.value:
        raise ConfigError(f"{path} must be a mapping of settings, such as `steps: 100`")
    _read_node(root, (), path, source)


def _advice_for_missing(missing: Path) -> str:
    """The advice to write in place of a config file that does not exist."""
    if "=" in missing.name:
        return " The config comes before what overrides it"
    there = {path.name: path for path in _yaml_files(missing.parent)}
    if close := difflib.get_close_matches(missing.name, there, n=1, cutoff=0.5):
        return f" Did you mean {str(there[close[0]])!r}?"
    if there:
        return _configs_in(missing.parent)
    return (
        " `agentrl demo` trains an example without one; `agentrl new-env NAME` writes an"
        " environment with its config"
    )


def _configs_in(folder: Path) -> str:
    """The YAML files in a folder, as the end of a sentence, or nothing."""
    found = _yaml_files(folder)
    return f" YAML files there: {', '.join(map(str, found))}" if found else ""


def _yaml_files(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")]) if folder.is_dir() else []


def _read_node(node: yaml.Node, keys: tuple[str, ...], path: Path, source: Source) -> None:
    if isinstance(node, yaml.MappingNode) and node.value:
        for key, inner in node.value:
            _read_node(inner, (*keys, key.value), path, source)
        return
    listed = _as_listed(keys)
    if listed is not None and isinstance(node, yaml.SequenceNode) and node.value:
        for number, part in enumerate(node.value):
            _read_node(part, (*listed, str(number)), path, source)
        return
    source.set(keys, value_of(node), f"{path}:{node.start_mark.line + 1}")
