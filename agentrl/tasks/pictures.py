"""Pictures in rows of data, as tasks have them: PNG or JPEG files in base64.

    {"prompt": "What is this?", "images": ["shapes/7.png"], "answer": "a circle"}
    {"prompt": "<image>What is this?", "images": [{"bytes": ..., "path": "7.png"}], ...}
    {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", ...}]}], ...}

A picture is the path of a file in the folder of the data, its bytes (in Parquet, and in datasets of
the hub), or a `data:` address. None is ever fetched, and no file outside of that folder is read.
The marks `<image>` of a prompt, and parts of a chat that name no picture, stand for the pictures of
the row, in their order; without any, all belong to the question. A message shows its pictures
before its text.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.conversation.chats import PICTURES, is_chat
from agentrl.errors import ImageError
from agentrl.tasks.rows import BadRowError
from agentrl.tokens.encoded_image import EncodedImage

MARK = "<image>"
"""Where a prompt has a picture of its row."""
_KEYS = ("bytes", "image", "image_url", "url", "path")
"""Under which a mapping has its picture, the first that is not null."""


def placed_pictures(options: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """The options of a row with its pictures as `data:` addresses, those that have a place in the
    prompt there, and others under `images`.

    Raises:
        BadRowError: one is no picture, or there are more or fewer than places.
    """
    listed = _pictures_of(options)
    rest = {name: value for name, value in options.items() if name not in ("image", "images")}
    if "image" in options and options.get("images") is not None:
        rest["image"] = options["image"]  # another column, which rewards may read
    places = _Places(
        [_address(one, folder, number) for number, one in enumerate(listed, 1)], folder
    )
    prompt = rest.get("prompt")
    if isinstance(prompt, str) and listed:
        rest["prompt"] = places.text(prompt)
    elif is_chat(prompt):
        rest["prompt"] = [places.message(message) for message in _first_turn(prompt)]
    if not places.used:
        return {**rest, "images": places.addresses} if listed else rest
    if places.used != len(listed):
        raise BadRowError(
            f"its prompt has {places.used} places for pictures ({MARK}), and there are"
            f" {len(listed)} in the column images"
        )
    if isinstance(prompt, str):  # a text has no parts: its pictures stand before it
        rest["images"] = places.addresses
    return rest


def _pictures_of(options: Mapping[str, Any]) -> Sequence[Any]:
    given = options.get("images")
    if given is None:
        given = options.get("image")
    if given is None:
        return ()
    return given if isinstance(given, list | tuple) else [given]


def _first_turn(chat: Sequence[Any]) -> Sequence[Any]:
    """The messages of a chat that may be a list of one turn (BFCL)."""
    return chat[0] if len(chat) == 1 and is_chat(chat[0]) else chat


@dataclass
class _Places:
    """The places of the row's pictures in its prompt, in the order in which they come."""

    addresses: list[str]
    folder: Path | None
    used: int = 0
    _own: int = field(default=0)

    def text(self, text: str) -> str:
        """A text without its marks."""
        self.used += text.count(MARK)
        return text.replace(MARK, "")

    def message(self, message: Any) -> Any:
        """A message whose pictures are `data:` addresses."""
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str | list):
            return message
        content = message["content"]
        if isinstance(content, str):
            if not self.addresses or MARK not in content:
                return message
            shown = [self._next() for _ in range(content.count(MARK))]
            said = {"type": "text", "text": content.replace(MARK, "")}
            return {**message, "content": [*shown, said]}
        return {**message, "content": [*self._parts(content)]}

    def _parts(self, parts: Sequence[Any]) -> Iterator[Any]:
        for part in parts:
            if not isinstance(part, Mapping) or part.get("type") not in PICTURES:
                yield part
            elif (given := _named_picture(part)) is None:
                yield self._next()
            else:
                self._own += 1
                yield _image_part(_address(given, self.folder, self._own))

    def _next(self) -> dict[str, Any]:
        """The part of the next picture of the row; if there is none, the number of places tells."""
        self.used += 1
        if self.used <= len(self.addresses):
            return _image_part(self.addresses[self.used - 1])
        return {"type": "text", "text": ""}


def _image_part(address: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address}}


def _named_picture(value: Mapping[str, Any]) -> Any:
    """The picture that a mapping names, if any."""
    return next((value[key] for key in _KEYS if value.get(key) is not None), None)


def _address(value: Any, folder: Path | None, number: int) -> str:
    """The `data:` address of a picture of a row.

    Raises:
        BadRowError: it is none. `number` says which, from 1.
    """
    try:
        return _read(value, folder).address
    except ImageError as error:
        raise BadRowError(f"picture {number}: {error}") from error


def _read(value: Any, folder: Path | None) -> EncodedImage:
    if isinstance(value, Mapping):
        given = _named_picture(value)
        if given is None:
            raise ImageError(f"{dict(value)!r:.80} has neither bytes nor a path")
        return _read(given, folder)
    if not isinstance(value, str):
        raise ImageError(
            f"{value!r:.80} is {type(value).__name__}: write the path of a PNG or JPEG file, its"
            " bytes, or a data: address"
        )
    if EncodedImage.is_address(value):
        return EncodedImage.from_address(value)
    if folder is None:
        raise ImageError(f"{value!r:.80} is the path of a file, and the data have no folder")
    # By its text, without resolving links: the folder's owner may have put links there.
    path = Path(os.path.normpath(folder / value))
    if not path.is_relative_to(os.path.normpath(folder)):
        raise ImageError(f"{value!r:.80} is outside of the data's folder {folder}")
    try:
        return EncodedImage.from_file(path)
    except OSError as error:
        raise ImageError(f"{value!r:.80} cannot be read: {error}") from error


__all__ = ["MARK", "placed_pictures"]
