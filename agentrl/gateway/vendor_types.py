"""Checks JSON by a type of a vendor's package.

Those types describe what Python programs may pass, and pydantic checks them as such. A request is
JSON, so a narrower check does, in a tenth of the time: sequences are lists, objects of the vendor's
classes cannot come, and where a field tells the types of a union apart, only that one is tried. A
list is checked up to its first wrong item, because each item yields hundreds of errors, and a
request may have millions of items.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from pkgutil import resolve_name
from typing import Any, get_args

from pydantic import TypeAdapter
from pydantic_core import SchemaValidator

Schema = dict[str, Any]


@cache
def checker(type_name: str, streams: bool) -> SchemaValidator:
    """Checks requests of the type `package.module:Name`. This imports the package, which takes
    seconds.

    If it is a union of requests with `stream` and without, `streams` says which.
    """
    kind = resolve_name(type_name)
    variants = get_args(kind) or (kind,)
    variant = next(
        (one for one in variants if ("stream" in one.__required_keys__) is streams), kind
    )
    schema: Any = TypeAdapter(variant).core_schema
    defined = {one["ref"]: one for one in schema.get("definitions", ())}
    return SchemaValidator(_for_json(schema, defined))


def _for_json(schema: Any, defined: Mapping[str, Schema]) -> Any:
    if isinstance(schema, list | tuple):
        return type(schema)(_for_json(one, defined) for one in schema)
    if not isinstance(schema, dict):
        return schema
    # A schema's `metadata` are dropped. A mapping of fields has no `type` that is a text, and may
    # have a field of that name.
    left_out = ("metadata",) if isinstance(schema.get("type"), str) else ()
    changed = {key: _for_json(one, defined) for key, one in schema.items() if key not in left_out}
    if schema.get("type") in ("generator", "list"):
        return changed | {"type": "list", "fail_fast": True}
    if schema.get("type") == "union":
        return _as_tagged_union(changed, defined)
    return changed


def _as_tagged_union(union: Schema, defined: Mapping[str, Schema]) -> Schema:
    """The union as a tagged union, if all of its types require a field whose literal values tell
    them apart. Then one type is tried instead of all.
    """
    choices = [one[0] if isinstance(one, tuple) else one for one in union["choices"]]
    choices = [one for one in choices if not _is_vendor_class(one)] or choices
    objects = [defined.get(one.get("schema_ref"), one) for one in choices]
    for name in ("role", "type"):
        values = [_literal_values(one, name) for one in objects]
        said = [value for of_one in values for value in of_one]
        if all(values) and len(set(said)) == len(said):
            by_value = {
                value: one for of_one, one in zip(values, choices, strict=True) for value in of_one
            }
            return {"type": "tagged-union", "discriminator": name, "choices": by_value}
    return union


def _is_vendor_class(schema: Schema) -> bool:
    """True if it is a class of the vendor's, or a choice among such."""
    if schema["type"] == "tagged-union":
        return all(map(_is_vendor_class, schema["choices"].values()))
    if schema["type"] == "union":
        return all(_is_vendor_class(one) for one in schema["choices"] if isinstance(one, dict))
    return bool(schema["type"] == "model")


def _literal_values(schema: Schema, name: str) -> Sequence[Any]:
    """The values of a field that an object must have; none if it may have others."""
    field = schema["fields"].get(name, {}) if schema["type"] == "typed-dict" else {}
    literal = field.get("schema", {})
    return literal["expected"] if field.get("required") and literal["type"] == "literal" else ()
