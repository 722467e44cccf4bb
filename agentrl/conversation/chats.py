"""Chats as data has them, read into messages: OpenAI's form, ShareGPT's, BFCL's, and what Arrow
makes of them.

    [{"role": "system", "content": "Be brief."},
     {"role": "user", "content": "Well?", "tool_calls": null}]
    [{"from": "human", "value": "Well?"}, {"from": "gpt", "value": "Yes."}]
    [[{"role": "user", "content": [{"type": "text", "text": "Well?"}]}]]

Keys that are null are as if left out: Arrow writes each key of any row into all. `developer` is a
later name of `system`. Calls become what the renderer's messages have
(`agentrl.ToolCall`).
"""

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeGuard, get_args

from agentrl.errors import EnvError, ImageError
from agentrl.tokens.encoded_image import EncodedImage
from agentrl.trajectory import Message, Role, ToolCall

_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}
_TEXT_KEYS = ("content", "value", "text", "parts")
"""Keys under which a message has its text."""
_TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of parts that are text."""
PICTURES = ("image", "image_url", "input_image")
"""Types of parts that are pictures."""


def is_chat(value: Any) -> TypeGuard[Sequence[Any]]:
    """True if a value is meant as the messages of a chat."""
    if not isinstance(value, list | tuple) or not value:
        return False
    first = value[0]
    return is_chat(first) or (isinstance(first, Mapping) and not {"role", "from"}.isdisjoint(first))


def written_chat(text: str) -> Any:
    """The chat that a text is the JSON of, or what Python prints for it, as in a CSV file; None for
    other texts.

    Raises:
        ValueError: it begins like a chat, and cannot be read.
    """
    if _WRITTEN.match(text) is None:
        return None
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            found = read(text)
            return found if is_chat(found) else None
    raise ValueError(
        f"it begins like a chat, and is neither JSON nor a list of Python: {text!r:.80}"
    )


_WRITTEN = re.compile(r"""\s*\[\s*\{\s*["'](?:role|content|from|value)["']\s*:""")


def read_chat(value: Sequence[Any], *, pictures: bool = False) -> tuple[Message, ...]:
    """The messages of a chat. `pictures`: they may have some, as `data:` addresses.

    Raises:
        ValueError: it is none, or has what no model here can read. Says which message, from 1.
    """
    if value and all(map(is_chat, value)):  # turns of BFCL, of which each is a list
        if len(value) > 1:
            raise ValueError(
                f"it has {len(value)} turns with messages of their own, and a task asks once:"
                " choose one, such as tasks.columns={prompt: COLUMN.0}"
            )
        value = value[0]
    return tuple(
        _read_message(one, f"message {number}", pictures=pictures)
        for number, one in enumerate(value, 1)
    )


def question_of(chat: Sequence[Message]) -> tuple[Sequence[Message], str | None]:
    """The question, up to the last message of the user, and the answer after it, if there is one.

    Raises:
        ValueError: the user says nothing, or something other than an answer follows.
    """
    place = max(
        (place for place, message in enumerate(chat) if message.role == "user"), default=None
    )
    if place is None:
        raise ValueError(
            "a chat has a message of the user, and this one is of"
            f" {', '.join(message.role for message in chat) or 'nobody'}"
        )
    after = chat[place + 1 :]
    if any(message.role == "system" for message in after):
        raise ValueError(
            "a chat has a message of the user at its end, and this one ends with a system message"
        )
    answers = [message.said for message in after if message.role == "assistant" and message.said]
    return chat[: place + 1], answers[-1] if answers else None


def as_json(message: Message) -> dict[str, Any]:
    """A message in the form that `read_chat` takes."""
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": dict(call.arguments)},
        }
        for call in message.tool_calls
    ]
    extra = {"reasoning": message.reasoning, "tool_calls": calls, "name": message.name}
    extra["tool_call_id"] = message.tool_call_id
    said: Any = message.said
    if message.images:
        shown = [{"type": "image_url", "image_url": {"url": one.address}} for one in message.images]
        said = [*shown, {"type": "text", "text": said}]
    return {
        "role": message.role,
        "content": said,
        **{key: value for key, value in extra.items() if value},
    }


def history_in(info: Mapping[str, Any]) -> list[Message]:
    """The messages that a reset's info puts before the first observation.

    Raises:
        EnvError: they are no chat.
    """
    history = info.get("history") or ()
    if not isinstance(history, list | tuple):
        raise EnvError(f"a reset gave info['history'] as {history!r:.80}: write a list of messages")
    try:
        return [replace(message, given=True) for message in read_chat(history, pictures=True)]
    except ValueError as error:
        raise EnvError(f"a reset gave info['history'] that is no chat: {error}") from error


def opening(
    info: Mapping[str, Any], observation: str, images: tuple[EncodedImage, ...], *, tools: bool
) -> list[Message]:
    """The messages that a reset shows: those of its info, and the observation. With `tools`, it is
    the result of an answer that was given before it.

    Raises:
        EnvError: those of the info are no chat.
    """
    before = history_in(info)
    answered = tools and bool(before) and before[-1].role == "assistant"
    return [*before, Message("tool" if answered else "user", observation, images=images)]


def _read_message(raw: Any, where: str, *, pictures: bool) -> Message:
    if not isinstance(raw, Mapping):
        raise ValueError(f"{where} is {raw!r:.80}, not an object with role and content")
    one = {key: value for key, value in raw.items() if value is not None}
    named = one.get("role", one.get("from"))
    role = _ROLES.get(str(named).casefold())
    if role is None:
        had = (
            f"has the role {named!r:.80}"
            if named is not None
            else f"has no role, but {', '.join(one) or 'nothing'}"
        )
        raise ValueError(f"{where} {had}: write {', '.join(get_args(Role))} or developer")
    said = next((one[key] for key in _TEXT_KEYS if key in one), None)
    # ShareGPT writes a call as a message of its own, whose text is the call.
    calls = tuple(_calls(one, f"{where} ({named})", said if named == "function_call" else None))
    if said is None and not calls:
        raise ValueError(f"{where} ({named}) has no content, but {', '.join(one)}")
    images: tuple[EncodedImage, ...] = ()
    text = ""
    if said is not None and named != "function_call":
        place = f"{where} ({named})"
        images = _images(said, place) if pictures else ()
        text = _text(said, place, pictures=pictures)
    if calls:
        text = "\n".join(filter(None, (text, *(call.render() for call in calls))))
    reasoning = (
        one.get("reasoning_content", one.get("reasoning", "")) if role == "assistant" else ""
    )
    answers = str(one.get("tool_call_id", "")) if role == "tool" else ""
    return Message(
        role,
        text,
        str(reasoning),
        calls,
        answers,
        str(one.get("name", "")) if role == "tool" else "",
        images=images,
    )


def _text(said: Any, where: str, *, pictures: bool) -> str:
    if isinstance(said, str):
        return said
    if not isinstance(said, list | tuple):
        raise ValueError(
            f"{where} has the content {said!r:.80}: write a text, or a list of parts that are texts"
            " and pictures"
        )
    texts = [part for part in said if not (pictures and _is_picture(part))]
    return "".join(_text_of_part(part, where, pictures=pictures) for part in texts)


def _is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in PICTURES


def _images(said: Any, where: str) -> tuple[EncodedImage, ...]:
    """The pictures of a message, which stand before its text."""
    if not isinstance(said, list | tuple):
        return ()
    return tuple(_image(part, where) for part in said if _is_picture(part))


def _image(part: Mapping[str, Any], where: str) -> EncodedImage:
    kind = part["type"]
    given = part.get("image_url" if kind == "input_image" else kind)
    address = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(address, str):
        raise ValueError(
            f"{where} has a part of type {kind!r} without a picture: write its bytes, as"
            " data:image/png;base64,..."
        )
    try:
        return EncodedImage.from_address(address)
    except ImageError as error:
        raise ValueError(f"{where} has a picture that is not taken: {error}") from error


def _text_of_part(part: Any, where: str, *, pictures: bool) -> str:
    if isinstance(part, str):
        return part
    kind = (
        part.get("type", "text" if "text" in part else None)
        if isinstance(part, Mapping)
        else type(part).__name__
    )
    if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
        taken = "texts and pictures" if pictures else "texts"
        raise ValueError(f"{where} has a part of type {kind!r}, and {taken} alone are read here")
    return str(part["text"])


def _calls(one: Mapping[str, Any], where: str, written: Any) -> Iterator[ToolCall]:
    """The calls of a message: in a list, in the older `function_call`, or as its text in JSON."""
    listed = one.get("tool_calls") or [one[key] for key in ("function_call",) if key in one]
    for raw in [*listed, *([written] if written is not None else [])]:
        yield _call(_parse_json(raw, where) if isinstance(raw, str) else raw, where)


def _call(raw: Any, where: str) -> ToolCall:
    function = raw.get("function") or raw if isinstance(raw, Mapping) else {}
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(
            f"{where} has the call {raw!r:.80}: write an object with name and arguments"
        )
    given = function.get("arguments", function.get("parameters"))
    arguments = _parse_json(given, where) if isinstance(given, str) and given else given or {}
    if not isinstance(arguments, Mapping):
        raise ValueError(
            f"{where} has a call of {function['name']!r} whose arguments are no object:"
            f" {given!r:.80}"
        )
    # Arrow fills in null for each argument that any call of the data has.
    present = {name: value for name, value in arguments.items() if value is not None}
    call = ToolCall(function["name"], present, str(raw.get("id") or ""))
    if not call.is_plain:
        raise ValueError(
            f"{where} has a call of {call.name!r} with an infinite number or too deep nesting"
        )
    return call


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} has a call that is not JSON: {error}") from None
