"""Takes the pictures out of an OpenEnv observation, for the option `pictures: true`.

Pictures are, wherever they stand among its fields:

1. a text that is an address with the bytes of a PNG or JPEG file (`data:image/png;base64,...`), or
   these bytes in base64 (BrowserGym's `screenshot` in some versions);
2. a list of lists of numbers from 0 to 255 in the shape of pixels (`agentrl/tokens/pixels.py`), or
   a flat list of them beside its shape: `screen` and `screen_shape`, as in Atari's;
3. the pictures in the content of a tool's result (`{"type": "image", "data": ...}`), as in MCP.
"""

import base64
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.errors import EnvError, ImageError
from agentrl.tokens.encoded_image import DATA_ADDRESS, MEDIA_TYPES
from agentrl.tokens.pixels import is_of_pixels, pictures_of

_FILE_PREFIXES = ("iVBORw0KGgo", "/9j/")
"""Of PNG and JPEG files in base64."""
_SHORTEST_FILE = 60
"""Characters of the smallest file in base64."""
_SHAPE = "_shape"


def taken_pictures(observation: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The observation without its pictures, and these as files in base64, in their order.

    Raises:
        EnvError: pixels are too many for a picture.
    """
    found: list[str] = []
    rest = {}
    for name, value in observation.items():
        if name == "metadata" or _is_shape(name, observation):
            rest[name] = value
        elif (pixels := _flat_pixels(name, observation)) is not None:
            found += _encode_pictures(name, pixels)
        elif (left := _take_pictures(name, value, found)) is not None:
            rest[name] = left
    # A shape whose pixels were taken says nothing any more.
    used = {
        name for name in rest if _is_shape(name, observation) and name[: -len(_SHAPE)] not in rest
    }
    return {name: value for name, value in rest.items() if name not in used}, found


def _is_shape(name: str, observation: Mapping[str, Any]) -> bool:
    return name.endswith(_SHAPE) and name[: -len(_SHAPE)] in observation


def _take_pictures(name: str, value: Any, found: list[str]) -> Any:
    """A value without its pictures, which are added to those found; None if nothing is left."""
    if isinstance(value, str):
        if (file := _file_in(value)) is None:
            return value
        found.append(file)
        return None
    if isinstance(value, Mapping):
        if value.get("type") == "image" and isinstance(value.get("data"), str):
            found.append(value["data"])
            return None
        rest, inner = taken_pictures(value)
        found += inner
        return rest or None if inner else value
    return _take_from_list(name, value, found) if isinstance(value, list) else value


def _take_from_list(name: str, value: list[Any], found: list[str]) -> Any:
    if (pixels := _pixels(value)) is not None:
        found += _encode_pictures(name, pixels)
        return None
    before = len(found)
    kept = [left for one in value if (left := _take_pictures(name, one, found)) is not None]
    return value if len(found) == before else kept or None


def _file_in(text: str) -> str | None:
    """The picture that a text is, in base64."""
    if text.startswith(_FILE_PREFIXES) and len(text) >= _SHORTEST_FILE:
        return text
    address = DATA_ADDRESS.match(text)
    if address is None or address["type"].lower() not in MEDIA_TYPES:
        return None
    return text[address.end() :]


def _pixels(value: list[Any]) -> npt.NDArray[np.uint8] | None:
    """The pixels that a list of lists is."""
    if not value or not isinstance(value[0], list) or not value[0]:
        return None
    return _as_pixels(_as_array(value))


def _flat_pixels(name: str, observation: Mapping[str, Any]) -> npt.NDArray[np.uint8] | None:
    """The pixels in a flat list whose shape stands beside it."""
    value, shape = observation[name], observation.get(name + _SHAPE)
    if not isinstance(value, list) or not isinstance(shape, list):
        return None
    if not all(type(size) is int and size > 0 for size in shape) or prod(shape) != len(value):
        return None
    array = _as_array(value)
    return _as_pixels(array.reshape(shape)) if array.shape == (len(value),) else None


def _as_array(value: list[Any]) -> npt.NDArray[Any]:
    """The list as an array, which has no numbers if its lists have several lengths."""
    try:
        return np.array(value)
    except ValueError:
        return np.array([], object)


def _as_pixels(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8] | None:
    if array.dtype.kind not in "iu" or not is_of_pixels(array.shape):
        return None
    return array.astype(np.uint8) if array.min() >= 0 and array.max() <= 255 else None


def _encode_pictures(name: str, pixels: npt.NDArray[np.uint8]) -> list[str]:
    try:
        return [base64.b64encode(image.data).decode() for image in pictures_of(pixels)]
    except ImageError as error:
        raise EnvError(f"the field {name!r} of an observation: {error}") from error


__all__ = ["taken_pictures"]
