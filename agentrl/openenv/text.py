"""Between what a model writes and reads, and what an OpenEnv environment takes and says.

A message becomes an action by the Action schema (`metadata` does not count among its fields):

1. A single field of text is the message itself, as it is.
2. Else a JSON object in the message is the action: alone, in a fence, or with prose around it.
3. Else, where one field alone is required, the message is that field: as JSON, or as text where the field is one.
4. Else the observation says what to write. The server's complaint about an action becomes an observation too.

An observation becomes a text, fields that are null (and `metadata`) left out:

1. Of a tool: its error, or its result (its `data`, else the texts of its content), as it is, or as JSON.
2. One field alone that is a text is that text; several are a JSON object.
3. Where there is no field, the same is done with the metadata.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.openenv.protocol import TOOL_ACTIONS
from agentrl.rollout.tools import ToolError

Schema = Mapping[str, Any]
_NO_ARGUMENTS = {"type": "object", "properties": {}}


def has_tools(action_schema: Schema) -> bool:
    """Whether actions are calls of tools, which the environment lists."""
    return action_schema.get("title") in TOOL_ACTIONS


def tools_from(listed: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """What `list_tools` says, as chat templates expect it."""
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
    """The fields of the action that a message stands for.

    Raises:
        ToolError: it stands for none; says what to write.
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
        raise ToolError(f"the message holds no JSON object. Answer with one of the fields {', '.join(fields)}")
    return {one: message if is_text else message.strip() if found is None else found}


def how_to_act(action_schema: Schema) -> str:
    """Tells the model what to write; nothing where a message is taken as it is."""
    fields = _fields(action_schema)
    if len(fields) <= 1 and all(map(_takes_text, fields.values())):
        return ""
    shown = {key: value for key, value in action_schema.items() if key in ("required", "$defs")}
    schema = {"type": "object", "properties": fields, **shown}
    return f"Answer with one JSON object of this schema: {json.dumps(schema, ensure_ascii=False)}"


def what_is_wrong(error: Mapping[str, Any], action_schema: Schema) -> str:
    """What a server found wrong with an action: the data of its error, as a text for the model."""
    found = [
        f"{'.'.join(map(str, item.get('loc', ())))}: {item.get('msg')}, got {item.get('input')!r:.60}"
        for item in error.get("errors") or ()
        if isinstance(item, dict)
    ]
    wrong = "; ".join(found[:5]) or str(error.get("message"))
    return f"Error: the action does not fit: {wrong}. Its fields are {', '.join(_fields(action_schema))}"


def text_from(observation: Mapping[str, Any]) -> str:
    """An observation as the model reads it."""
    if "tool_name" in observation:
        return _tool_text(observation)
    shown = {name: value for name, value in observation.items() if name != "metadata" and value is not None}
    if not shown:
        shown = {name: value for name, value in (observation.get("metadata") or {}).items() if value is not None}
    texts = [value for value in shown.values() if isinstance(value, str)]
    return texts[0] if len(shown) == len(texts) == 1 else _text_of(shown or None)


def _tool_text(observation: Mapping[str, Any]) -> str:
    error, result = observation.get("error"), observation.get("result")
    if error:
        return f"Error: {error.get('message') if isinstance(error, dict) else error}"
    if not isinstance(result, dict) or not ("data" in result or "content" in result):
        return _text_of(result)
    text = _text_of(result["data"]) if result.get("data") is not None else _content_text(result.get("content"))
    return f"Error: {text}" if result.get("is_error") or result.get("isError") else text


def _content_text(content: Any) -> str:
    if not isinstance(content, list):
        return _text_of(content)
    return "\n".join(
        item["text"] if isinstance(item, dict) and isinstance(item.get("text"), str) else _text_of(item)
        for item in content
    )


def _text_of(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _fields(action_schema: Schema) -> dict[str, Any]:
    return {name: field for name, field in action_schema.get("properties", {}).items() if name != "metadata"}


def _takes_text(field: Mapping[str, Any]) -> bool:
    """Whether a field is a free text, or may be one; one of a few words is not."""
    if "enum" in field or "const" in field:
        return False
    options = field.get("anyOf") or field.get("oneOf") or ()
    return field.get("type") == "string" or any(map(_takes_text, options))


def _json_in(message: str) -> Any:
    """The JSON value that a message is, or the object that it holds; none where there is none."""
    for part in (message, message[message.find("{") : message.rfind("}") + 1]):
        try:
            return json.loads(part, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            continue
    return None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
