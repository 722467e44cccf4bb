"""The place of a problem in a value, and the branch of a union that was meant: pydantic reports the
problems of each branch.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails


@dataclass(frozen=True, slots=True)
class Located:
    """A problem and its place. `keys` is the path as it is written, `known` are the fields of its
    section, `tags` are those of the sections that may stand there.

    `branches` are the unions on the way, without those that a tag decides: how many keys lead to
    each, and pydantic's name of the branch.
    """

    details: ErrorDetails
    keys: tuple[str, ...]
    known: tuple[str, ...]
    tags: tuple[str, ...]
    branches: tuple[tuple[int, str], ...]


def located(model: type[BaseModel], errors: Iterable[ErrorDetails], value: Any) -> list[Located]:
    """The problems of `value`, with one branch of each union: that whose type the value has.

    If it has the type of none, one problem names all that it may be.
    """
    return list(_select_branches([_locate(model, one, value) for one in errors], 0))


def _locate(model: type[BaseModel], details: ErrorDetails, value: Any) -> Located:
    sections, keys = [model], list[str]()
    known: list[str] = []
    branches: list[tuple[int, str]] = []
    last = len(details["loc"]) - 1
    for at, key in enumerate(details["loc"]):
        fields = [
            section.model_fields[str(key)] for section in sections if key in section.model_fields
        ]
        tagged = [section for section in sections if key in _tags(section)]
        known = list(dict.fromkeys(name for section in sections for name in section.model_fields))
        held = isinstance(value, Mapping) and key in value
        if fields or held or isinstance(key, int) or (at == last and details["type"] == "missing"):
            keys.append(str(key))
            value = _value_inside(value, key)
        elif not tagged:
            branches.append((len(keys), key))
        # A key that is neither a field nor a tag is a key of a mapping, whose value is the section.
        sections = (
            [inner for f in fields for inner in _models(f.annotation)]
            if fields
            else tagged or sections
        )
    tags = tuple(str(tag) for section in sections for tag in _tags(section))
    return Located(details, tuple(keys), tuple(known), tags, tuple(branches))


def _value_inside(value: Any, key: str | int) -> Any:
    if isinstance(value, Mapping):
        return value.get(key)
    return (
        value[key]
        if isinstance(value, list | tuple) and isinstance(key, int) and key < len(value)
        else None
    )


def _select_branches(problems: Sequence[Located], level: int) -> Iterator[Located]:
    """The problems without those of branches that were not meant, from the `level`-th union on the
    way on.
    """
    unions: dict[tuple[str, ...], dict[str, list[Located]]] = {}
    for one in problems:
        if len(one.branches) <= level:
            yield one
            continue
        keys, branch = one.branches[level]
        unions.setdefault(one.keys[:keys], {}).setdefault(branch, []).append(one)
    for place, branches in unions.items():
        # A branch whose type the value has was meant: its problems are of what is inside. Of
        # several such branches, the one with the fewest problems is.
        fits = [
            found for found in branches.values() if any(_is_of_type(one, place) for one in found)
        ]
        if fits or len(branches) == 1:
            yield from _select_branches(min(fits or branches.values(), key=len), level + 1)
        else:
            yield _merge_branches([one for found in branches.values() for one in found])


def _is_of_type(problem: Located, place: tuple[str, ...]) -> bool:
    """True if the value at `place` has the type of the problem's branch, and something else is
    wrong with it.
    """
    if len(problem.keys) > len(place):
        return True
    return problem.details["type"] not in _OTHER_TYPE and not problem.details["type"].endswith(
        ("_type", "_parsing")
    )


_OTHER_TYPE = ("literal_error", "enum", "int_from_float", "is_instance_of")
_SHOULD = "Input should be "


def _merge_branches(problems: Sequence[Located]) -> Located:
    """One problem that says all that a value may be, as each branch says it."""
    wanted = [one.details["msg"].removeprefix(_SHOULD).partition(", ")[0] for one in problems]
    first = problems[0]
    return replace(
        first, details={**first.details, "type": "union", "msg": f"{_SHOULD}{' or '.join(wanted)}"}
    )


def _tags(section: type[BaseModel]) -> list[Any]:
    """The literals that tell a section from the others of its union."""
    return [
        field.default
        for field in section.model_fields.values()
        if get_origin(field.annotation) is Literal
    ]


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The sections in a type: the type itself, or those among its arguments."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models(inner)]
