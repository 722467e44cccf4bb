"""Write the reference pages that come from the code: `docs/settings.md` and `docs/metrics.md`.

    python docs/generate.py

tests/test_reference.py checks that the pages are what this script writes.
"""

import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from agentrl import plugins
from agentrl.config import COMPONENTS, RunConfig
from agentrl.observe.meanings import MEANINGS
from agentrl.plugins import Component, NoSettings
from agentrl.scoring.config import RewardsConfig

DOCS = Path(__file__).parent
KINDS = {**COMPONENTS, "reward": "rewards", "env.wrappers": "env_wrappers", "trackers": "trackers"}
"""Sections of the config that name a plug-in, and the plug-ins' kind."""
_SIMPLE = {
    int: "integer",
    float: "number",
    bool: "true or false",
    str: "text",
    Path: "path",
    type(None): "null",
    Any: "anything",
    Component: "as `trainer`",
    RewardsConfig: "as `reward`",
}
_CONTAINERS = {tuple: "list of {0}", list: "list of {0}", dict: "map of {0} to {1}"}
_BOUNDS = {
    "ge": "≥",
    "gt": ">",
    "le": "≤",
    "lt": "<",
    "min_length": "length ≥",
    "max_length": "length ≤",
}


@dataclass(frozen=True)
class Setting:
    """A row of the reference."""

    path: str
    type: str
    default: str
    meaning: str

    def __str__(self) -> str:
        cells = f"`{self.path}`", self.type, self.default, self.meaning
        return (
            "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
        )


def settings_of(model: type[BaseModel], prefix: str = "") -> Iterator[Setting]:
    """The settings of a section, those of the sections inside it included."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        inner = _section(field.annotation)
        if inner is not None:
            yield from settings_of(inner, f"{path}.")
        elif path not in KINDS and field.annotation is not Component:
            yield Setting(path, _type_of(field), _default_of(field), field.description or "")
            yield from _settings_of_forms(field.annotation, path)


def _settings_of_forms(annotation: Any, path: str) -> Iterator[Setting]:
    """The settings of each form that a section may have, such as those of `rollout.context: {name:
    last_k}`.
    """
    if (
        isinstance(annotation, type)
        and issubclass(annotation, BaseModel)
        and _form_of(annotation).startswith("name: ")
    ):
        for name, field in list(annotation.model_fields.items())[1:]:
            meaning = f"With `{_form_of(annotation)}`: {field.description or ''}"
            yield Setting(f"{path}.{name}", _type_of(field), _default_of(field), meaning)
    listed = _section(get_args(annotation)[0]) if get_origin(annotation) is tuple else None
    if listed is not None:
        for name, field in listed.model_fields.items():
            yield Setting(
                f"{path}.N.{name}", _type_of(field), _default_of(field), field.description or ""
            )
    for inner in get_args(annotation):
        yield from _settings_of_forms(inner, path)


def _section(annotation: Any) -> type[BaseModel] | None:
    """The settings that a field consists of, where it is a section."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if is_model and annotation.model_fields and not _form_of(annotation) else None


def _form_of(model: type[BaseModel]) -> str:
    """The field that tells a form of a section from its other forms, as it is written: "name:
    last_k".
    """
    name, field = next(iter(model.model_fields.items()), ("", None))
    values = get_args(field.annotation) if field and get_origin(field.annotation) is Literal else ()
    return f"{name}: {values[0]}" if len(values) == 1 else ""


def _type_of(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(limit, name)}"
        for limit in field.metadata
        for name, sign in _BOUNDS.items()
        if hasattr(limit, name)
    ]
    return ", ".join([_name_of(field.annotation), *bounds])


def _name_of(annotation: Any) -> str:
    """A type as a reader of a config sees it."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _name_of(args[0])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in args)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_name_of, args)))
    if origin in _CONTAINERS:
        return _CONTAINERS[origin].format(*[_name_of(arg) for arg in args if arg is not ...])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        form = _form_of(annotation)
        others = [name for name in annotation.model_fields if not form.startswith(f"{name}: ")]
        return "`{" + ", ".join([form, *others] if form else others) + "}`"
    return _SIMPLE[annotation]


def _default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined:
        return "required"
    if isinstance(default, BaseModel):
        default = default.model_dump(mode="json")
    if isinstance(default, Path):
        default = str(default)
    return f"`{_written(default)}`"


def _written(value: Any) -> str:
    """A value as YAML has it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_written(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_written, value)) + "]"
    named = {None: "null", True: "true", False: "false"}
    return (
        named[value]
        if value is None or isinstance(value, bool)
        else str(value)
        if value != ""
        else '""'
    )


def _table(rows: list[Setting]) -> list[str]:
    return ["| setting | value | default | meaning |", "|---|---|---|---|", *map(str, rows), ""]


def settings_page() -> str:
    """docs/settings.md."""
    lines = [
        "# Settings",
        "",
        (
            "This page lists every setting of a config file with its type, its default and its"
            " meaning. The command line"
        ),
        (
            "takes each one too, as `section.name=value`. `python docs/generate.py` writes it from"
            " the `Config` classes."
        ),
        "Numbers are finite, and at most 1e30, also in the settings of your own plug-ins.",
        "",
    ]
    rows = list(settings_of(RunConfig))
    by_section: dict[str, list[Setting]] = {}
    for row in rows:
        section, dot, _ = row.path.partition(".")
        by_section.setdefault(section if dot else "", []).append(row)
    lines += ["## The run", "", *_table(by_section.pop(""))]
    for section, of_section in by_section.items():
        lines += [f"## {section}", "", *_table(of_section)]
    for section, kind in KINDS.items():
        lines += [f"## {section}: plug-ins", "", _names_of(section, kind), ""]
        for plugin in [
            plugin
            for plugin in plugins.installed(kind)
            if plugin.origin.startswith("agentrl-train ")
        ]:
            config = plugins.settings_of(plugins.load(kind, plugin.name))
            rows = (
                []
                if config is NoSettings
                else list(settings_of(config, f"{section}." if kind in COMPONENTS.values() else ""))
            )
            lines += [
                f"### {section}: {plugin.name}",
                "",
                *(_table(rows) if rows else ["It has no settings.", ""]),
            ]
    return "\n".join(lines)


def _names_of(section: str, kind: str) -> str:
    return (
        f"`{section}: NAME` or `{section}: {{name: NAME, setting: value}}` chooses one of these, or"
        " one of your own by `package.module:Name`."
    )


def metrics_page() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        (
            "This page says what each metric means. A run writes them to `metrics.jsonl` in its"
            " folder, a line a step,"
        ),
        (
            "and to its trackers. Steps count from 0; evaluations have lines of their own. The page"
            " is written from"
        ),
        "`agentrl/observe/meanings.py` by `python docs/generate.py`.",
        "",
    ]
    for topic, meanings in MEANINGS.items():
        rows = [f"| `{name}` | {meaning} |" for name, meaning in meanings.items()]
        lines += [f"## {topic}", "", "| metric | meaning |", "|---|---|", *rows, ""]
    return "\n".join(lines)


PAGES = {"settings.md": settings_page, "metrics.md": metrics_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
