"""The fault of a value, out of all that pydantic reports."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

DEEPEST = 100
"""Most levels of lists and mappings in each other. JSON's readers take some 200, counting what is
around a value.
"""


class Fault(NamedTuple):
    """One thing that is wrong: where, as a path of fields and numbers, what, and pydantic's name of
    its kind.
    """

    where: str
    what: str
    kind: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" if self.where else self.what


def faults(error: ValidationError, value: Any) -> list[Fault]:
    """The faults of `value`, one for each field.

    Where a field takes one of several types, pydantic reports what is wrong for each of them. The
    one that was meant is the one that got furthest; the others would name a false reason.
    """
    by_field: dict[Any, list[ErrorDetails]] = {}
    for one in error.errors(include_url=False):
        by_field.setdefault(one["loc"][:1], []).append(one)
    found = []
    for errors in by_field.values():
        meant = max(errors, key=lambda one: _depth_reached(one, value))
        where = ".".join(map(str, _place(meant, value)))
        found.append(Fault(where, meant["msg"].removeprefix("Value error, "), meant["type"]))
    return found


def _depth_reached(error: ErrorDetails, value: Any) -> tuple[int, bool]:
    """Sort key: the depth in the value that validation reached. Of equally deep ones, the message
    of a validator of ours comes before a type's name.
    """
    return len(_place(error, value)), not error["type"].endswith(("_type", "_parsing"))


def _place(error: ErrorDetails, value: Any) -> Sequence[int | str]:
    """The place in a value, without the types' names between the fields of unions."""
    place: list[int | str] = []
    for part in error["loc"]:
        inside = isinstance(value, list | tuple) and isinstance(part, int) and part < len(value)
        if inside or (isinstance(value, Mapping) and part in value):
            value = value[part]
            place.append(part)
    if error["type"] == "missing" or not place:
        place += error["loc"][-1:]
    return place
