"""What is wrong with a config, in lines that say where it was written and what to write."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import (
    BaseModel,
    ValidationError,
)

from agentrl import plugins

RENAMED = {
    "demonstrations": "recipe.demonstrations",
    "preferences": "recipe.preferences",
    "env.mixture.N.max_turns": "env.mixture.N.budget.turns",
    "evaluation.suites.N.max_turns": "evaluation.suites.N.budget.turns",
    "rollout.deadlines.update_weights": "weights.deadline",
    "rollout.max_turns": "rollout.budget.turns",
    "rollout.weight_update": "weights.update",
    "shaping": "batch_processing",
    "simulation.in_turns": "simulation.time_shared",
}
"""Old names of settings, with their present ones; N is the number of an entry."""
GONE = {
    "row_tokens": "a micro-batch is samples end to end, without rows: leave it out (see micro_batch_tokens)",
    "cpu_offload": "write optimizer_offload",
    "gradient_checkpointing": "write activation_checkpointing=full for true, and none for false",
}
"""Settings of trainers that there were once, and what to do instead."""


def explained(
    model: type[BaseModel],
    error: ValidationError,
    prefix: tuple[str, ...],
    origins: Mapping[str, str],
    *,
    partial: bool = False,
) -> Iterator[tuple[str, str]]:
    """(one line per problem that also tells the remedy, the problem's top-level section).

    `partial`: others add settings later, so that nothing is missing yet, and what all of them need of each other is
    not known.
    """
    for problem in error.errors():
        if partial and (problem["type"] == "missing" or not problem["loc"]):
            continue
        keys, known = _locate(model, [str(part) for part in problem["loc"]])
        path = ".".join((*prefix, *keys))
        where = written_at(origins, path)
        if problem["type"] == "extra_forbidden":
            listed = ", ".join(known)
            line = f"{path}: no such setting{where}.{plugins.nearest(keys[-1], known)} Known here: {listed}"
            if (new := _renamed(path)) is not None:
                line = f"{path}: renamed to {new}{where}: write it there"
            elif keys[-1].partition(".")[0] in known:
                section, _, rest = keys[-1].partition(".")
                line = f"{path}: write it within its section{where}, as `{section}: {{{rest}: ...}}`"
            elif keys[-1] in GONE:
                line = f"{path}: no such setting any more{where}: {GONE[keys[-1]]}"
        elif problem["type"] == "finite_number":
            line = (
                f"{path}: {problem['input']} is not a finite number{where}: where there is no limit, leave the setting "
                "out, write null if it takes that, or a large number such as 1e9"
            )
        elif problem["type"] == "string_type" and isinstance(problem["input"], bool | int | float):
            line = (
                f"{path}: {problem['input']!r} is no text{where}: put quotes around it ({path}=\"'...'\" for a shell)"
            )
        else:
            given = "" if problem["type"] == "missing" or not keys else f", got {problem['input']!r:.80}"
            line = f"{path}: {problem['msg']}{given}{where}".removeprefix(": ").replace("Value error, ", "", 1)
        yield line, next(iter((*prefix, *keys)), "")


def _renamed(path: str) -> str | None:
    """The present name of a setting that once had another; None if it had none."""
    number = next((key for key in path.split(".") if key.isdigit()), "N")
    new = RENAMED.get(".".join("N" if key.isdigit() else key for key in path.split(".")))
    return None if new is None else new.replace(".N.", f".{number}.")


def _locate(model: type[BaseModel], loc: Sequence[str]) -> tuple[list[str], list[str]]:
    """The path of a problem as it is written, without the tags of unions, and the field names of its section."""
    sections, keys = [model], []
    known: list[str] = []
    for key in loc:
        fields = [section.model_fields[key] for section in sections if key in section.model_fields]
        tagged = [section for section in sections if key in _tags(section)]
        known = list(dict.fromkeys(name for section in sections for name in section.model_fields))
        if fields or not tagged:
            keys.append(key)
        # A key that is neither a field nor a tag is a key of a mapping, whose value is the section.
        sections = [inner for f in fields for inner in _models(f.annotation)] if fields else tagged or sections
    return keys, known


def _tags(section: type[BaseModel]) -> set[Any]:
    """The literals that tell a section from the others of its union."""
    return {field.default for field in section.model_fields.values() if get_origin(field.annotation) is Literal}


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The sections in a type: the type itself, or those among its arguments."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models(inner)]


def written_at(origins: Mapping[str, str], path: str) -> str:
    origin = origins.get(path) or next((o for key, o in origins.items() if key.startswith(f"{path}.")), None)
    return f" ({origin})" if origin else ""
