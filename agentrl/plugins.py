"""Finds plug-ins by name or by `package.module:Name`, and suggests the nearest name for an unknown
one.

Built-in plug-ins register as those of a user's package do, by an entry point:

    [project.entry-points."agentrl.envs"]
    my_game = "my_package.game:MyGame"

An environment can also be given by an address `scheme:rest` ("gymnasium:Taxi-v4"), which needs no
registration. A package adds a scheme by an entry point for a function that turns `rest` into a
factory. The function's docstring begins with an example address:

    [project.entry-points."agentrl.env_schemes"]
    mine = "my_package.games:scheme"
"""

import asyncio
import difflib
import importlib
import logging
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from agentrl.errors import RAISED_BY_CODE, AgentRLError, PluginError, describe
from agentrl.net.credentials import refuse_credentials
from agentrl.package.distribution import DISTRIBUTION
from agentrl.protocols.env import Env
from agentrl.settings.base import Settings

GROUPS = (
    "envs",
    "env_schemes",
    "env_wrappers",
    "rewards",
    "engines",
    "renderers",
    "sandboxes",
    "coding_agents",
    "trainers",
    "algorithms",
    "recipes",
    "staleness_rules",
    "task_sources",
    "tool_formats",
    "clusters",
    "trackers",
    "weight_transports",
)
_FOLDERS = ("envs", "rewards", "trainers")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Plugin:
    """One registered plug-in: its kind, its name, its `module:Name`, and the distribution that
    provides it.
    """

    kind: str
    name: str
    address: str
    origin: str


class NoSettings(Settings):
    """The `Config` of a plug-in that has none."""


@dataclass(frozen=True, slots=True)
class Component:
    """A plug-in chosen by name, with its validated settings."""

    name: str
    factory: Any
    settings: Settings

    def dump(self) -> dict[str, Any]:
        """The component as a config writes it."""
        return {"name": self.name, **self.settings.model_dump(mode="json")}

    def make(self, *args: Any, **kwargs: Any) -> Any:
        """Make the plug-in: call its class with its settings."""
        return self.factory(self.settings, *args, **kwargs)

    def call(self, *args: Any) -> Any:
        """Call the plug-in, a function, with its settings as the last argument if it takes any."""
        return (
            self.factory(*args)
            if isinstance(self.settings, NoSettings)
            else self.factory(*args, self.settings)
        )


def nested_settings(factory: object) -> type[Settings] | None:
    """The nested class `Config` of a plug-in's class, if it has one."""
    config: type[Settings] | None = getattr(factory, "Config", None)
    return config


def settings_of(factory: Any) -> type[Settings]:
    """The settings class of a plug-in: its nested class `Config`, or a function's annotation of its
    parameter `settings`.

    Raises:
        PluginError: this class is not a subclass of `Settings`.
    """
    found: Any = nested_settings(factory)
    if found is None and isinstance(factory, FunctionType):
        found = factory.__annotations__.get("settings")
    if found is None:
        found = NoSettings
    if isinstance(found, str):  # under `from __future__ import annotations`
        found = factory.__globals__.get(found)
    if not (isinstance(found, type) and issubclass(found, Settings)):
        raise PluginError(
            f"the settings of {factory!r:.80} are {found!r:.80}: write a subclass of"
            " agentrl.Settings"
        )
    return found


def check_callable(kind: str, name: str, found: object) -> None:
    """Check that a plug-in is something that makes or does what is asked of its kind.

    Raises:
        PluginError: it is a value.
    """
    if not callable(found):
        raise PluginError(
            f"the {_singular(kind)} {name!r} is {found!r:.80}; it must be a class or a function"
        )


def nearest(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the most similar of `known`, or nothing; capitals do not count."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if not close or name.casefold() != close[0].casefold():
        written = {one.casefold(): one for one in reversed(names)}
        alike = difflib.get_close_matches(name.casefold(), written, n=1, cutoff=0.5)
        close = [written[alike[0]]] if alike else close
    return f" Did you mean {close[0]!r}?" if close else ""


def installed(kind: str) -> list[Plugin]:
    """All plug-ins of a kind ("envs", "engines", ...), by name. A name that several packages
    register is there for each of them.
    """
    return [
        Plugin(kind, name, _address_of(point), _origin(point.dist))
        for name, points in sorted(_registered(kind).items())
        for point in points
    ]


def usable(kind: str) -> Iterator[tuple[str, Any]]:
    """(name, object) of each plug-in of a kind that can be loaded, for what looks at all of them.

    A broken one is left out with a warning, since the caller has not named it.
    """
    for name in sorted(_registered(kind)):
        try:
            found = load(kind, name)
        except PluginError as error:
            logger.warning("the %s %r is left out: %s", _singular(kind), name, error)
            continue
        yield name, found


def load(kind: str, name: str) -> Any:
    """Load the object with a name or a `package.module:Name`; for an environment, also with a
    `scheme:rest`.

    A scheme takes precedence over a module of the same name.

    Raises:
        PluginError: there is no such plug-in, or its import failed.
        ConfigError: an environment's address contains credentials.
    """
    if kind == "envs":
        refuse_credentials(name, "env")
    if ":" in name:
        scheme = name.partition(":")[0]
        schemes = _registered("env_schemes") if kind == "envs" else {}
        if scheme in schemes:
            return _by_scheme(_only(scheme, "env_schemes", schemes[scheme]), name)
        return _import(kind, name, schemes)
    points = _registered(kind)
    if name not in points:
        listed = ", ".join(sorted(points)) or "none"
        raise PluginError(
            f"no {_singular(kind)} named {name!r}.{nearest(name, points)} Installed: {listed}. "
            'Another can be given as "package.module:Name", or registered in the entry-point group'
            f' "agentrl.{kind}"'
        )
    return _import(kind, _only(name, kind, points[name]))


def _by_scheme(address: str, name: str) -> Any:
    """What the scheme at an address makes of an environment's name.

    Raises:
        PluginError: the scheme raised something that says less.
    """
    scheme = _import("env_schemes", address)
    try:
        return scheme(name.partition(":")[2])
    except AgentRLError:
        raise
    except RAISED_BY_CODE as error:
        raise PluginError(f"the scheme of {name!r} raised {describe(error)}") from error


def _only(name: str, kind: str, points: Sequence[EntryPoint]) -> str:
    """The address that a name is registered with.

    Raises:
        PluginError: several packages register other ones by this name.
    """
    if len(points) > 1:
        listed = " and ".join(f"{_origin(one.dist)} ({_address_of(one)})" for one in points)
        raise PluginError(
            f"the {_singular(kind)} {name!r} is registered by {listed}: uninstall all but one, or"
            f" write the address of the one that you mean, such as {_address_of(points[-1])}"
        )
    return _address_of(points[0])


def _address_of(point: EntryPoint) -> str:
    """The `module:Name` of an entry point, without spaces, and without the extras that it may
    name (`module:Name [extra]`).
    """
    parts = EntryPoint.pattern.match(point.value)
    if parts is None:
        return point.value
    return f"{parts['module']}:{parts['attr']}" if parts["attr"] else parts["module"]


@dataclass(frozen=True, slots=True)
class FileEnv:
    """A factory of the environment in a file, for any process that can read the file: it pickles as
    two strings.
    """

    path: str
    attribute: str

    @property
    def made_by(self) -> Any:
        """The class, or the function, in the file."""
        return _attribute(_module_of(Path(self.path)), self.attribute, self.path)

    def __call__(self) -> Env:
        """Make the environment."""
        env: Env = self.made_by()
        return env

    def __getattr__(self, name: str) -> Any:
        """What the class states: its `isolation`, its `Options`, what it preloads."""
        if name.startswith("__"):  # of pickle and copy, which ask about this object
            raise AttributeError(name)
        return getattr(self.made_by, name)


def from_file(rest: str) -> Callable[[], Env]:
    """file:my_game.py:MyGame: an environment's class in a file; the file runs once per process.

    Raises:
        PluginError: there is no such file or class, or the file cannot be run.
    """
    written, _, attribute = rest.rpartition(":")
    path = Path(written or rest).expanduser().resolve()
    if not path.is_file():
        there = (
            sorted(str(file.name) for file in path.parent.glob("*.py") if file.is_file())
            if path.parent.is_dir()
            else []
        )
        raise PluginError(
            f"'file:{rest}': there is no file {str(path)!r}.{nearest(path.name, there)}"
        )
    module = _module_of(path)
    if not written or not attribute:
        listed = ", ".join(_public(module)) or "its names"
        raise PluginError(
            f"'file:{rest}' names no class: write 'file:{written or rest}:Name' with one of"
            f" {listed}"
        )
    check_callable("envs", f"file:{rest}", _attribute(module, attribute, str(path)))
    return FileEnv(str(path), attribute)


def _module_of(path: Path) -> ModuleType:
    """Import a file as a module named after its whole path, so that files with equal names are
    different modules.
    """
    name = f"agentrl_file_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"{str(path)!r} is not a Python file: its name must end in .py")
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except RAISED_BY_CODE as error:
        del sys.modules[name]
        raise PluginError(f"running {str(path)!r} raised {describe(error)}") from error
    return module


def _singular(kind: str) -> str:
    """The name for one plug-in of a kind: "task source" for "task_sources"."""
    one = kind.removesuffix("s") if not kind.endswith("xes") else kind.removesuffix("es")
    return one.replace("_", " ")


def _public(found: ModuleType) -> list[str]:
    return [name for name in vars(found) if not name.startswith("_")]


def _attribute(module: ModuleType, attribute: str, called: str) -> Any:
    found: Any = module
    try:
        for part in attribute.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise PluginError(
            f"{called!r} has no {attribute!r}.{nearest(attribute, _public(module))}"
        ) from error
    except RAISED_BY_CODE as error:  # of a module that imports its parts when they are asked for
        raise PluginError(f"{attribute!r} of {called!r} raised {describe(error)}") from error
    return found


def _import(kind: str, address: str, schemes: Iterable[str] = ()) -> Any:
    module_name, _, attribute = address.partition(":")
    if module_name.split(".")[0] in _FOLDERS:
        raise PluginError(
            f"{address!r} would load the file a second time under another name: write"
            f" 'agentrl.{address}' instead"
        )
    if not module_name or module_name.startswith("."):
        raise PluginError(
            f"the {_singular(kind)} {address!r} names no module: write 'package.module:Name'"
        )
    try:
        module = _module(module_name)
    except RAISED_BY_CODE as error:
        raise PluginError(_why_not_imported(kind, address, error, sorted(schemes))) from error
    if not attribute:
        raise PluginError(
            f"the {_singular(kind)} {address!r} names nothing in its module: write"
            f" '{module_name}:Name' with one of {', '.join(_public(module)) or 'its names'}"
        )
    return _attribute(module, attribute, module_name)


def _why_not_imported(kind: str, address: str, error: BaseException, schemes: Sequence[str]) -> str:
    """The reason why the module of an address cannot be imported: there is none, or its own code
    has failed, with the line in it.
    """
    name = address.partition(":")[0]
    what = f"{name!r} for the {_singular(kind)} {address!r}"
    if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
        other = f".{nearest(name, schemes)} Schemes: {', '.join(schemes)}" if schemes else ""
        return f"cannot import {what}: {error} (sys.path begins with {sys.path[0]!r}){other}"
    if isinstance(error, ImportError):
        return f"cannot import {what}: {describe(error)}"
    # An uncaught CancelledError would look like the end of a run.
    program = isinstance(error, SystemExit | asyncio.CancelledError)
    hint = ": put what is run as a program under `if __name__ == '__main__':`" if program else ""
    return f"importing {what} raised {describe(error)}{hint}"


def _module(name: str) -> ModuleType:
    """Import a module by name, also where a folder of that name hides it.

    A folder in the path is a package even without `__init__.py`, and comes before what is installed
    editable, whose finder is asked last: a checkout's own folder hides what was installed from it.
    """
    module = importlib.import_module(name)
    if getattr(module, "__file__", None) is None and "." not in name:
        finders = (finder for finder in sys.meta_path if finder is not PathFinder)
        specs = (finder.find_spec(name, None) for finder in finders)
        for spec in specs:
            if (
                spec is not None
                and spec.loader is not None
                and spec.origin not in (None, "built-in", "frozen")
            ):
                found = sys.modules[name] = module_from_spec(spec)
                spec.loader.exec_module(found)
                return found
    return module


def _registered(kind: str) -> Mapping[str, Sequence[EntryPoint]]:
    """The entry points of a kind by name: one each, or those of several packages that differ."""
    here = None if all(map(os.path.isabs, sys.path)) else Path.cwd()
    return _entry_points(here, *sys.path).get(f"agentrl.{kind}", {})


@lru_cache(maxsize=64)
def _entry_points(
    *_where: str | Path | None,
) -> Mapping[str, Mapping[str, Sequence[EntryPoint]]]:
    """The entry points of agentrl's groups in all installed packages; cached, as reading takes tens
    of milliseconds.
    """
    found = entry_points()
    ours = [
        point
        for group in found.groups
        if group.startswith("agentrl.")
        for point in found.select(group=group)
    ]
    # An old checkout still lists the distribution that had another name, with addresses of its
    # time.
    distributions = {point.dist for point in ours if point.value.startswith("agentrl.")}
    current = [one for one in distributions if one is not None and one.name == DISTRIBUTION]
    old = distributions.difference(current) if current else set()
    groups: dict[str, dict[str, list[EntryPoint]]] = {}
    for point in ours:
        if point.dist in old and point.value.startswith("agentrl."):
            continue
        same = groups.setdefault(point.group, {}).setdefault(point.name, [])
        if _address_of(point) not in map(_address_of, same):
            same.append(point)
    return groups


@lru_cache(maxsize=64)
def _origin(distribution: Distribution | None) -> str:
    """The name and version of a distribution; cached, as each of them is read from a file in
    milliseconds.
    """
    return f"{distribution.name} {distribution.version}" if distribution else "unknown"


def unbound(function: Any) -> Any:
    """The function inside a `functools.partial`; anything else unchanged."""
    while isinstance(function, partial):
        function = function.func
    return function
