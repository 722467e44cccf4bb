"""Plug-ins: a name or `package.module:Name` to an object, with did-you-mean.

The built-in plug-ins register as a user's package does, by an entry point:

    [project.entry-points."agentrl.envs"]
    my_game = "my_package.game:MyGame"
"""

import difflib
import importlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from agentrl.errors import PluginError
from agentrl.protocols import Settings

GROUPS = ("envs", "rewards", "engines", "trainers", "algorithms", "recipes", "clusters", "trackers")
_FOLDERS = ("envs", "rewards", "trainers")


@dataclass(frozen=True, slots=True)
class Plugin:
    """One registered plug-in: its name, where it is written, and the distribution that brings it."""

    kind: str
    name: str
    address: str
    origin: str


class NoSettings(Settings):
    """The `Config` of a plug-in that has none."""


@dataclass(frozen=True, slots=True)
class Component:
    """A plug-in that was chosen by name, with its validated settings."""

    name: str
    factory: Any
    settings: Settings

    def dump(self) -> dict[str, Any]:
        """As it is written in a config."""
        return {"name": self.name, **self.settings.model_dump(mode="json")}

    def make(self, *args: Any, **kwargs: Any) -> Any:
        """The plug-in itself: its class called with its settings."""
        return self.factory(self.settings, *args, **kwargs)


def nearest(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the most similar of `known`, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def installed(kind: str) -> list[Plugin]:
    """All plug-ins of a kind ("envs", "engines", ...), by name."""
    found = {point.name: point for point in entry_points(group=f"agentrl.{kind}")}
    return [Plugin(kind, name, point.value, _origin(point)) for name, point in sorted(found.items())]


def load(kind: str, name: str) -> Any:
    """The object behind a name or a `package.module:Name`.

    Raises:
        PluginError: there is none, or its import failed.
    """
    if ":" in name:
        return _import(kind, name)
    points = {point.name: point for point in entry_points(group=f"agentrl.{kind}")}
    if name not in points:
        listed = ", ".join(sorted(points)) or "none"
        raise PluginError(
            f"no {kind[:-1]} named {name!r}.{nearest(name, points)} Installed: {listed}. "
            f'Another can be given as "package.module:Name", or registered in the entry-point group "agentrl.{kind}"'
        )
    return _import(kind, points[name].value)


def _import(kind: str, address: str) -> Any:
    module_name, _, attribute = address.partition(":")
    if module_name.split(".")[0] in _FOLDERS:
        raise PluginError(
            f"{address!r} would load the file a second time under another name: write 'agentrl.{address}' instead"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        missing = f" (sys.path begins with {sys.path[0]!r})" if isinstance(error, ModuleNotFoundError) else ""
        raise PluginError(f"cannot import {module_name!r} for the {kind[:-1]} {address!r}: {error}{missing}") from error
    try:
        found: Any = module
        for part in attribute.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        public = [name for name in vars(module) if not name.startswith("_")]
        raise PluginError(f"{module_name!r} has no {attribute!r}.{nearest(attribute, public)}") from error
    return found


def _origin(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "unknown"
