"""The faults of a config, in lines that say where it was written and what to write."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from agentrl import plugins
from agentrl.settings.located import located

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
    "row_tokens": (
        "a micro-batch is samples end to end, without rows: leave it out (see micro_batch_tokens)"
    ),
    "cpu_offload": "write optimizer_offload",
    "gradient_checkpointing": "write activation_checkpointing=full for true, and none for false",
}
"""Settings of trainers that there were once, and what to do instead."""


_MAPPING = re.compile("a valid dictionary( or object to extract fields from| or instance of .*)?")
_LIST = re.compile("a valid (tuple|list|set)")
"""Types of Python and what they are in a config."""


def explained(
    model: type[BaseModel],
    error: ValidationError,
    value: Any,
    prefix: tuple[str, ...],
    origins: Mapping[str, str],
    *,
    partial: bool = False,
) -> Iterator[tuple[str, str]]:
    """(one line per problem of `value` that also tells the remedy, the problem's top-level
    section).

    `partial`: others add settings later, so that nothing is missing yet, and what all of them need
    of each other is not known.
    """
    for found in located(model, error.errors(), value):
        problem, keys, known = found.details, found.keys, found.known
        if partial and (problem["type"] == "missing" or not problem["loc"]):
            continue
        path = ".".join((*prefix, *keys))
        where = written_at(origins, path)
        if problem["type"] == "extra_forbidden":
            listed = ", ".join(known)
            line = (
                f"{path}: no such setting{where}.{plugins.nearest(keys[-1], known)} Known here:"
                f" {listed}"
            )
            if (new := _new_name(path)) is not None:
                line = f"{path}: renamed to {new}{where}: write it there"
            elif keys[-1].partition(".")[0] in known:
                section, _, rest = keys[-1].partition(".")
                line = (
                    f"{path}: write it within its section{where}, as `{section}: {{{rest}: ...}}`"
                )
            elif keys[-1] in GONE:
                line = f"{path}: no such setting any more{where}: {GONE[keys[-1]]}"
        elif problem["type"] == "finite_number":
            line = (
                f"{path}: {problem['input']} is not a finite number{where}: where there is no"
                " limit, leave the setting out, write null if it takes that, or a large number"
                " such as 1e9"
            )
        elif problem["type"] == "string_type" and isinstance(problem["input"], bool | int | float):
            line = (
                f"{path}: {problem['input']!r} is no text{where}: put quotes around it"
                f" ({path}=\"'...'\" for a shell)"
            )
        elif problem["type"] == "path_type":
            line = (
                f"{path}: {problem['input']!r:.80} is no path{where}: write that of a file or"
                " folder (. is the current one), or leave the setting out"
            )
        elif problem["type"] in ("union_tag_invalid", "union_tag_not_found"):
            tag, context = ", ".join(found.tags), problem["ctx"]
            wrong = f"there is no {context['tag']!r}" if "tag" in context else "missing"
            line = (
                f"{path}.{context['discriminator'].strip(chr(39))}: {wrong}{where}: write one of"
                f" {tag}"
            )
        else:
            given = (
                ""
                if problem["type"] == "missing" or not keys
                else f", got {problem['input']!r:.80}"
            )
            said = problem["msg"].removeprefix("Value error, ")
            said = _LIST.sub("a list", _MAPPING.sub("a mapping", said))
            line = f"{path}: {said}{given}{where}".removeprefix(": ")
        yield line, next(iter((*prefix, *keys)), "")


def _new_name(path: str) -> str | None:
    """The present name of a setting that once had another; None if it had none."""
    number = next((key for key in path.split(".") if key.isdigit()), "N")
    new = RENAMED.get(".".join("N" if key.isdigit() else key for key in path.split(".")))
    return None if new is None else new.replace(".N.", f".{number}.")


def written_at(origins: Mapping[str, str], path: str) -> str:
    origin = origins.get(path) or next(
        (o for key, o in origins.items() if key.startswith(f"{path}.")), None
    )
    return f" ({origin})" if origin else ""
