"""Translates the model's messages into OpenEnv actions, and OpenEnv observations into text.

The Action schema decides how a message becomes an action (its field `metadata` is ignored):

1. If the only field is text, its value is the message, unchanged.
2. Otherwise, a JSON object in the message is the action: alone, in a code fence, or within prose.
3. Otherwise, if exactly one field is required, the message is its value: as text for a text field,
   else as JSON.
4. Otherwise, the observation explains what to write. If the server rejects an action, its error is
   the observation.

An observation becomes text as follows, without null fields and `metadata`:

1. From a tool: the error, or else the result: its `data`, else the texts of its content. Other
   values become JSON.
2. A single field that is text becomes that text; anything else becomes a JSON object.
3. If there is no field, the same applies to the fields of the metadata.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.conversation.tool_calls import refuse_constant
from agentrl.conversation.tools import ToolError
from agentrl.hosting.observations import IMAGES
from agentrl.remote.openenv.protocol import TOOL_ACTIONS

Schema = Mapping[str, Any]
_NO_ARGUMENTS = {"type": "object", "properties": {}}


def has_tools(action_schema: Schema) -> bool:
    """True if actions are calls of tools that the environment lists."""
    return action_schema.get("title") in TOOL_ACTIONS


def tools_from(listed: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The answer to `list_tools`, in the form that chat templates expect."""
    return tuple(
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description") or "",
                "parameters": tool.get("input_schema") or tool.get("inputSchema") or _NO_ARGUMENTS,
            },
        }
        for tool in listed
    )


def action_from(message: str, action_schema: Schema) -> dict[str, Any]:
    """Translate a message into the fields of an action.

    Raises:
        ToolError: the message is not an action; the error explains what to write.
    """
    fields = _fields(action_schema)
    if not fields:
        return {}
    required = [name for name in fields if name in action_schema.get("required", ())]
    one = next(iter(fields)) if len(fields) == 1 else required[0] if len(required) == 1 else None
    is_text = one is not None and _takes_text(fields[one])
    if one is not None and is_text and len(fields) == 1:
        return {one: message}
    found = _json_in(message)
    if isinstance(found, dict) and (one is None or one in found):
        return found
    if one is None:
        raise ToolError(
            "the message has no JSON object. Answer with one that has the fields"
            f" {', '.join(fields)}"
        )
    return {one: message if is_text else message.strip() if found is None else found}


def how_to_act(action_schema: Schema) -> str:
    """Instructions for the model on what to write; empty if a message is used unchanged."""
    fields = _fields(action_schema)
    if len(fields) <= 1 and all(map(_takes_text, fields.values())):
        return ""
    shown = {key: value for key, value in action_schema.items() if key in ("required", "$defs")}
    schema = {"type": "object", "properties": fields, **shown}
    return f"Answer with one JSON object of this schema: {json.dumps(schema, ensure_ascii=False)}"


def what_is_wrong(error: Mapping[str, Any], action_schema: Schema) -> str:
    """The data of a server's error about an action, as text for the model."""
    found = [
        f"{'.'.join(map(str, item.get('loc', ())))}: {item.get('msg')}, got"
        f" {item.get('input')!r:.60}"
        for item in error.get("errors") or ()
        if isinstance(item, dict)
    ]
    wrong = "; ".join(found[:5]) or str(error.get("message"))
    return (
        f"Error: the action does not fit: {wrong}. Its fields are"
        f" {', '.join(_fields(action_schema))}"
    )


def text_from(observation: Mapping[str, Any]) -> str:
    """An observation as text for the model."""
    if "tool_name" in observation:
        return _tool_text(observation)
    shown = {
        name: value
        for name, value in observation.items()
        if name != "metadata" and value is not None
    }
    if not shown:
        shown = {
            name: value
            for name, value in (observation.get("metadata") or {}).items()
            if value is not None and name != IMAGES
        }
    texts = [value for value in shown.values() if isinstance(value, str)]
    return texts[0] if len(shown) == len(texts) == 1 else _as_text(shown or None)


def _tool_text(observation: Mapping[str, Any]) -> str:
    error, result = observation.get("error"), observation.get("result")
    if error:
        return f"Error: {error.get('message') if isinstance(error, dict) else error}"
    if not isinstance(result, dict) or not ("data" in result or "content" in result):
        return _as_text(result)
    text = (
        _as_text(result["data"])
        if result.get("data") is not None
        else _content_text(result.get("content"))
    )
    return f"Error: {text}" if result.get("is_error") or result.get("isError") else text


def _content_text(content: Any) -> str:
    if not isinstance(content, list):
        return _as_text(content)
    return "\n".join(
        (
            item["text"]
            if isinstance(item, dict) and isinstance(item.get("text"), str)
            else _as_text(item)
        )
        for item in content
    )


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _fields(action_schema: Schema) -> dict[str, Any]:
    return {
        name: field
        for name, field in action_schema.get("properties", {}).items()
        if name != "metadata"
    }


def _takes_text(field: Mapping[str, Any]) -> bool:
    """True if a field is, or may be, free text; an enumeration is not."""
    if "enum" in field or "const" in field:
        return False
    options = field.get("anyOf") or field.get("oneOf") or ()
    return field.get("type") == "string" or any(map(_takes_text, options))


def _json_in(message: str) -> Any:
    """The message parsed as JSON, or else the JSON object inside it; None if there is neither."""
    for part in (message, message[message.find("{") : message.rfind("}") + 1]):
        try:
            return json.loads(part, parse_constant=refuse_constant)
        except (ValueError, RecursionError):
            continue
    return None
