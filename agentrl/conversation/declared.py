"""The types that a tool declares of its parameters, for syntaxes of calls that write texts without
quotes.

There, nothing tells the text `12` from the number 12. The tool's schema does:

- where it allows a text, what is written is the text, to the letter. Only `null` (and `None`) is no
  text where it allows null, and a list or object is none where it allows that;
- where it allows no text, what is written is JSON;
- where it says nothing, what is written is JSON if that loses nothing (`12` does, `3.10` and
  `{"a":1}` do not), else a text.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from agentrl.conversation.tool_calls import refuse_constant

Tools = Sequence[Mapping[str, Any]]
"""Schemas of tools, in OpenAI's form."""
_PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}
"""Python's words for JSON's constants, which some templates write."""
_MAX_DEPTH = 16
"""Most references and alternatives that are followed: a schema may refer to itself."""


class Declared(NamedTuple):
    """A part of a schema, and the whole, which holds what the part refers to."""

    schema: Mapping[str, Any]
    root: Mapping[str, Any]

    @property
    def kinds(self) -> frozenset[str]:
        """The JSON types that are allowed; none if the schema does not say."""
        return _kinds(self.schema, self.root, _MAX_DEPTH)

    def inner(self, name: str) -> "Declared":
        """The declared type of an object's property, or of a parameter."""
        for one in _alternatives(self.schema, self.root, _MAX_DEPTH):
            found = _mapping(one.get("properties")).get(name)
            found = one.get("additionalProperties") if found is None else found
            if isinstance(found, Mapping):
                return Declared(found, self.root)
        return Declared({}, self.root)

    @property
    def items(self) -> "Declared":
        """The declared type of a list's items."""
        found = (one.get("items") for one in _alternatives(self.schema, self.root, _MAX_DEPTH))
        return Declared(next((one for one in found if isinstance(one, Mapping)), {}), self.root)


def declared(tools: Tools, name: str) -> Declared:
    """The declared types of the parameters of the tool with this name; nothing if there is none."""
    functions = (_mapping(tool.get("function", tool)) for tool in tools)
    found = next((one for one in functions if one.get("name") == name), {})
    schema = _mapping(found.get("parameters"))
    return Declared(schema, schema)


def value_of(written: str, declares: Declared) -> Any:
    """The value of the text between tags, by the rules at the head of this module."""
    kinds = declares.kinds
    if not kinds:
        value = _decode_json(written, written)
        # JSON that would be written back just so has lost nothing.
        forms = (json.dumps(value), json.dumps(value, ensure_ascii=False))
        return value if not isinstance(value, str) and written in forms else written
    if "string" not in kinds:
        text = written.strip()
        return _PYTHON_CONSTANTS[text] if text in _PYTHON_CONSTANTS else _decode_json(text, written)
    if "null" in kinds and written in ("null", "None"):
        return None
    if kinds & {"array", "object"}:
        value = _decode_json(written, written)
        if isinstance(value, list if "array" in kinds else dict) or (
            isinstance(value, dict) and "object" in kinds
        ):
            return value
    return written


def _decode_json(text: str, otherwise: str) -> Any:
    with suppress(ValueError, RecursionError):
        return json.loads(text, strict=False, parse_constant=refuse_constant)
    return otherwise


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _alternatives(
    schema: Mapping[str, Any], root: Mapping[str, Any], depth: int
) -> Sequence[Mapping[str, Any]]:
    """The schema itself, and all schemas that it refers to or combines."""
    if not depth:
        return ()
    parts = [
        part
        for key in ("anyOf", "oneOf", "allOf")
        for part in schema.get(key) or ()
        if isinstance(part, Mapping)
    ]
    if isinstance(schema.get("$ref"), str):
        parts.append(_resolve_reference(schema["$ref"], root))
    return [schema, *(one for part in parts for one in _alternatives(part, root, depth - 1))]


def _resolve_reference(reference: str, root: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Any = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        found = _mapping(found).get(step.replace("~1", "/").replace("~0", "~"))
    return _mapping(found)


def _kinds(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not depth:
        return frozenset()
    said: list[frozenset[str]] = []
    if (kind := schema.get("type")) is not None:
        said.append(frozenset([kind] if isinstance(kind, str) else kind))
    if isinstance(schema.get("enum"), list):
        said.append(frozenset(map(_kind_of_value, schema["enum"])))
    if "const" in schema:
        said.append(frozenset([_kind_of_value(schema["const"])]))
    if isinstance(schema.get("$ref"), str):
        said.append(_kinds(_resolve_reference(schema["$ref"], root), root, depth - 1))
    for key in ("anyOf", "oneOf"):
        if schema.get(key):
            each = [_kinds(_mapping(part), root, depth - 1) for part in schema[key]]
            # One alternative of any type allows every type.
            said.append(frozenset().union(*each) if all(each) else frozenset())
    said += [_kinds(_mapping(part), root, depth - 1) for part in schema.get("allOf") or ()]
    # All keywords of a schema hold at once; those that say nothing of types restrict nothing.
    said = [kinds for kinds in said if kinds]
    return frozenset.intersection(*said) if said else frozenset()


def _kind_of_value(value: Any) -> str:
    kinds = {
        bool: "boolean",
        int: "integer",
        float: "number",
        str: "string",
        list: "array",
        type(None): "null",
    }
    return kinds.get(type(value), "object")
